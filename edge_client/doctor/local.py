"""Checks what needs no network: the draft, the chat template, the clock."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

from outrider.common.errors import OutriderError
from outrider.common.process.extras import how_to_install
from outrider.common.types import SamplingParams
from outrider.edge_client.config.run_config import RunConfig, draft_dir
from outrider.edge_client.doctor.finding import Finding, fault, ok, skipped, warning
from outrider.edge_client.drafting.backend import ONNX
from outrider.edge_client.drafting.base import runtime_of
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.edge_client.tokenization.chat_template import load_chat_template

_NUM_TRIAL_TOKENS = 16
_SLOW_MS = 100.0
_STATUS_OFFSET, _UNSYNCHRONISED = 40, 0x40  # struct timex on 64-bit Linux; STA_UNSYNC
_EARLIEST = 1_735_689_600  # 2025-01-01: this software did not exist before


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Holds the findings and the loaded edge; None where a fault prevented it."""

    findings: list[Finding]
    edge: Edge | None


def check_local(config: RunConfig) -> LocalResult:
    """Loads the edge as configured and returns what was found."""
    try:
        edge = create_edge(config)
    except OutriderError as error:
        todo = "make one with `edge-client draft export HF_DIR OUT_DIR`, and name it with --draft"
        if config.draft.backend != ONNX:
            todo = "name a Hugging Face directory with --draft, or leave --draft-backend out"
        return LocalResult([fault("draft", str(error), todo), check_clock()], None)
    return LocalResult([_check_draft(config, edge), _check_template(config), check_clock()], edge)


def _check_draft(config: RunConfig, edge: Edge) -> Finding:
    if edge.draft is None:
        return skipped("draft", f"mode {config.mode} drafts nothing here")
    draft = edge.draft
    sequence = draft.sequence(SamplingParams(temperature=0.0))
    try:
        sequence.commit([0])
        sequence.propose(1)
        start_s = time.perf_counter()
        num_tokens = len(sequence.propose(_NUM_TRIAL_TOKENS).token_ids)
        took_ms = (time.perf_counter() - start_s) * 1e3
    except OutriderError as error:
        return fault("draft", str(error), "download or export it again")
    finally:
        sequence.close()
    token_ms = round(took_ms / num_tokens, 3) if num_tokens else None
    facts: dict[str, object] = {
        "fingerprint": draft.fingerprint,
        "tokenizer_fingerprint": draft.tokenizer_fingerprint,
        "max_context": draft.max_context,
        "load_ms": round(edge.draft_load_ms, 1),
        "token_ms": token_ms,
    }
    found = f"loaded in {edge.draft_load_ms:.0f} ms, context {draft.max_context}"
    if runtime := runtime_of(draft):
        facts["runtime"] = runtime
        found += f", {runtime}"
    if token_ms is not None:
        found += f", {token_ms:.2f} ms a token"
    if token_ms is not None and token_ms > _SLOW_MS:
        todo = "a smaller draft, more --draft-threads, or --mode cloud-only, may be faster"
        return warning("draft", found, todo, **facts)
    return ok("draft", found, **facts)


def _check_template(config: RunConfig) -> Finding:
    directory = draft_dir(config)
    try:
        template = load_chat_template(
            directory, config.serve.chat_template, config.serve.chat_template_kwargs
        )
    except ModuleNotFoundError:
        return skipped("chat template", f"needs jinja2: {how_to_install('daemon')}")
    except OutriderError as error:
        return fault("chat template", str(error), "mend what it names, or give another --chat-template FILE")
    if template is None:
        return skipped("chat template", f"{directory} has none: prompts work, conversations do not")
    return ok("chat template", f"from {template.origin}", origin=template.origin)


def check_clock() -> Finding:
    """Checks this machine's clock: later than the software's date, and synchronised."""
    if time.time() < _EARLIEST:
        year = time.strftime("%Y", time.gmtime())
        return fault("clock", f"this machine says it is {year}", "set it; certificates are judged by it")
    if _is_synchronised() is False:
        found = "nobody keeps it: the kernel says unsynchronised"
        return warning("clock", found, "run an NTP client, chrony for example")
    return ok("clock", "set")


def _is_synchronised() -> bool | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = ctypes.create_string_buffer(512)
        if libc.adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    status = int.from_bytes(state.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], "little")
    return not status & _UNSYNCHRONISED
