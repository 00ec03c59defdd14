"""What `--method` and the flags of single methods come to."""

from __future__ import annotations

from outrider.common.errors import UsageError
from outrider.common.methods import DEFAULT_SUPPORT_SIZE
from outrider.common.types import Method, MethodParams
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import Mode, OnTimeout
from outrider.edge_client.gate.gate import GateUse

METHODS_OF = {  # settings that only some methods have
    "support_size": (Method.SPARSE, Method.BLOCK),
    "num_candidates": (Method.CANDIDATES,),
    "threshold_pass": (Method.THRESHOLD,),
    "threshold_ratio": (Method.THRESHOLD,),
    "typical_epsilon": (Method.TYPICAL,),
    "typical_delta": (Method.TYPICAL,),
}


def check_method(config: RunConfig) -> None:
    """Raises `UsageError` naming the first flag that would have no effect."""
    for name, methods in METHODS_OF.items():
        if getattr(config, name) is not None and config.method not in methods:
            wanted = " or ".join(f"--method {method}" for method in methods)
            raise UsageError(f"{_flag(name)} goes with {wanted}, not with --method {config.method}")
    if config.support_size is not None and config.mode == Mode.CO_LOCATED:
        raise UsageError("--support-size is of the edge's draft; in mode co-located the verifier drafts")
    if config.logprobs and config.mode == Mode.EDGE_ONLY:
        raise UsageError("--logprobs are the target's, and mode edge-only asks none")
    if config.reverify and (why := why_no_reverify(config)):
        raise UsageError(f"--reverify {why}")


def why_no_reverify(config: RunConfig) -> str:
    """Why `--reverify` cannot be had, or would have no effect; empty: it can."""
    if config.method != Method.COUPLED:
        return (
            f"goes with --method coupled, not with --method {config.method}, which judges a token by the "
            "distribution it was drafted from: that of a kept token is gone"
        )
    if config.mode not in (Mode.SPECULATIVE, Mode.AUTO):
        return (
            f"goes with --mode speculative or auto: mode {config.mode} keeps no token that a verifier could "
            "judge later"
        )
    is_kept = config.on_timeout in (OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY)
    if not is_kept and config.gate != GateUse.COMMIT:
        return f"is for tokens kept unverified, and --on-timeout {config.on_timeout} keeps none"
    return ""


def make_method_params(config: RunConfig) -> MethodParams:
    return MethodParams(
        threshold_pass=config.threshold_pass,
        threshold_ratio=config.threshold_ratio,
        typical_epsilon=config.typical_epsilon,
        typical_delta=config.typical_delta,
        num_candidates=config.num_candidates,
    )


def support_size(config: RunConfig) -> int:
    return DEFAULT_SUPPORT_SIZE if config.support_size is None else config.support_size


def judging_method(config: RunConfig) -> Method | None:
    """The method that judges drafted tokens; None where none are judged."""
    is_judged = config.mode in (Mode.SPECULATIVE, Mode.CO_LOCATED, Mode.AUTO)
    return Method(config.method) if is_judged else None


def warning(config: RunConfig) -> str | None:
    """The one line that an approximate method owes its user."""
    method = judging_method(config)
    if method is None or method.is_exact:
        return None
    return f"--method {method} is approximate: the text is no longer distributed as the target's own"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
