"""Runs `edge-client run`: prints one prompt's text as it comes, or one JSON object at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.errors import EXIT_SIGNALLED, OutriderError, UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.logs import setup_logging
from outrider.common.types import FinishReason, ModelInfo, TokenLogprobs
from outrider.edge_client.commands.json_output import JsonOutput
from outrider.edge_client.config.gate import gate_warning
from outrider.edge_client.config.methods import check_draft_paths, is_reproducible, judging_method, warning
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.slow_draft import slow_draft_note
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import runtime_of
from outrider.edge_client.session.factory import Edge, create_edge, draw_seed
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.ui.terminal import TextPrinter, can_redraw, readable, summary

if TYPE_CHECKING:
    from outrider.edge_client.ui.live import LiveView


def run(
    config: RunConfig,
    prompt: str | None,
    prompt_file: Path | None,
    output: JsonOutput | None,
    is_live: bool = False,
) -> int:
    """Returns the exit status. Text that was decoded before an error is printed before the error is
    raised; with an `output` such an error is part of the printed object, and not raised."""
    setup_logging(config.logs.level)
    is_live = is_live and _can_live(output is not None)
    text = read_prompt(prompt, prompt_file)
    seed = config.seed if config.seed is not None else draw_seed()
    check_draft_paths(config, config.mode.has_draft)
    edge = create_edge(config)
    session = edge.session(text, seed)
    for line in filter(None, (warning(config), gate_warning(config))):
        print(f"edge-client: {line}", file=sys.stderr)
    error: OutriderError | None = None
    # NO_COLOR is no setting of ours but a convention of terminals (no-color.org).
    has_colour = not os.environ.get("NO_COLOR")
    events = session.generate()
    # A thread makes the live view's events, and only it could close them.
    ends = contextlib.nullcontext() if is_live else contextlib.closing(events)
    with _cancel_on_signal(session, is_live) as received, ends:
        try:
            if output is not None:
                deque(events, maxlen=0)
            else:
                _show(session, events, config, edge.tokenizer.token_text, has_colour, is_live)
        except OutriderError as failure:
            error = failure
    result = session.result
    status = 0
    if result.finish_reason is FinishReason.CANCELLED:
        status = EXIT_SIGNALLED + (received[0] if received else signal.SIGINT)
    if output is not None:
        status = error.exit_code if error else status
        output.print(make_report(edge, result, seed, error, status))
    elif result.token_ids:
        labels = (*edge.labels, *(result.model.labels if result.model else ()))
        is_coloured = has_colour and sys.stderr.isatty()
        print(summary(result, labels, seed, is_coloured, judging_method(config)), file=sys.stderr)
    if note := slow_draft_note(config.mode, result.stats):
        print(f"edge-client: {note}", file=sys.stderr)
    edge.close()
    if error is not None and output is None:
        raise error
    if error is not None:
        print(f"edge-client: {error}", file=sys.stderr)
    return status


def _can_live(is_json: bool) -> bool:
    if is_json:
        raise UsageError("--live and --json do not go together: give one of them")
    with needs_extra("live", "--live"):
        import rich  # noqa: F401
    if not can_redraw(sys.stdout):
        print("edge-client: --live needs a terminal on standard output; plain text instead", file=sys.stderr)
        return False
    return True


def _show(
    session: EdgeSession,
    events: Iterator[SessionEvent],
    config: RunConfig,
    text_of: Callable[[int], str],
    has_colour: bool,
    is_live: bool,
) -> None:
    view: TextPrinter | LiveView
    shown: Iterator[SessionEvent | None]
    if is_live:
        from outrider.edge_client.ui.live import LiveView, ticking

        shown, is_alone = ticking(events), config.mode is ExecutionMode.EDGE_ONLY
        view = LiveView(
            session,
            sys.stdout,
            has_colour,
            text_of=text_of,
            is_alone=is_alone,
            is_reverified=config.outage.reverify,
        )
    else:
        shown = readable(events, sys.stdout, config.outage.reverify)
        view = TextPrinter(sys.stdout, has_colour)
    try:
        for event in shown:
            view.show(event)
    finally:
        view.finish()


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Returns the prompt from the argument, a file, or standard input (`-`, or a pipe). Raises
    `UsageError`."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("give a PROMPT or --prompt-file, not both")
    try:
        if prompt_file is not None:
            text = prompt_file.read_text(encoding="utf-8")
        elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
            text = sys.stdin.read()
        elif prompt is None:
            raise UsageError(
                "no prompt: give it as an argument, with --prompt-file F, or on standard input; "
                "`edge-client chat` holds a conversation"
            )
        else:
            text = prompt
    except OSError as error:
        raise UsageError(f"cannot read {prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error
    if not text:
        raise UsageError(
            "the prompt is empty: give it as an argument, with --prompt-file F, or on standard input"
        )
    return text


def make_report(
    edge: Edge, result: SessionResult, seed: int, error: OutriderError | None, exit_code: int
) -> dict[str, object]:
    """Returns the object that `--json` prints; `exact` is None where nothing was generated."""
    model, method = result.model, judging_method(edge.config)
    is_exact = (method is None or method.is_exact) and result.num_unverified_tokens == 0
    report: dict[str, object] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "token_origins": [str(origin) for origin in result.origins],
        "token_is_verified": list(result.is_verified),
        "token_is_approximate": list(result.token_is_approximate),
        "finish_reason": str(result.finish_reason),
        "seed": seed,
        "num_unverified_tokens": result.num_unverified_tokens,
        "num_approximate_tokens": sum(result.token_is_approximate),
        "mode": edge.config.mode,
        "method": method,
        "gate": edge.config.gate.use,
        "exact": is_exact if result.token_ids else None,
        "reproducible": is_reproducible(edge.config, model, result.num_unverified_tokens),
        "target_fingerprint": model.target_fingerprint if model else None,
        "draft_fingerprint": _draft_fingerprint(edge, model),
        "draft_runtime": runtime_of(edge.draft),
        "target": f"{model.model_id} ({model.dtype}, {model.device})" if model else None,
        "labels": [*edge.labels, *(model.labels if model else ())],
        "error": str(error) if error else None,
        "exit_code": exit_code,
        "stats": result.stats.summary(result.origins),
    }
    if edge.config.logprobs:
        report["logprobs"] = [
            _logprobs(edge.tokenizer, entry, edge.config.logprobs) for entry in result.logprobs
        ]
    return report


def _logprobs(
    tokenizer: EdgeTokenizer, entry: TokenLogprobs | None, num_top: int
) -> dict[str, object] | None:
    """Returns a token's log-probabilities; None where the target gave none: kept unverified, or chosen here
    (method candidates)."""
    if entry is None:
        return None
    top = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
    return {
        "raw_logprob": entry.raw_logprob,
        "processed_logprob": entry.processed_logprob,
        "top": [{"id": i, "token": tokenizer.token_text(i), "logprob": logprob} for i, logprob in top],
    }


def _draft_fingerprint(edge: Edge, model: ModelInfo | None) -> str | None:
    """Returns the fingerprint of the draft that drafted: ours, or the verifier's in mode co-located."""
    if edge.draft is not None:
        return edge.draft.fingerprint
    return model.draft_fingerprint if model and edge.config.mode is ExecutionMode.CO_LOCATED else None


@contextlib.contextmanager
def _cancel_on_signal(session: EdgeSession, is_live: bool) -> Iterator[list[int]]:
    """Ends the text at the first Ctrl-C or SIGTERM, which closes the session; yields the signals received. A second
    Ctrl-C ends the process at once (the live view first restores the screen), as a second SIGTERM does."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        has_screen = is_live and number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if has_screen else signal.SIG_DFL)
        received.append(number)
        session.cancel()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
