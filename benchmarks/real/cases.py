"""The cases that take turns at a point, and which of them are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12,
    16,
)  # of drafts that all have one length: between two of them little changes
_SPACING = 1.5  # between lengths that take turns: closer ones differ by less than runs do


@dataclass(frozen=True, slots=True)
class RealCase:
    """Names settings of `edge-client run`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


DEFAULT = RealCase("default")
AGAIN = RealCase("default again")  # for the A/A ratio
CLOUD_ONLY = RealCase("cloud-only", {"mode": "cloud-only"})
OPTIMAL = RealCase(
    "optimal", {"mode": "speculative", "depth_policy": "optimal", "pipeline": "off", "tree": "off"}
)
PIPELINE_ON = RealCase("pipeline on", {**OPTIMAL.settings, "pipeline": "on"})
PIPELINE_AUTO = RealCase("pipeline auto", {**OPTIMAL.settings, "pipeline": "auto"})
LEARNING = (DEFAULT, AGAIN, PIPELINE_AUTO)  # begin later texts with what earlier ones taught


def fixed_length(pipeline: str, num_tokens: int) -> RealCase:
    """Returns the case of drafts that all have `num_tokens`; `pipeline` is on or off."""
    name = f"{'synchronous' if pipeline == 'off' else 'pipelined'} {num_tokens}"
    settings = {"mode": "speculative", "pipeline": pipeline, "num_speculative_tokens": num_tokens}
    return RealCase(name, settings)


SYNCHRONOUS = tuple(fixed_length("off", n) for n in LENGTHS)
PIPELINED = tuple(fixed_length("on", n) for n in LENGTHS)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Holds the fixed settings that virtual time finds worth a real run."""

    synchronous: tuple[RealCase, ...]
    pipelined: tuple[RealCase, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all of them, cloud-only included."""
        return tuple(case.name for case in (*self.synchronous, *self.pipelined, CLOUD_ONLY))


def name_candidates(virtual_ms: Mapping[str, float]) -> Candidates:
    """Returns three lengths of synchronous rounds and two of pipelined ones: the fastest by virtual time (ms a token
    by the case's name), and the fastest of those that are clearly shorter or longer."""
    return Candidates(_spaced(SYNCHRONOUS, virtual_ms, 3), _spaced(PIPELINED, virtual_ms, 2))


def _spaced(cases: Sequence[RealCase], virtual_ms: Mapping[str, float], count: int) -> tuple[RealCase, ...]:
    def length(case: RealCase) -> int:
        return int(case.settings["num_speculative_tokens"])

    ranked = sorted(cases, key=lambda case: virtual_ms[case.name])
    best = length(ranked[0])
    shorter = [case for case in ranked if length(case) * _SPACING <= best][:1]
    longer = [case for case in ranked if length(case) >= best * _SPACING][:1]
    others = sorted((*shorter, *longer), key=lambda case: virtual_ms[case.name])
    return (ranked[0], *others[: count - 1])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Says what is compared with the fastest of which others. Several cases of a subject are the same settings."""

    id: str
    subject: tuple[str, ...]
    others: tuple[str, ...]


def comparisons(candidates: Candidates, is_near: bool) -> tuple[Comparison, ...]:
    """Returns the comparisons at a point: nobody pipelines on loopback by hand, where nothing is to be hidden."""
    default = (DEFAULT.name, AGAIN.name)
    ways = (OPTIMAL.name,) if is_near else (OPTIMAL.name, PIPELINE_ON.name)
    return (
        Comparison("auto", default, candidates.names),
        Comparison("never_slower", default, (CLOUD_ONLY.name,)),
        Comparison("optimal", (OPTIMAL.name,), tuple(case.name for case in candidates.synchronous)),
        Comparison("pipeline_auto", (PIPELINE_AUTO.name,), ways),
    )


def cases_at(candidates: Candidates, is_near: bool) -> tuple[RealCase, ...]:
    """Returns all cases that take turns at a point."""
    on = () if is_near else (PIPELINE_ON,)
    fixed = (*candidates.synchronous, *candidates.pipelined, CLOUD_ONLY)
    return (DEFAULT, AGAIN, OPTIMAL, PIPELINE_AUTO, *on, *fixed)
