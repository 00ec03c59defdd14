"""A system as YAML describes it: groups of edges, groups of verifiers, times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.config.fields import shown
from outrider.common.config.loader import load_config, option
from outrider.common.errors import ConfigError, UsageError
from outrider.edge_client.config.run_config import RunConfig
from outrider.experiments.links.profiles import LinkProfile, load_profile
from outrider.experiments.shared.command import read_mapping
from outrider.experiments.simulator.parts.network import BALANCES
from outrider.experiments.simulator.parts.times import (
    DEFAULT_TIMES,
    DraftTimes,
    EdgeTimes,
    SystemTimes,
    VerifierTimes,
    changed,
    load_times,
)

DEFAULT_ACCEPTANCE = "embedded T=0.8"
_HINT = "docs/simulator.md has an example"


@dataclass(frozen=True, slots=True)
class EdgeGroup:
    """Describes `count` edges alike. One with a `rate` sends requests whatever became of those before."""

    name: str = option("edges", "of the group, in figures")
    count: int = option(1, "edges", minimum=1)
    link: Any = option("loopback", "a named profile, or a mapping of a profile's fields")
    edge: Any = option(None, "settings of edge-client run")
    acceptance: Any = option(
        DEFAULT_ACCEPTANCE,
        "of drafted tokens: the name of recorded traces, a chance, or a list of them by position",
    )
    prompt_tokens: Any = option(64, "of a prompt: a number, or [lowest, highest]")
    output_tokens: Any = option(64, "of an answer, the same")
    requests: int | None = option(None, "of each edge; null: until the end", minimum=1)
    think_s: float = option(0.0, "mean pause between two requests, exponential", minimum=0)
    rate: float = option(0.0, "requests a second of each edge, in place of pauses", minimum=0)
    start_within_s: float | None = option(None, "first requests come within this; null: think_s", minimum=0)
    times: Any = option(None, "changes of the edge's own times")
    draft: Any = option(None, "changes of the draft's times")
    verifiers: str = option("", "the group of verifiers it asks; empty: the first")


@dataclass(frozen=True, slots=True)
class VerifierGroup:
    """Describes `count` verifiers alike."""

    name: str = option("verifiers", "of the group, in figures")
    count: int = option(1, "verifiers", minimum=1)
    serve: Any = option(None, "settings of cloud-verifier serve")
    times: Any = option(None, "changes of the verifier's times")
    draft: Any = option(None, "changes of the co-located draft's times")
    kv_tokens: int = option(0, "tokens of KV it holds; 0 is no limit", minimum=0)
    balance: str = option("session", "what picks one of several", choices=BALANCES)


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Describes what `python -m outrider.experiments.simulator` plays."""

    name: str = option("system", "title of the results")
    seconds: float = option(60.0, "of virtual time; less where all requests are answered", minimum=0.001)
    warmup_s: float = option(0.0, "what is not counted at the start", minimum=0)
    seed: int = option(1, "of everything by chance", minimum=0)
    times: Any = option(DEFAULT_TIMES, "name or file of measured times, or the times; none: none takes any")
    edges: Any = option(None, "groups of edges: a list of mappings")
    verifiers: Any = option(None, "groups of verifiers: the same")


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """Holds a group of edges, checked and resolved."""

    group: EdgeGroup
    link: LinkProfile
    config: RunConfig
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    times: EdgeTimes
    draft: DraftTimes
    verifiers: str


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """Holds a group of verifiers, checked and resolved."""

    group: VerifierGroup
    config: ServeConfig
    times: VerifierTimes
    draft: DraftTimes


