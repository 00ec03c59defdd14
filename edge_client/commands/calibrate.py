"""Runs `edge-client calibrate`: sets a gate's thresholds from text, and measures what the commit-gate saves
and costs."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.config.loader import add_flags
from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.progress import show_progress
from outrider.edge_client.config.run_config import RunConfig

if TYPE_CHECKING:
    from outrider.edge_client.calibration.curve import Curve
    from outrider.edge_client.calibration.passages import ValidationText
    from outrider.edge_client.calibration.result import CalibrationResult
    from outrider.edge_client.session.factory import Edge

PERCENTILES = (50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0)
_BAR = 24  # characters of the progress bar
_DRAWING = (
    "outrider.experiments.report.gate_curve"  # imported by name: this package must not import experiments
)
_SETTINGS = frozenset(  # of a run that a calibration uses
    ("verifier", "draft", "draft_threads", "temperature", "top_k", "top_p", "min_p", "method", "support_size")
    + ("depth_policy", "num_speculative_tokens", "seed", "transport", "timeout_ms", "recover_timeout_s")
    + ("gate_rules", "gate_ner", "gate_rare_per_million", "gate_max_hard_ratio", "log_level")
    + ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure_token")
)
_DESCRIPTION = """Sets a gate's thresholds from validation text: percentiles of the draft's own signals at
the tokens it drafts. Without a verifier it drafts along the text itself. With --verifier it drafts along
the target's own text after passages, and measures what the commit-gate saves and costs at several
percentiles.

  edge-client calibrate --text notes/*.md --out gate.yaml
  edge-client calibrate --text notes/*.md --out gate.yaml --verifier 127.0.0.1:7077 --svg curve.svg
  edge-client run --gate stop --gate-file gate.yaml "Dear"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `calibrate`."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s --out FILE [OPTION ...]"  # argparse would name every option
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help='text of the kind that will be generated: UTF-8, or .jsonl with "text" or "prompt" on every line; '
        "default: held-out prompts beside the embedded draft",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="gate file to write")
    parser.add_argument(
        "--percentile",
        type=float,
        default=80.0,
        metavar="P",
        help="percentile of each signal that becomes its threshold; default 80",
    )
    parser.add_argument(
        "--variance",
        action="store_true",
        help="also set a threshold of the variance under dropout, which a run then computes for every token; "
        "the draft needs its variant for that",
    )
    parser.add_argument(
        "--passages",
        type=int,
        default=32,
        metavar="N",
        help="passages of the text to draft after; default 32",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="length of a passage; default 64"
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=96,
        metavar="N",
        help="tokens to draft along after each passage; default 96",
    )
    parser.add_argument(
        "--curve",
        default=",".join(f"{each:g}" for each in PERCENTILES),
        metavar="P,P,...|none",
        help="with a verifier: percentiles to measure; default %(default)s",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the curve's points as CSV")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curve; needs outrider[report]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, only=_SETTINGS)


def main(namespace: argparse.Namespace) -> int:
    """Returns 0. Raises `OutriderError`."""
    from outrider.common.process.logs import setup_logging
    from outrider.edge_client.calibration.measuring import ungated, with_variance
    from outrider.edge_client.calibration.passages import read_texts
    from outrider.edge_client.config.flags import load_run_config
    from outrider.edge_client.session.factory import create_edge
    from outrider.edge_client.transport.link.probe import probe
    from outrider.edge_client.transport.link.security import link_security

    loaded = load_run_config(namespace)
    has_target = loaded.origins["verifier"] != "default"
    percentiles = _check(namespace, has_target)
    _check_rules(loaded.value)
    config = ungated(loaded.value)
    setup_logging(config.logs.level)
    draw = _drawing() if namespace.svg else None
    text = read_texts(namespace.text or [_embedded_text(config)])
    if has_target:  # a session would wait for a verifier that is not there, and say nothing
        probe(config.verifier, link_security(config.connection, config.verifier), count=1)
    edge = create_edge(with_variance(config) if namespace.variance else config)
    try:
        result = _calibrate(namespace, loaded.value, edge, text, has_target, percentiles)
    finally:
        edge.close()
        show_progress("")
    if result.curve is not None:
        if namespace.csv:
            from outrider.edge_client.calibration.curve import curve_csv

            with _naming("--csv", namespace.csv):
                namespace.csv.write_text(curve_csv(result.curve.points), encoding="utf-8")
        if draw is not None:
            with _naming("--svg", namespace.svg):
                namespace.svg.write_text(draw(result.curve), encoding="utf-8")
    print(json.dumps(result.as_json()) if namespace.json else result.as_text())
    return 0


def _calibrate(
    namespace: argparse.Namespace,
    asked: RunConfig,
    edge: Edge,
    text: ValidationText,
    has_target: bool,
    percentiles: Sequence[float],
) -> CalibrationResult:
    """`asked` has the gate's own settings, `edge` is loaded without."""
    from outrider.edge_client.calibration.measuring import Calibration
    from outrider.edge_client.calibration.passages import cut_passages
    from outrider.edge_client.calibration.result import make_result
    from outrider.edge_client.gate.file import write_gate_file

    draft = edge.draft
    assert draft is not None, "a calibration drafts"
    if not draft.signal_names:
        strategy = asked.draft.strategy
        raise UsageError(f"calibrate needs a draft that measures signals; draft_strategy {strategy} has none")
    passages = cut_passages(
        text.documents,
        edge.tokenizer.encode,
        num_passages=namespace.passages,
        num_prompt_tokens=namespace.prompt_tokens,
        num_following_tokens=namespace.new_tokens,
        needs_following=not has_target,
    )
    num_texts = len(passages) * (2 + (2 + len(percentiles) if percentiles else 0) if has_target else 1)
    calibration = Calibration(edge, passages, asked, namespace.new_tokens, _progress(num_texts))
    texts = calibration.cloud_only() if has_target else [each.following_ids for each in passages]
    samples = calibration.samples(texts)
    if not samples:
        raise UsageError("the draft drafted nothing: --prompt-tokens may be past its context")
    result = make_result(
        samples,
        text,
        asked,
        draft.fingerprint,
        percentile=namespace.percentile,
        target_fingerprint=calibration.target_fingerprint,
    )
    with _naming("--out", namespace.out):
        write_gate_file(namespace.out, result.gate_file)
    if percentiles:
        result = replace(result, curve=calibration.curve(texts, samples, percentiles, namespace.out))
    return replace(result, out=namespace.out)


# --------------------------------------------------------------------------------------------- arguments


def _check(namespace: argparse.Namespace, has_target: bool) -> tuple[float, ...]:
    _check_percentile(namespace.percentile, "--percentile")
    for flag in ("passages", "prompt_tokens", "new_tokens"):
        if (value := getattr(namespace, flag)) < (2 if flag == "new_tokens" else 1):
            raise UsageError(f"--{flag.replace('_', '-')} {value}: want more")
    for flag in ("out", "csv", "svg"):
        path: Path | None = getattr(namespace, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}: there is no directory {path.parent}")
    wanted = () if namespace.curve == "none" else tuple(namespace.curve.split(","))
    if not (has_target and wanted):
        for flag in ("csv", "svg"):
            if getattr(namespace, flag) is not None:
                reason = "--curve is none" if has_target else "it takes a --verifier to measure a curve"
                raise UsageError(f"--{flag}: there is no curve: {reason}")
        return ()
    try:
        percentiles = tuple(sorted({float(each) for each in wanted}))
    except ValueError:
        raise UsageError(f"--curve {namespace.curve}: want percentiles with commas, or none") from None
    for each in percentiles:
        _check_percentile(each, "--curve")
    return percentiles


def _check_percentile(value: float, flag: str) -> None:
    if not 0 < value < 100:
        raise UsageError(f"{flag} {value:g}: want a percentile between 0 and 100")


def _check_rules(config: RunConfig) -> None:
    from outrider.edge_client.config.gate import split_names
    from outrider.edge_client.gate.rules import RuleNeeds, create_rules
    from outrider.edge_client.gate.words import WordCounts

    names = split_names(config.gate.rules)
    create_rules(names, RuleNeeds(config.gate.ner, WordCounts()))
    if config.gate.rare_per_million is not None and "rare" not in names:
        raise UsageError("--gate-rare-per-million goes with the rule rare: add it to --gate-rules")


def _embedded_text(config: RunConfig) -> Path:
    """Returns the prompts beside the embedded draft. Raises `UsageError` where there are none, or where
    another draft is configured, whose text would be of another kind."""
    from outrider.edge_client.config.run_config import default_draft_dir

    path = default_draft_dir().parent / "prompts.jsonl"
    if config.draft.directory or not path.is_file():
        raise UsageError("--text FILE ...: name some text of the kind that will be written")
    return path


def _drawing() -> Callable[[Curve], str]:
    """Raises `UsageError` where there is nothing to draw with; it draws at the end of a long measurement."""
    with needs_extra("report", "--svg"):
        importlib.import_module("matplotlib")
        draw: Callable[[Curve], str] = importlib.import_module(_DRAWING).draw_curve
        return draw


# ------------------------------------------------------------------------------------------------ output


@contextmanager
def _naming(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from error


def _progress(num_texts: int) -> Callable[[str], None]:
    start_s, num_done = time.monotonic(), 0

    def show(what: str) -> None:
        nonlocal num_done
        num_done += 1
        left_s = (time.monotonic() - start_s) / num_done * (num_texts - num_done)
        filled = int(_BAR * num_done / num_texts)
        bar = "#" * filled + "." * (_BAR - filled)
        show_progress(f"[{bar}] {num_done} of {num_texts} texts, about {left_s:.0f} s left: {what}")

    return show
