"""Checks of a sweep that need more than one key: names that must be known, keys that do not go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider.common.config.addresses import split_address
from outrider.common.config.loader import did_you_mean
from outrider.common.errors import ConfigError, UsageError
from outrider.common.types import Method
from outrider.edge_client.config.grammar import KEYS
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.experiments.links.base import REALISATIONS
from outrider.experiments.sweep.config.schema import DIRECT, SIMULATED, SweepConfig
from outrider.experiments.sweep.config.settings import check_edge, check_serve
from outrider.experiments.sweep.results.records import BASELINES
from outrider.experiments.synthetic.pair import pair_from

_MODELS = ("embedded", "synthetic")


def check_sweep(config: SweepConfig) -> None:
    """Raises `UsageError` naming key and fix."""
    _check_names("modes", config.modes, REQUESTABLE_MODES)
    _check_names("policies", config.policies, DEPTH_POLICIES)
    _check_names("methods", config.methods, tuple(Method))
    _check_names("baselines", config.baselines, BASELINES)
    _check_names("realisation", (config.realisation,), (DIRECT, *REALISATIONS))
    for key in (
        *("links", "modes", "policies", "draft_lengths", "trees", "methods", "tls", "temperatures"),
        *("sessions", "constraints"),
    ):
        if not getattr(config, key):
            raise ConfigError(f"{key}: is empty; give at least one")
    names = [profile.name for profile in config.profiles]
    if len(set(names)) < len(names):
        raise ConfigError(f"links: two are called {_first_double(names)!r}; give one another `name`")
    if bad := [n for n in config.draft_lengths if n is not None and n < 0]:
        raise ConfigError(f"draft_lengths: is {bad[0]}; expected numbers of at least 0, or null")
    if (
        any(tree != "off" for tree in config.trees)
        and config.is_synthetic
        and config.realisation != SIMULATED
    ):
        raise ConfigError(
            f"trees: the synthetic pair drafts chains; leave it out, or `realisation: {SIMULATED}`"
        )
    _check_models(config)
    _check_variants(config)
    _check_constraints(config)
    check_edge(config.edge_settings, "edge")
    check_serve(config.serve or {}, "serve")
    if config.verifier:
        _check_verifier(config)
    if config.realisation == SIMULATED and any(config.tls):
        raise ConfigError(f"tls: is not simulated; leave it out, or `realisation: {SIMULATED}`")


def _check_verifier(config: SweepConfig) -> None:
    if config.realisation == SIMULATED:
        raise ConfigError(f"verifier: nobody is asked where `realisation` is {SIMULATED}; leave it out")
    if config.realisation != DIRECT:  # which takes whatever an edge takes
        split_address(config.verifier, "verifier:")
    if any(config.min_forward_ms) or config.serve:
        key = "serve" if config.serve else "min_forward_ms"
        raise ConfigError(f"{key}: is a setting of verifiers started here; leave it out, or leave `verifier`")
    if len(set(config.tls)) > 1:
        raise ConfigError("tls: one verifier either speaks TLS or not; give the one it does")


def _check_names(key: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{key}: there is no {name!r}{hint} Known: {', '.join(known)}")


def _check_models(config: SweepConfig) -> None:
    models = config.models
    if isinstance(models, Mapping):
        _check_names("models", models, ("target", "draft"))
        for name, directory in models.items():
            if not Path(str(directory)).is_dir():
                raise ConfigError(f"models: {name} is {directory}; there is no such directory")
    elif models not in _MODELS:
        wanted = "embedded, synthetic, or {target: DIR, draft: DIR}"
        raise ConfigError(f"models: is {models!r}; expected {wanted}")
    if config.synthetic is not None and not config.is_synthetic:
        raise ConfigError("synthetic: goes with `models: synthetic`")
    if config.is_synthetic and config.verifier:
        raise ConfigError("models: synthetic starts verifiers of its own; leave `verifier` out")
    if not isinstance(config.synthetic or {}, Mapping):
        raise ConfigError(f"synthetic: is {config.synthetic!r}; expected {{alpha: 0.8, t_target: 70ms, ...}}")
    pair_from(config.synthetic or {})


def _check_variants(config: SweepConfig) -> None:
    for index, entry in enumerate(config.variants):
        where = f"variants[{index}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: is {entry!r}; expected {{name: ..., edge: {{...}}}}")
        _check_names(where, entry, ("name", "edge", "modes"))
        if entry.get("edge") and not entry.get("name"):
            raise ConfigError(f"{where}: has no name; cells and results go by it, give it one")
        check_edge(entry.get("edge") or {}, f"{where}.edge", is_variant=True)
    for index, variant in enumerate(config.variant_list):
        _check_names(f"variants[{index}].modes", variant.modes, config.modes)
    names = [variant.name for variant in config.variant_list]
    if len(set(names)) < len(names):
        raise UsageError(f"variants: two are called {_first_double(names)!r}")


def _check_constraints(config: SweepConfig) -> None:
    if any(config.constraints) and config.is_synthetic:
        raise ConfigError("constraints: the synthetic pair has no texts that could obey one; leave it out")
    for index, entry in enumerate(config.constraints):
        where, known = f"constraints[{index}]", tuple(KEYS.values())
        if entry is None:
            continue
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: is {entry!r}; expected {{name: ..., json_schema: ...}}, or null")
        _check_names(where, entry, ("name", *known, "json_whitespace"))
        if not entry.get("name") or len([key for key in known if entry.get(key)]) != 1:
            raise ConfigError(f"{where}: want a name and one of {', '.join(known)}")
    for index, constraint in enumerate(config.constraint_list):
        check_edge(constraint.edge, f"constraints[{index}]", is_constraint=True)
    names = [each.name for each in config.constraint_list]
    if len(set(names)) < len(names):
        raise ConfigError(f"constraints: two are called {_first_double(names)!r}")


def _first_double(names: list[str]) -> str:
    return next(name for index, name in enumerate(names) if name in names[:index])
