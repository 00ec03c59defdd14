"""Draws the parts of a round's time, one bar for each link."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from outrider.experiments.report.drawing import legend_below
from outrider.experiments.report.figures.base import MAX_CHARTS, Chart, ReportFigure, Table, evenly
from outrider.experiments.report.findings import sentence
from outrider.experiments.report.naming import Arm, Setting, link_label
from outrider.experiments.report.numbers import counted, interval, plain, spread
from outrider.experiments.report.style import Size, colour, series_style
from outrider.experiments.report.verdicts import fastest
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, RoundRow

PARTS = ("draft", "network", "queue", "forward", "rest")
MAX_BARS = 12
NUM_RESAMPLES = 400


@dataclass(frozen=True, slots=True)
class Bar:
    """Holds means over answered rounds, ms. `wall_ms` is from one round's end to the next one's."""

    link: str
    rtt_ms: float
    arm: str
    parts: dict[str, float]
    wall_ms: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_overlapping(self) -> bool:
        """Returns whether parts that ran at once (pipelining) add up to more than the wall time."""
        return sum(self.parts.values()) > 1.02 * self.wall_ms

    @property
    def largest(self) -> str:
        """Returns the part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = [(setting, shape(view, setting)) for setting in view.settings]
    return [_chart(view, setting, bars) for setting, bars in found if bars][:MAX_CHARTS]


def shape(view: View, setting: Setting) -> list[Bar]:
    """Returns a bar a link, by RTT: of the arm that speculates over it with the lowest TPOT."""
    by_link: dict[str, list[CellRow]] = {}
    for cell in view.cells_of(setting):
        if view.is_speculating(cell):
            by_link.setdefault(link_label(cell.link), []).append(cell)
    bars = []
    for cells in by_link.values():
        best = fastest(cells)
        bar = _bar_of(view, best) if best else None
        if bar:
            bars.append(bar)
    return evenly(sorted(bars, key=lambda bar: (bar.rtt_ms, bar.link)), MAX_BARS)


def _bar_of(view: View, cell: CellRow) -> Bar | None:
    """Leaves a request's first round out: there is none before it to measure its wall time from."""
    by_request: dict[str, list[RoundRow]] = {}
    for row in view.rounds_of(cell):
        by_request.setdefault(row.request, []).append(row)
    walls: list[list[float]] = []
    used: list[RoundRow] = []
    for rows in by_request.values():
        rows.sort(key=lambda row: row.round)
        pairs = [(a, b) for a, b in itertools.pairwise(rows) if a.is_answered and b.is_answered]
        walls.append([b.at_ms - a.at_ms for a, b in pairs])
        used += [b for _, b in pairs]
    if not used:
        return None
    wall_ms = statistics.fmean(each for group in walls for each in group)
    low, high = _mean_interval([group for group in walls if group])
    parts = _parts(used, wall_ms)
    arm = view.label(Arm.of(cell))
    return Bar(link_label(cell.link), cell.rtt_ms, arm, parts, wall_ms, low, high, len(used))


def _parts(rows: Sequence[RoundRow], wall_ms: float) -> dict[str, float]:
    means = {
        "draft": statistics.fmean(row.draft_ms for row in rows),
        "network": statistics.fmean(row.net_ms for row in rows),
        "queue": statistics.fmean(row.queue_ms for row in rows),
        "forward": statistics.fmean(row.forward_ms for row in rows),
    }
    return means | {"rest": max(0.0, wall_ms - sum(means.values()))}


def _mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    sums = np.array([sum(group) for group in groups])
    counts = np.array([len(group) for group in groups])
    picks = np.random.default_rng(0).integers(0, len(groups), (NUM_RESAMPLES, len(groups)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def finding(bars: Sequence[Bar]) -> str:
    """Says what takes the largest share, and where."""
    groups: dict[str, list[Bar]] = {}
    for bar in bars:
        groups.setdefault(bar.largest, []).append(bar)
    parts = []
    for name, mine in sorted(groups.items(), key=lambda item: -len(item[1])):
        shares = spread([round(100 * bar.parts[name] / sum(bar.parts.values())) for bar in mine], "%")
        where = f"at {spread([bar.rtt_ms for bar in mine], 'ms')} RTT"
        if len(mine) == len(bars) > 1:
            where = "on every link"
        parts.append(f"{_NAMES[name]} takes the largest share of a round {where} ({shares})")
    return sentence(parts)


_NAMES = {
    "draft": "drafting",
    "network": "the network",
    "queue": "waiting in the verifier",
    "forward": "the target's forward",
    "rest": "everything else",
}


def _chart(view: View, setting: Setting, bars: Sequence[Bar]) -> Chart:
    words = [
        "Means over answered rounds of the fastest arm on each link, without each request's first "
        f"({spread([bar.num_rounds for bar in bars])} rounds a bar). Network is the wait less the verifier's "
        "time; rest is whatever the wall clock saw beyond the parts. The thin mark is a round's mean time "
        "with its 95 % bootstrap interval over requests.",
        "Where it is inside the bar parts ran at once." if any(bar.is_overlapping for bar in bars) else "",
    ]
    return Chart(
        finding=finding(bars),
        caption=" ".join(word for word in words if word),
        table=_table(bars),
        draw=lambda figure, size: draw(bars, figure, size),
        setting=view.describe(setting),
        height=min(1.2, 0.45 + 0.09 * len(bars)),
    )


def _table(bars: Sequence[Bar]) -> Table:
    rows = []
    for bar in bars:
        parts = [plain(bar.parts[name]) for name in PARTS]
        wall = f"{plain(bar.wall_ms)} {interval(bar.low, bar.high)}"
        rows.append((bar.link, bar.arm, *parts, wall, counted(bar.num_rounds, "round")))
    return Table(("link", "arm", *(f"{name}, ms" for name in PARTS), "wall, ms [95 %]", "n"), tuple(rows))


def draw(bars: Sequence[Bar], figure: Figure, size: Size) -> None:
    """Draws the bars."""
    axes = figure.add_subplot()
    ordered = list(reversed(bars))
    places = range(len(ordered))
    lefts = np.zeros(len(ordered))
    for index, name in enumerate(PARTS):
        style = series_style(index)
        widths = np.array([bar.parts[name] for bar in ordered])
        axes.barh(places, widths, left=lefts, height=0.62, color=style.colour, hatch=style.hatch,
                  edgecolor=colour("paper"), linewidth=0.6, label=name)  # fmt: skip
        lefts += widths
    walls = [bar.wall_ms for bar in ordered]
    errors = [[bar.wall_ms - bar.low for bar in ordered], [bar.high - bar.wall_ms for bar in ordered]]
    axes.errorbar(walls, places, xerr=errors, fmt="|", color=colour("ink"), markersize=15, capsize=3,
                  label="wall time", elinewidth=1.2)  # fmt: skip
    axes.set_yticks(list(places), [_short(bar.link, size) for bar in ordered])
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, None)
    axes.set_xlabel("ms a round")
    legend_below(figure, axes, size, columns=3 if size.is_narrow else 6)


def _short(name: str, size: Size) -> str:
    most = 14 if size.is_narrow else 26
    return name if len(name) <= most else name[: most - 1] + "…"


FIGURE = ReportFigure(
    title="Where a round's time goes",
    needs="any sweep with speculation over a link (rounds.jsonl)",
    charts=charts,
    reading="Shorten the longest part: the network by longer drafts, drafting by shorter ones.",
)
