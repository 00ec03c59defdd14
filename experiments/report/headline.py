"""Says in sentences which mode is fastest where: losses of speculation over the link come first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.experiments.report.naming import TPOT, Arm, Setting
from outrider.experiments.report.numbers import listed, ratio_spread, spread, with_interval
from outrider.experiments.report.verdicts import RIVALS, Relation, Verdict, verdicts
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow

LOSS, EVEN, WIN, NOTE = "loss", "even", "win", "note"


@dataclass(frozen=True, slots=True)
class _Statement:
    kind: str  # LOSS, EVEN, WIN or NOTE
    text: str
    rival: str = ""  # what speculation is compared with

    @property
    def tag(self) -> str:
        """Returns the comparison in short."""
        words = {LOSS: "slower than", EVEN: "even with", WIN: "faster than"}
        return f"{words[self.kind]} {self.rival}" if self.rival else "note"


@dataclass(frozen=True, slots=True)
class _WinnerRow:
    kind: str
    link: str
    rtt: str
    winner: str
    speculation: str
    arm: str
    rivals: tuple[str, ...]  # in the order of RIVALS
    edge_only: str


@dataclass(frozen=True, slots=True)
class _SettingHeadline:
    setting: str
    statements: list[_Statement]
    rows: list[_WinnerRow]  # losses first


def headlines(view: View) -> list[_SettingHeadline]:
    """Returns a headline a setting; those in which speculation loses somewhere come first."""
    made = [_headline(view, setting) for setting in view.settings]
    return sorted(made, key=lambda each: all(s.kind != LOSS for s in each.statements))


def statements(found: Sequence[Verdict]) -> list[_Statement]:
    """Returns sentences rival by rival: losses, then what cannot be told apart, then wins; links by RTT
    within each."""
    lines = []
    for kind in RIVALS:
        lost = [v for v in found if v.outcomes.get(kind) is Relation.WORSE]
        if lost:
            ratios = ratio_spread([1 / v.against[kind].ratio for v in lost])
            text = f"{kind} is {ratios} times as fast as speculation over the link {_where(lost, found)}."
            lines.append(_Statement(LOSS, text[:1].upper() + text[1:], kind))
    for kind in RIVALS:
        even = [v for v in found if v.outcomes.get(kind) is Relation.EVEN]
        if even:
            text = f"Speculation over the link and {kind} cannot be told apart {_where(even, found)}."
            lines.append(_Statement(EVEN, text, kind))
    for kind in RIVALS:
        won = [v for v in found if v.outcomes.get(kind) is Relation.BETTER]
        if won:
            ratios = ratio_spread([v.against[kind].ratio for v in won])
            text = f"Speculation over the link is {ratios} times as fast as {kind} {_where(won, found)}."
            lines.append(_Statement(WIN, text, kind))
    unknown = [v for v in found if not v.outcomes]
    if unknown:
        text = f"Nothing to compare {_where(unknown, found)}: cloud-only and co-located did not run there."
        lines.append(_Statement(NOTE, text))
    return lines


def _where(some: Sequence[Verdict], found: Sequence[Verdict]) -> str:
    rtts = spread([v.rtt_ms for v in some], "ms")
    if len(some) == len(found) > 1:
        return f"on every link (RTT {rtts})"
    return f"on {listed([v.name for v in some])} (RTT {rtts})"


def _headline(view: View, setting: Setting) -> _SettingHeadline:
    found = verdicts(view, setting)
    rows = [_row(view, setting, verdict) for verdict in found]
    order = [LOSS, EVEN, WIN, NOTE]
    rows.sort(key=lambda row: order.index(row.kind))
    return _SettingHeadline(view.describe(setting), statements(found), rows)


def _row(view: View, setting: Setting, verdict: Verdict) -> _WinnerRow:
    kinds: dict[str, Callable[[Verdict], bool]] = {
        LOSS: lambda v: v.winner in RIVALS,
        WIN: lambda v: bool(v.winner),
        EVEN: lambda v: bool(v.outcomes),
    }
    kind = next((name for name, holds in kinds.items() if holds(verdict)), NOTE)
    best = verdict.best
    return _WinnerRow(
        kind=kind,
        link=verdict.name,
        rtt=spread([verdict.rtt_ms]),
        winner=verdict.winner or (" or ".join(verdict.contenders) if verdict.outcomes else "not compared"),
        speculation=_tpot(best),
        arm=_arm(view, best),
        rivals=tuple(_tpot(verdict.rivals.get(each)) for each in RIVALS),
        edge_only=_tpot(view.edge_only_of(setting)),
    )


def _tpot(cell: CellRow | None) -> str:
    return with_interval(cell.metrics[TPOT] if cell else None)


def _arm(view: View, cell: CellRow | None) -> str:
    if cell is None:
        return ""
    return view.label(Arm.of(cell)) + ("" if view.is_exact(cell) else " (approximate)")
