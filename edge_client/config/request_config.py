"""Makes the configuration of one request from that of the daemon, or of the Python client.

Defaults that have no effect with this request are dropped; a setting of the request itself that would have no
effect is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.common.config.loader import value_of, with_values
from outrider.common.errors import UsageError
from outrider.common.types import DRAFT_SOURCE, Method
from outrider.edge_client.config.gate import GATE_KEYS, has_place, without_gate
from outrider.edge_client.config.grammar import KEYS
from outrider.edge_client.config.methods import METHODS_OF, judging_method, why_no_reverify
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.config.tree import tree_use, why_no_shape, why_no_tree
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.gate.gate import GateUse


class NoEffectError(UsageError):
    """A setting of a request would have no effect, for `reason`."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting} has no effect", reason)
        self.setting, self.reason = setting, reason


def request_config(base: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns `base` with a request's settings, by key. Raises `NoEffectError`, and `ConfigError` for a value."""
    config = with_values(base, **changes)
    config = with_values(config, **_pointless_of_mode(config, changes))
    for name in changes:
        if why := _why_without_effect(name, config):
            raise NoEffectError(name, why)
    return _without_pointless_defaults(config, changes)


def _without_pointless_defaults(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    asked = {name: value for name, value in changes.items() if name in GATE_KEYS}
    if asked == {"gate": GateUse.OFF} or not (asked or has_place(config)):
        config = without_gate(config)
    method = config.verification.method
    pointless: dict[str, object] = {
        name: None for name, methods in METHODS_OF.items() if name not in changes and method not in methods
    }
    if any(key in changes for key in KEYS.values()):  # a request's own grammar, in place of the operator's
        pointless |= {key: "" for key in KEYS.values() if key not in changes}
        if "min_new_tokens" not in changes:  # a grammar says itself where a text may end
            pointless["min_new_tokens"] = 0
    if "reverify" not in changes and why_no_reverify(config):
        pointless["reverify"] = False
    if tree_use(config) == "off" or ("tree" not in changes and why_no_tree(config)):
        pointless |= {"tree": "off", "tree_width": None, "tree_depth": None, "tree_shape": None}
    elif config.tree.shape is not None and why_no_shape(config):
        pointless["tree_shape"] = None
    return with_values(config, **pointless)


def _pointless_of_mode(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, object]:
    """Returns new values for those of the operator's settings that the request's mode, gate, tree or pipelining leave
    without effect."""
    mode, pipelining = config.mode, config.pipelining
    keeps_chains = changes.get("gate") == GateUse.COMMIT
    is_alone = pipelining.use is Pipelining.ON and (not mode.has_rounds or keeps_chains)
    may_send_ahead = mode.has_rounds and (pipelining.use is Pipelining.ON or config.may_adapt)
    is_sequential = pipelining.use is Pipelining.OFF or is_alone or not may_send_ahead
    is_tree_asked = changes.get("tree", "off") not in ("auto", "off")
    rules: dict[str, tuple[bool, object]] = {  # by key: whether it is pointless, and its value then
        "pipeline": (is_alone, Pipelining.OFF),
        "num_rounds_in_flight": (is_sequential, None),
        "draft_source": (mode is not ExecutionMode.CO_LOCATED, DRAFT_SOURCE),
        "support_size": (mode is ExecutionMode.CO_LOCATED, None),
        "num_speculative_tokens": (is_tree_asked, None),
        "learn": (mode is ExecutionMode.EDGE_ONLY, None),
        "logprobs": (mode is ExecutionMode.EDGE_ONLY, 0),
    }
    return {key: value for key, (is_pointless, value) in rules.items() if is_pointless and key not in changes}


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
        case "json_whitespace" if asked and not config.grammar.json_schema:
            return "goes with a JSON schema"
        case "reverify" if asked:
            return why_no_reverify(config).replace("--on-timeout", "on_timeout").replace("--", "")
        case "method" if judging_method(config) is None and asked is not Method.COUPLED:
            return f"in mode {mode} no draft is judged"
    return ""
