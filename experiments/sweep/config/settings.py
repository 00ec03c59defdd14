"""Settings of the product's own two commands, given in a sweep: checked, and turned into configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.common.config.fields import leaves, shown
from outrider.common.config.loader import load_config
from outrider.common.errors import ConfigError
from outrider.edge_client.config.grammar import KEYS
from outrider.edge_client.config.run_config import RunConfig

# What the sweep itself sets, by its own keys.
_EDGE_AXES = {
    "mode": "modes",
    "depth_policy": "policies",
    "num_speculative_tokens": "draft_lengths",
    "tree": "trees",
    "method": "methods",
    "temperature": "temperatures",
    "min_draft_ms": "min_draft_ms",
    "max_new_tokens": "max_new_tokens",
    "seed": "seed",
    "verifier": "verifier",
    "draft": "models",
    "tls": "tls",
}
_SERVE_AXES = {
    "min_forward_ms": "min_forward_ms",
    "target": "models",
    "listen": "verifier",
    "tls_cert": "tls",
    "tls_key": "tls",
}
# How an edge speculates, and settings of it: beside the axes, which baselines leave alone, as variants do.
_WAYS = ("pipeline", "num_rounds_in_flight", "guesses", "tree", "gate", "reverify")
_NOT_OURS = ("serve", "otlp_endpoint")
_TAUGHT = ("learn", "suffix_store")  # with these a figure would depend on what ran before it
# Settings that change what the target itself would write: texts of such cells could not be compared.
_TEXT_SETTINGS = frozenset(
    (
        *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "bad_word", "min_new_tokens", "stop", "stop_token_id", "ignore_eos"),
    )
)
_GRAMMARS = frozenset((*KEYS.values(), "json_whitespace"))


def check_edge(settings: object, where: str, is_variant: bool = False, is_constraint: bool = False) -> None:
    """Raises `ConfigError` naming `where` and the key for what `edge-client run` would not take, for what a
    key of the sweep sets, and for what belongs to variants alone, or to all cells."""
    checked = _mapping(settings, where)
    _refuse_axes(checked, where, _EDGE_AXES)
    for key in checked:
        if key in _TEXT_SETTINGS and is_variant:
            raise ConfigError(f"{where}: {key} changes the text itself; set it for all cells, under `edge`")
        if key in _GRAMMARS and not is_constraint:
            example = f"constraints: [{{name: ..., {key}: ...}}]"
            raise ConfigError(
                f"{where}: {key} makes other texts, with baselines of their own; give {example}"
            )
        if is_way(key) and not is_variant:
            example = f"variants: [{{name: ..., edge: {{{key}: {shown(checked[key])}}}}}]"
            raise ConfigError(f"{where}: {key} would change the baselines; give it as a variant, {example}")
        if key in _NOT_OURS:
            raise ConfigError(f"{where}: {key} is of no use in a sweep; leave it out")
        if key in _TAUGHT:
            raise ConfigError(f"{where}: {key} makes a figure depend on the texts before it; leave it out")
    load_config(RunConfig, content=(checked, where), env={})


def check_serve(settings: object, where: str) -> None:
    """Raises `ConfigError` for a setting that the verifier does not take."""
    from outrider.cloud_verifier.config import ServeConfig

    checked = _mapping(settings, where)
    _refuse_axes(checked, where, _SERVE_AXES)
    load_config(ServeConfig, content=(checked, where), env={})


def make_edge_config(settings: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration of one edge. The environment is not read: a sweep is what its file says."""
    return load_config(RunConfig, content=(dict(settings), "sweep"), env={}).value


def home_of(key: str) -> str:
    """Returns where a sweep has the setting `key` of `edge-client run` or `cloud-verifier serve`, as the
    end of a message; empty where neither has it."""
    from outrider.cloud_verifier.config import ServeConfig

    axes = {**_SERVE_AXES, **_EDGE_AXES}
    if key in axes:
        return f"; a sweep has it as `{axes[key]}`"
    if key in {leaf.key for leaf in leaves(RunConfig)}:
        place = "variants: [{name: ..., edge: {...}}]" if is_way(key) else "edge: {...}"
        return f"; a setting of the edge goes under `{place}`"
    is_served = key in {leaf.key for leaf in leaves(ServeConfig)}
    return "; a setting of the verifier goes under `serve: {...}`" if is_served else ""


def is_way(key: str) -> bool:
    """Returns whether an edge setting is of how it speculates."""
    return any(key == way or key.startswith(f"{way}_") for way in _WAYS)


def serve_flags(settings: Mapping[str, Any]) -> list[str]:
    """Returns the `cloud-verifier serve` flags of `settings`: one for each item of a list, none for a null."""
    from outrider.cloud_verifier.config import ServeConfig

    flags = {leaf.key: (leaf.flag, leaf.kind) for leaf in leaves(ServeConfig)}
    arguments: list[str] = []
    for key, value in settings.items():
        flag, kind = flags[key]
        if kind is bool:
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list | tuple) else [] if value is None else [value]
            for each in values:
                arguments += [flag, str(each)]
    return arguments


def _mapping(settings: object, where: str) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: is {shown(settings)}; expected keys and values")
    return dict(settings)


def _refuse_axes(settings: Mapping[str, Any], where: str, axes: Mapping[str, str]) -> None:
    for key in settings:
        if key in axes:
            raise ConfigError(f"{where}: {key} is set by the sweep's own key `{axes[key]}`")