@dataclass(frozen=True, slots=True)
class System:
    """Holds a whole system, checked and resolved."""

    config: SystemConfig
    times: SystemTimes
    edges: tuple[EdgePlan, ...]
    verifiers: tuple[VerifierPlan, ...]

    @property
    def num_edges(self) -> int:
        """Returns the edges of all groups."""
        return sum(plan.group.count for plan in self.edges)

    def with_edges(self, count: int) -> System:
        """Returns the same mixture of as many edges as asked for, at least one of each group."""
        share = count / self.num_edges
        edges = [
            dataclasses.replace(
                plan,
                group=dataclasses.replace(plan.group, count=max(1, round(plan.group.count * share))),
            )
            for plan in self.edges
        ]
        return dataclasses.replace(self, edges=tuple(edges))


def load_system(source: Path | Mapping[str, Any], **changes: Any) -> System:
    """Reads a system from a file, or from what would be in it; `changes` of top-level keys. Raises
    `UsageError`."""
    where = str(source) if isinstance(source, Path) else "system"
    content = {**(read_mapping(source, _HINT) if isinstance(source, Path) else source), **changes}
    config = load_config(SystemConfig, content=(content, where), env={}).value
    if config.warmup_s >= config.seconds:
        raise UsageError(
            f"{where}: warmup_s is {config.warmup_s:g} and seconds {config.seconds:g}, so that nothing would count; "
            "give more seconds, or less warm-up"
        )
    times = load_times(config.times)
    verifiers = [
        _plan_verifiers(group, f"{where}: verifiers[{number}]", times)
        for number, group in enumerate(_groups(config.verifiers, f"{where}: verifiers"))
    ]
    names = [plan.group.name for plan in verifiers]
    if len(set(names)) < len(names):
        raise UsageError(f"{where}: two groups of verifiers are called alike; give each a name")
    edges = [
        _plan_edges(group, f"{where}: edges[{number}]", times, names)
        for number, group in enumerate(_groups(config.edges, f"{where}: edges"))
    ]
    return System(config, times, tuple(edges), tuple(verifiers))


def _groups(groups: object, where: str) -> list[Mapping[str, Any]]:
    found = groups if isinstance(groups, list | tuple) else [{} if groups is None else groups]
    for group in found:
        if not isinstance(group, Mapping):
            raise ConfigError(f"{where}: is {shown(group)}; expected a list of groups, each keys and values")
    if not found:
        raise ConfigError(f"{where}: is empty; leave it out for one with every default")
    return list(found)


def _plan_verifiers(content: Mapping[str, Any], where: str, times: SystemTimes) -> VerifierPlan:
    group = load_config(VerifierGroup, content=(content, where), env={}).value
    return VerifierPlan(
        group,
        load_config(ServeConfig, content=(group.serve or {}, f"{where}: serve"), env={}).value,
        changed(times.verifier, group.times, f"{where}: times"),
        changed(times.cloud_draft, group.draft, f"{where}: draft"),
    )


def _plan_edges(
    content: Mapping[str, Any], where: str, times: SystemTimes, verifiers: Sequence[str]
) -> EdgePlan:
    group = load_config(EdgeGroup, content=(content, where), env={}).value
    if group.verifiers and group.verifiers not in verifiers:
        raise UsageError(f"{where}: verifiers is {group.verifiers!r}; there are {', '.join(verifiers)}")
    if group.rate and group.think_s:
        raise UsageError(f"{where}: has both a rate and think_s; give one of them")
    draft = changed(times.draft, group.draft, f"{where}: draft")
    config = load_config(RunConfig, content=(group.edge or {}, f"{where}: edge"), env={}).value
    return EdgePlan(
        group,
        load_profile(group.link),
        config,
        _span(group.prompt_tokens, f"{where}: prompt_tokens"),
        _span(group.output_tokens, f"{where}: output_tokens"),
        changed(times.edge, group.times, f"{where}: times"),
        draft,
        group.verifiers or verifiers[0],
    )


def _span(value: object, where: str) -> tuple[int, int]:
    low, high = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
    if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high:
        raise UsageError(f"{where}: is {value!r}; give a number of at least 1, or [lowest, highest]")
    return low, high
