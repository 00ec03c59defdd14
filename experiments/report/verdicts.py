"""Finds the fastest arm on each link of a setting, by TPOT. Pure.

A difference counts where the interval of the paired comparison leaves 1 out and the difference is larger than
what two equal cells of the folder differ by (the A/A spread).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.experiments.report.naming import CLOUD_ONLY, CO_LOCATED, TPOT, Setting, link_label
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, Comparison

RIVALS = (CO_LOCATED, CLOUD_ONLY)


class Relation(enum.StrEnum):
    """Says how a cell compares with another."""

    BETTER = "better"
    WORSE = "worse"
    EVEN = "even"  # not told apart
    UNKNOWN = "unknown"  # not compared


@dataclass(frozen=True, slots=True)
class Verdict:
    """Compares the cells of one link. `best` is the exact speculation over the link of the lowest TPOT; an
    approximate one where there is no other. Cells that chose to stream instead are none."""

    link: dict[str, Any]
    best: CellRow | None
    rivals: dict[str, CellRow] = field(default_factory=dict)  # by kind: the one of the lowest TPOT
    against: dict[str, Comparison] = field(default_factory=dict)
    outcomes: dict[str, Relation] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Returns the link's name."""
        return link_label(self.link)

    @property
    def rtt_ms(self) -> float:
        """Returns the link's nominal RTT."""
        return float(self.link.get("rtt_ms", 0.0))

    @property
    def winner(self) -> str:
        """Returns a rival's kind, "speculation", or "" where nobody clearly wins."""
        beating = [kind for kind, outcome in self.outcomes.items() if outcome is Relation.WORSE]
        if beating:
            return min(beating, key=lambda kind: self.rivals[kind].metrics[TPOT].value)
        if self.outcomes and all(outcome is Relation.BETTER for outcome in self.outcomes.values()):
            return "speculation"
        return ""

    @property
    def contenders(self) -> list[str]:
        """Returns what cannot be told apart at the front where nobody wins: speculation, and the rivals it does not
        beat."""
        return ["speculation", *(kind for kind, each in self.outcomes.items() if each is not Relation.BETTER)]


def verdicts(view: View, setting: Setting) -> list[Verdict]:
    """Returns a verdict a link, by RTT; links are told apart by everything but the seed."""
    cells: dict[str, list[CellRow]] = {}
    for cell in view.cells_of(setting):
        cells.setdefault(_link_key(cell.link), []).append(cell)
    factor = aa_factor(view)
    found = [_verdict(view, on_link, factor) for on_link in cells.values()]
    return sorted(found, key=lambda verdict: (verdict.rtt_ms, verdict.name))


def aa_factor(view: View) -> float:
    """Returns how many times apart equal cells of the folder are at most; 1 where it was not measured."""
    factors = [1.0]
    for cell in view.sweep.cells:
        measure = cell.a_a.get(TPOT)
        if isinstance(measure, dict) and measure.get("speedup"):
            speedup = float(measure["speedup"])
            factors.append(max(speedup, 1 / speedup))
    return max(factors)


def outcome(comparison: Comparison | None, factor: float) -> Relation:
    """Returns how a cell compares; `factor` is the A/A spread that a difference must exceed."""
    if comparison is None:
        return Relation.UNKNOWN
    if comparison.low is None or comparison.high is None:  # too few pairs for an interval
        return Relation.EVEN
    if comparison.low > 1 and comparison.ratio > factor:
        return Relation.BETTER
    if comparison.high < 1 and comparison.ratio < 1 / factor:
        return Relation.WORSE
    return Relation.EVEN


def fastest(cells: Sequence[CellRow]) -> CellRow | None:
    """Returns the cell of the lowest TPOT."""
    return min(cells, key=lambda cell: cell.metrics[TPOT].value, default=None)


def _verdict(view: View, cells: list[CellRow], factor: float) -> Verdict:
    speculating = [cell for cell in cells if view.is_speculating(cell)]
    exact = [cell for cell in speculating if view.is_exact(cell)]
    best = fastest(exact or speculating)
    rivals, against, outcomes = {}, {}, {}
    for kind in RIVALS:
        rival = fastest([cell for cell in cells if cell.mode == kind])
        if rival is None:
            continue
        rivals[kind] = rival
        comparison = view.comparison(best, kind) if best else None
        if comparison is not None:
            against[kind] = comparison
            outcomes[kind] = outcome(comparison, factor)
    return Verdict(cells[0].link, best, rivals, against, outcomes)


def _link_key(link: dict[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in link.items() if name != "seed"))
