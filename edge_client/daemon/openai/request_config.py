"""Makes the configuration of one request from the daemon's own.

Defaults of the operator that have no effect with this request are dropped; a setting of the request itself
that would have no effect is refused.
"""

from __future__ import annotations

from outrider.common.config.loader import value_of, with_values
from outrider.common.types import Method
from outrider.edge_client.config.gate import GATE_KEYS, has_place, without_gate
from outrider.edge_client.config.methods import METHODS_OF, judging_method, why_no_reverify
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.config.tree import tree_use, why_no_shape, why_no_tree
from outrider.edge_client.controller.window import Pipelining
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.daemon.openai.errors import unsupported
from outrider.edge_client.daemon.openai.parsed import ParsedRequest
from outrider.edge_client.gate.gate import GateUse


def config_of(base: RunConfig, parsed: ParsedRequest) -> RunConfig:
    """Returns the request's configuration. Raises `ApiError` naming a setting of the request that would have
    no effect."""
    num_top = parsed.num_top_logprobs
    logprobs = 0 if num_top is None else max(1, num_top)
    seed = base.seed if parsed.seed is None else parsed.seed
    config = with_values(base, seed=seed, logprobs=logprobs, **parsed.changes)
    for name in parsed.changes:
        if why := _why_without_effect(name, config):
            raise unsupported(f"outrider.{name}", why)
    return _without_pointless_defaults(config, parsed)


def _without_pointless_defaults(config: RunConfig, parsed: ParsedRequest) -> RunConfig:
    asked = {name: value for name, value in parsed.changes.items() if name in GATE_KEYS}
    if asked == {"gate": GateUse.OFF} or not (asked or has_place(config)):
        config = without_gate(config)
    method = config.verification.method
    pointless: dict[str, object] = {
        name: None
        for name, methods in METHODS_OF.items()
        if name not in parsed.changes and method not in methods
    }
    if "reverify" not in parsed.changes and why_no_reverify(config):
        pointless["reverify"] = False
    if tree_use(config) == "off" or ("tree" not in parsed.changes and why_no_tree(config)):
        pointless |= {"tree": "off", "tree_width": None, "tree_depth": None, "tree_shape": None}
    elif config.tree.shape is not None and why_no_shape(config):
        pointless["tree_shape"] = None
    return with_values(config, **pointless)


def _why_without_effect(name: str, config: RunConfig) -> str:
    mode, asked = config.mode, value_of(config, name)
    match name:
        case "depth_policy" | "num_speculative_tokens" if judging_method(config) is None:
            return f"mode {mode} has no rounds to draft for"
        case "pipeline" if asked is not Pipelining.OFF and not mode.has_rounds:
            return f"mode {mode} has no rounds to send ahead"
        case "num_rounds_in_flight" if config.pipelining.use is Pipelining.OFF:
            return "goes with pipeline on or auto"
        case "tree" if asked != "off":
            return why_no_tree(config).replace("--", "")
        case "tree_width" | "tree_depth" if tree_use(config) == "off":
            return "goes with tree auto or a number"
        case "on_timeout" | "timeout_ms" | "recover_timeout_s" if mode is ExecutionMode.EDGE_ONLY:
            return "mode edge-only waits for no verifier"
        case "reverify" if asked:
            return why_no_reverify(config).replace("--on-timeout", "on_timeout").replace("--", "")
        case "method" if judging_method(config) is None and asked is not Method.COUPLED:
            return f"in mode {mode} no draft is judged"
    return ""
