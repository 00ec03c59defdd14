"""Makes the method and its parameters from `--method` and the flags of single methods."""

from __future__ import annotations

from outrider.common.errors import UsageError
from outrider.common.methods import DEFAULT_SUPPORT_SIZE
from outrider.common.types import DRAFT_SOURCE, Method, MethodParams, ModelInfo
from outrider.edge_client.config.preset_section import BIG_LITTLE
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.drafting.backend import ONNX
from outrider.edge_client.drafting.registry import RETRIEVAL, STAGED, SUFFIX, WITHOUT_MODEL
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
    chosen = config.verification.method
    for name, methods in METHODS_OF.items():
        if getattr(config.verification, name) is not None and chosen not in methods:
            wanted = " or ".join(f"--method {method}" for method in methods)
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} goes with {wanted}, not with --method {chosen}")
    if config.verification.support_size is not None and config.mode is ExecutionMode.CO_LOCATED:
        raise UsageError("--support-size has no effect in mode co-located: the verifier drafts")
    if draft_source(config) and config.mode is not ExecutionMode.CO_LOCATED:
        raise UsageError(
            f"--draft-source {config.draft_source} names a draft source of the verifier: it has an effect with --mode "
            "co-located only"
        )
    if config.mode is ExecutionMode.EDGE_ONLY and (strategy := config.draft.strategy) in WITHOUT_MODEL:
        raise UsageError(
            f"--mode edge-only needs a model to write with, and --draft-strategy {strategy} has none"
        )
    if config.draft.learn is not None:
        _check_learning(config)
    if config.logprobs and config.mode is ExecutionMode.EDGE_ONLY:
        raise UsageError("--logprobs needs a target, and mode edge-only uses none")
    if config.outage.reverify and (why := why_no_reverify(config)):
        raise UsageError(f"--reverify {why}")


def check_draft_paths(config: RunConfig, has_draft: bool) -> None:
    """Raises `UsageError` naming the first file or directory that the draft would not use, or that no draft would where
    none is loaded. Where one configuration is for several strategies this is not asked."""
    draft = config.draft
    of_readers = (
        ("--suffix-store", draft.suffix_store, (SUFFIX, STAGED)),
        ("--datastore", draft.datastore, (RETRIEVAL,)),
    )
    for flag, path in (("--learn", draft.learn), *((flag, path) for flag, path, _ in of_readers)):
        if path is not None and not has_draft:
            raise UsageError(
                f"{flag} needs a draft, and mode {config.mode} loads none: --mode speculative and auto do"
            )
    for flag, path, readers in of_readers:
        if path is not None and not set(readers) & set(draft.strategy.split("+")):
            wanted = " or ".join(readers)
            raise UsageError(
                f"{flag} goes with a --draft-strategy that has {wanted} in it, not with {draft.strategy}"
            )


def _check_learning(config: RunConfig) -> None:
    """Raises `UsageError` for what `--learn` does not go with; a request to the daemon may choose the method."""
    if config.verification.method is not Method.COUPLED:
        raise UsageError(
            f"--method {config.verification.method} does not go with --learn, which goes with --method coupled: "
            "elsewhere the text depends on what is drafted, and would change as the draft learns"
        )
    if why := _why_no_learning(config):
        raise UsageError(f"--learn {why}")


def _why_no_learning(config: RunConfig) -> str:
    """Returns why `--learn` is refused beside the method; empty where it can be used."""
    draft = config.draft
    if config.mode is ExecutionMode.EDGE_ONLY:
        return "needs a target to learn from, and mode edge-only uses none"
    if draft.strategy in WITHOUT_MODEL:
        return f"goes with a strategy that has a model, and --draft-strategy {draft.strategy} has none"
    if draft.backend != ONNX:
        return f"goes with --draft-backend {ONNX}, whose graph returns the state that is learned from"
    if config.gate.variance is not None:
        return "goes without --gate-variance: its graph measures the draft without the head"
    return ""


def draft_source(config: RunConfig) -> str:
    """Returns `--draft-source` as an opening has it: empty for the verifier's draft."""
    return "" if config.draft_source == DRAFT_SOURCE else config.draft_source


def why_no_reverify(config: RunConfig) -> str:
    """Returns why `--reverify` is refused or would have no effect; empty where it can be used."""
    method, on_timeout = config.verification.method, config.outage.on_timeout
    if method is not Method.COUPLED:
        return (
            f"goes with --method coupled, not with --method {method}, which needs the distribution that a "
            "token was drafted from: kept tokens have none any more"
        )
    if not config.mode.has_rounds:
        return (
            f"goes with --mode speculative or auto: mode {config.mode} keeps no token that could be verified "
            "later"
        )
    is_kept = on_timeout in (OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY)
    if not is_kept and config.gate.use is not GateUse.COMMIT:
        return (
            f"is for tokens kept unverified, and --on-timeout {on_timeout} keeps none: add --on-timeout "
            "first_token or edge_only"
        )
    return ""


def make_method_params(config: RunConfig) -> MethodParams:
    """Returns the parameters that the verifier is sent; None in one is the verifier's own choice."""
    section = config.verification
    return MethodParams(
        threshold_pass=section.threshold_pass,
        threshold_ratio=section.threshold_ratio,
        typical_epsilon=section.typical_epsilon,
        typical_delta=section.typical_delta,
        num_candidates=section.num_candidates,
    )


def support_size(config: RunConfig) -> int:
    """Returns how many ids a drafted token's distribution is sent with, in the methods that send one."""
    size = config.verification.support_size
    return DEFAULT_SUPPORT_SIZE if size is None else size


def judging_method(config: RunConfig) -> Method | None:
    """Returns the method that drafted tokens are verified by; None where none are verified."""
    is_judged = config.mode.has_rounds or config.mode is ExecutionMode.CO_LOCATED
    return config.verification.method if is_judged else None


def is_reproducible(config: RunConfig, model: ModelInfo | None, num_unverified: int) -> bool:
    """Returns whether a text is, token for token, what `model` alone writes with the same seed, every time.

    Exact methods but `coupled` give samples of the same distribution, not the same ones.
    """
    method = judging_method(config)
    is_same = method in (None, Method.COUPLED) or (method.is_exact and config.sampling.temperature == 0)
    return model is not None and model.is_reproducible and is_same and num_unverified == 0


def warning(config: RunConfig) -> str | None:
    """Returns the warning that an approximate method's text is not the target's; None for an exact one."""
    method = judging_method(config)
    if method is None or method.is_exact:
        return None
    if config.preset.name == BIG_LITTLE:
        return "--preset big-little is approximate: the target replaces only tokens that it finds unlikely"
    return f"--method {method} is approximate: the text no longer has the target's distribution"
