"""Checks that draft, settings and verifier are compatible, and decodes a few tokens."""

from __future__ import annotations

from outrider.common.config.loader import with_values
from outrider.common.errors import IncompatibleError, OutriderError, UsageError
from outrider.common.types import Method, ModelInfo
from outrider.edge_client.config.methods import check_draft_paths
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.doctor.finding import Finding, fault, ok, warning
from outrider.edge_client.session.factory import Edge

_BUSY_MS = 50.0
_TRIAL_TOKENS = 12
_TRIAL_PROMPT = "The quick brown fox"


def check_compatibility(config: RunConfig, edge: Edge, model: ModelInfo) -> list[Finding]:
    """Returns whether tokenizer, method and mode suit the verifier, as findings."""
    ours, theirs = edge.tokenizer.fingerprint, model.tokenizer_fingerprint
    facts: dict[str, object] = {"ours": ours, "theirs": theirs}
    if ours != theirs:
        found = f"the draft's tokenizer is not that of the target, {model.model_id}"
        todo = f"draft with a model of {model.model_id}'s family: `edge-client draft export`, --draft DIR"
        return [fault("tokenizer", found, todo, **facts), _check_settings(config, model)]
    return [ok("tokenizer", f"the same on both sides ({ours[:12]})", **facts), _check_settings(config, model)]


def _check_settings(config: RunConfig, model: ModelInfo) -> Finding:
    method = config.verification.method
    if method not in model.methods:
        usable = model.methods[0] if model.methods else Method.COUPLED
        todo = f"use --method {usable}, or ask its operator for --methods {method}"
        return fault("settings", f"method {method} is not among {', '.join(model.methods)}", todo)
    if config.mode is ExecutionMode.CO_LOCATED and config.draft_source not in model.draft_sources:
        todo = "serve it with --draft DIR or --heads DIR, or choose another --mode or --draft-source"
        has = ", ".join(model.draft_sources) or "none"
        what = f"mode co-located needs {config.draft_source} in the verifier, and it has {has}"
        return fault("settings", what, todo)
    try:
        check_draft_paths(config, config.mode.has_draft)
    except UsageError as error:
        return fault("settings", str(error), "leave the flag out, or change what it does not go with")
    return ok("settings", f"mode {config.mode}, method {method}")


def check_trial(config: RunConfig, edge: Edge) -> Finding:
    """Decodes a dozen tokens and returns how long a round took, and how long it waited for other sessions."""
    mode = ExecutionMode.SPECULATIVE if config.mode is ExecutionMode.AUTO else config.mode  # which has rounds
    trial = with_values(
        config,
        mode=mode,
        max_new_tokens=_TRIAL_TOKENS,
        ignore_eos=True,
        on_timeout=OnTimeout.FAIL,
        reverify=False,
        stop=(),
        stop_token_id=(),
        logprobs=0,
    )
    session = edge.session(_TRIAL_PROMPT, 0, trial)
    try:
        for _ in session.generate():
            pass
    except IncompatibleError as error:
        return fault("trial", str(error), "see the findings above")
    except OutriderError as error:
        return fault("trial", str(error), "the verifier answers but does not decode: see its log")
    stats = session.result.stats.summary(session.result.origins)
    names = ("ttft_ms", "tpot_ms", "rtt_ms", "net_ms", "queue_ms", "forward_ms", "draft_ms_per_token")
    facts = {name: stats.get(name) for name in (*names, "acceptance_rate", "num_refusals")}
    text = f"first token after {facts['ttft_ms']:.0f} ms"
    if facts["tpot_ms"] is not None:  # a grammar may end the text with it
        text += f", then {facts['tpot_ms']:.1f} ms each"
    waits_ms = facts["queue_ms"]
    if waits_ms is not None:
        text += f"; a round there waits {waits_ms:.1f} ms for others, computes {facts['forward_ms']:.1f} ms"
    if facts["num_refusals"] or (isinstance(waits_ms, float) and waits_ms > _BUSY_MS):
        return warning("load", text, "the verifier is busy: its operator sees more at its /metrics", **facts)
    return ok("load", text, **facts)
