"""What a sweep is asked for: one YAML file, every key with a default, every mistake named with its fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import did_you_mean, load_config, option
from common.errors import ConfigError, UsageError
from common.types import Method
from edge_client.depth.registry import DEPTH_POLICIES
from edge_client.options import Mode
from experiments.links.profiles import LinkProfile, load_profile
from experiments.sweep.records import BASELINES
from experiments.sweep.settings import check_edge, check_serve

SCOPE = "bench"
# An approximation is asked for, not met by accident; texts of one length compare best.
_EDGE_DEFAULTS = {"on_timeout": "wait", "ignore_eos": True}
_MODELS = ("embedded", "synthetic")
MIN_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as goodput; None: not asked."""

    ttft_ms: float | None = option(1000.0, "first token within this", minimum=0.001)
    tpot_ms: float | None = option(100.0, "time per later token at most this", minimum=0.001)
    commit_gap_p95_ms: float | None = option(None, "95 % of gaps between commits within this", minimum=0.001)


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of `edge-client run` that some cells have beside the common ones."""

    name: str = ""
    edge: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """`edge-client bench`. The lists are axes: every combination that makes sense is a cell."""

    name: str = option("sweep", "title of the results")
    links: tuple[Any, ...] = option(("loopback",), "named profiles, or mappings of a profile's fields")
    realisation: str = option("proxy", "how links are made: direct (none), proxy, tun, netem, simulated")
    modes: tuple[str, ...] = option(("speculative",), "of edge-client run --mode")
    policies: tuple[str, ...] = option(("fixed",), "of --depth-policy")
    draft_lengths: tuple[int | None, ...] = option((None,), "of --num-speculative-tokens; null: the policy's")
    methods: tuple[str, ...] = option(("coupled",), "of --method")
    tls: tuple[bool, ...] = option((False,), "encryption between edge and verifier")
    temperatures: tuple[float, ...] = option((0.8,), "0 is greedy", minimum=0.0)
    sessions: tuple[int, ...] = option((1,), "edges at once, each a process", minimum=1, maximum=256)
    min_forward_ms: tuple[float, ...] = option((0.0,), "slow-down of the target", minimum=0.0)
    min_draft_ms: tuple[float, ...] = option((0.0,), "slow-down of the edge's draft", minimum=0.0)
    variants: tuple[Any, ...] = option((), "further edge settings, each {name: ..., edge: {...}}")
    edge: Any = option(None, "settings of edge-client run for every cell, as in its YAML")
    serve: Any = option(None, "settings of cloud-verifier serve for every verifier started here")
    verifier: str = option("", "a verifier that runs already, HOST:PORT; empty: started here")
    models: Any = option("embedded", "embedded, synthetic, or {target: DIR, draft: DIR}")
    synthetic: Any = option(None, "the synthetic pair's acceptance and times; goes with models: synthetic")
    baselines: tuple[str, ...] = option(BASELINES, "leaving one out is written into the results")
    baseline_draft_lengths: tuple[int, ...] = option((4,), "of fixed and co-located", minimum=1)
    a_a: bool = option(True, "run one cell twice under two names, so that noise is visible")
    prompts: str = option("", "file of prompts; empty: the embedded held-out ones", metavar="FILE")
    num_prompts: int = option(4, "the first so many", minimum=1)
    max_new_tokens: int = option(64, "tokens of a text at most", minimum=2)
    repeats: int = option(MIN_REPEATS, "how often each cell is visited", minimum=1)
    seed: int = option(1, "repeat r samples with seed + r; also orders the cells", minimum=0)
    slo: Slo = dataclasses.field(default_factory=Slo)
    price_per_hour: float | None = option(None, "of the verifier's machine, for the cost of tokens")
    quality: bool = option(True, "target loss of texts that are not exact; loads the target once, at the end")
    calibrate: bool = option(True, "measure the realisation first, a few seconds, into the manifest")

    @property
    def is_synthetic(self) -> bool:
        return bool(self.models == "synthetic")

    @property
    def profiles(self) -> list[LinkProfile]:
        return [load_profile(link) for link in self.links]

    @property
    def edge_settings(self) -> dict[str, Any]:
        return {**_EDGE_DEFAULTS, **(self.edge or {})}

    @property
    def variant_list(self) -> list[Variant]:
        """The plain one unless only named ones were given."""
        return [Variant(**each) for each in self.variants] or [Variant()]

    @property
    def model_dirs(self) -> dict[str, str]:
        """`target` and `draft`, as far as they were named."""
        return dict(self.models) if isinstance(self.models, Mapping) else {}


def load_sweep(path: Path | None, flags: Mapping[str, object] | None = None) -> SweepConfig:
    """Raises `UsageError` (mostly `ConfigError`) naming the key, its file and the fix."""
    content, origin = ({}, "no file") if path is None else (_read(path), f"file {path}")
    given = {key: _as_list(key, value) for key, value in content.items()}
    loaded = load_config(SweepConfig, scope=SCOPE, content=(given, origin), flags=flags).value
    check_sweep(loaded)
    return loaded


def resolved(config: SweepConfig) -> dict[str, Any]:
    """The whole of it as JSON, links with every field; `load_sweep` of this gives the same sweep."""
    record = dataclasses.asdict(config)
    record["links"] = [link_record(profile) for profile in config.profiles]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}


def link_record(profile: LinkProfile) -> dict[str, Any]:
    """A profile as JSON has it."""
    record = dataclasses.asdict(profile)
    return record | {"outages": list(record["outages"])}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected keys and values; `edge-client bench --example` prints a file")
    return {str(key): value for key, value in content.items()}


_AXES = frozenset(
    field.name for field in dataclasses.fields(SweepConfig) if str(field.type).startswith("tuple")
)


def _as_list(key: str, value: object) -> object:
    """`sessions: 4` means `sessions: [4]`."""
    is_single = key in _AXES and (value is None or isinstance(value, str | int | float | Mapping))
    return [value] if is_single else value


# ------------------------------------------------------------------------------------------- checks


def check_sweep(config: SweepConfig) -> None:
    """What one key alone cannot tell. Raises `UsageError` naming key and fix."""
    _check_names("modes", config.modes, tuple(Mode))
    _check_names("policies", config.policies, DEPTH_POLICIES)
    _check_names("methods", config.methods, tuple(Method))
    _check_names("baselines", config.baselines, BASELINES)
    for key in ("links", "modes", "policies", "draft_lengths", "methods", "tls", "temperatures", "sessions"):
        if not getattr(config, key):
            raise ConfigError(f"{key}: is empty; give at least one")
    names = [profile.name for profile in config.profiles]
    if len(set(names)) < len(names):
        raise ConfigError(f"links: two are called {_first_double(names)!r}; give one another `name`")
    if bad := [n for n in config.draft_lengths if n is not None and n < 0]:
        raise ConfigError(f"draft_lengths: is {bad[0]}; expected numbers of at least 0, or null")
    _check_models(config)
    _check_variants(config)
    check_edge(config.edge_settings, "edge")
    check_serve(config.serve or {}, "serve")
    if config.verifier and (any(config.min_forward_ms) or config.serve):
        key = "serve" if config.serve else "min_forward_ms"
        raise ConfigError(f"{key}: is a setting of verifiers started here; leave it out, or leave `verifier`")
    if config.verifier and len(set(config.tls)) > 1:
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
    elif models not in _MODELS:
        wanted = "embedded, synthetic, or {target: DIR, draft: DIR}"
        raise ConfigError(f"models: is {models!r}; expected {wanted}")
    if (config.synthetic is not None) and not config.is_synthetic:
        raise ConfigError("synthetic: goes with `models: synthetic`")
    if config.is_synthetic and config.verifier:
        raise ConfigError("models: synthetic starts verifiers of its own; leave `verifier` out")


def _check_variants(config: SweepConfig) -> None:
    for index, entry in enumerate(config.variants):
        where = f"variants[{index}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: is {entry!r}; expected {{name: ..., edge: {{...}}}}")
        _check_names(where, entry, ("name", "edge"))
        check_edge(entry.get("edge") or {}, f"{where}.edge", may_change_text=False)
    names = [str(entry.get("name", "")) for entry in config.variants]
    if len(set(names)) < len(names):
        raise UsageError(f"variants: two are called {_first_double(names)!r}")


def _first_double(names: list[str]) -> str:
    return next(name for index, name in enumerate(names) if name in names[:index])
