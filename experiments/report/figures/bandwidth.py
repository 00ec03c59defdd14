"""TPOT against bandwidth, other things equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from outrider.experiments.report.drawing import legend_below, number_axis, points, spread_axis
from outrider.experiments.report.figures.base import MAX_CHARTS, Chart, ReportFigure, Table
from outrider.experiments.report.figures.tpot_rtt import chosen_arms
from outrider.experiments.report.naming import TPOT, Arm, Setting, link_label
from outrider.experiments.report.numbers import plain, spread, times, with_interval
from outrider.experiments.report.style import Size, series_style
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, Metric

NO_LIMIT = "no limit"
RATES = ("up_mbit", "down_mbit")


@dataclass(frozen=True, slots=True)
class Series:
    """Holds one arm's tokens a second by rate."""

    label: str
    style: int
    points: list[tuple[float, Metric]]  # by the slower direction's Mbit/s; inf where there is no limit


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds what one chart draws."""

    family: str
    rtt_ms: float
    series: list[Series]

    @property
    def rates(self) -> list[float]:
        """Returns every rate of any series, ascending."""
        return sorted({rate for series in self.series for rate, _ in series.points})


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = [(setting, each) for setting in view.settings for each in shapes(view, setting)]
    return [_chart(view, setting, each) for setting, each in found[:MAX_CHARTS]]


def shapes(view: View, setting: Setting) -> list[Shape]:
    """Returns one shape for each family of links that differ in nothing but their rates, of at least two
    rates."""
    families: dict[str, list[CellRow]] = {}
    for cell in view.cells_of(setting):
        families.setdefault(_family(cell.link), []).append(cell)
    found = []
    for cells in families.values():
        if len({_rate_of(cell.link) for cell in cells}) > 1:
            styles = view.styles(chosen_arms(view, cells))
            series = [_series(view, arm, style, cells) for arm, style in styles.items()]
            found.append(Shape(_family(cells[0].link), cells[0].rtt_ms, series))
    return sorted(found, key=lambda shaped: -len(shaped.rates))


def _rate_of(link: dict[str, Any]) -> float:
    limits = [float(link[name]) for name in RATES if link.get(name)]
    return min(limits, default=math.inf)


def _family(link: dict[str, Any]) -> str:
    different = (*RATES, "name", "seed", "queue_kb")
    return repr(sorted((name, value) for name, value in link.items() if name not in different))


def _series(view: View, arm: Arm, style: int, cells: Sequence[CellRow]) -> Series:
    mine = [(_rate_of(cell.link), cell.metrics[TPOT]) for cell in cells if Arm.of(cell) == arm]
    return Series(view.label(arm), style, sorted(mine, key=lambda pair: pair[0]))


def finding(shaped: Shape) -> str:
    """Says how much slower tokens are at the lowest rate than at the highest: for the arms of most and
    least."""
    slowed = {}
    for series in shaped.series:
        if len(series.points) > 1:
            slowed[series.label] = series.points[0][1].value / series.points[-1][1].value
    if not slowed:
        return f"TPOT at {_rate(shaped.rates[0])} to {_rate(shaped.rates[-1])}"
    most, least = max(slowed, key=lambda name: slowed[name]), min(slowed, key=lambda name: slowed[name])
    text = (
        f"From {_rate(shaped.rates[-1])} down to {_rate(shaped.rates[0])} a token comes to take "
        f"{times(slowed[most])} times as long with {most}"
    )
    return text if most == least else f"{text}, {times(slowed[least])} times with {least}"


def _rate(rate: float) -> str:
    return NO_LIMIT if math.isinf(rate) else f"{plain(rate)} Mbit/s"


def _chart(view: View, setting: Setting, shaped: Shape) -> Chart:
    n = [metric.n for series in shaped.series for _, metric in series.points]
    caption = (
        f"Mean time per output token at {plain(shaped.rtt_ms)} ms RTT by the rate of the slower direction; "
        f"95 % bootstrap intervals over {spread(n)} requests a point."
    )
    return Chart(
        finding=finding(shaped),
        caption=caption,
        table=_table(view, setting, shaped),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=view.describe(setting),
    )


def _table(view: View, setting: Setting, shaped: Shape) -> Table:
    cells = [cell for cell in view.cells_of(setting) if _family(cell.link) == shaped.family]
    rows = []
    for cell in sorted(cells, key=lambda cell: _rate_of(cell.link)):
        up, down = (_rate(float(cell.link.get(name) or math.inf)) for name in RATES)
        metric = cell.metrics[TPOT]
        arm = view.label(Arm.of(cell))
        rows.append((link_label(cell.link), up, down, arm, with_interval(metric), str(metric.n)))
    return Table(("link", "up", "down", "arm", "TPOT, ms [95 %]", "n"), tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the shape."""
    axes = figure.add_subplot()
    limits = [rate for rate in shaped.rates if not math.isinf(rate)]
    beyond = max(limits) * 4  # where "no limit" stands

    def place(rate: float) -> float:
        return beyond if math.isinf(rate) else rate

    for series in shaped.series:
        places = [place(rate) for rate, _ in series.points]
        metrics = [metric for _, metric in series.points]
        points(axes, places, metrics, series_style(series.style), series.label)
    spread_axis(axes, "x", [place(rate) for rate in shaped.rates], size)
    if any(map(math.isinf, shaped.rates)):
        ticks = list(axes.get_xticks())
        axes.set_xticks(ticks, [NO_LIMIT if tick == beyond else plain(tick) for tick in ticks])
    number_axis(axes, "y")
    axes.set_xlabel("bandwidth of the slower direction, Mbit/s")
    axes.set_ylabel("TPOT, ms")
    legend_below(figure, axes, size)


FIGURE = ReportFigure(
    title="Time per token against bandwidth",
    needs="a sweep over up_mbit or down_mbit of links that are otherwise alike",
    charts=charts,
    reading="A flat line needs no more bandwidth than it has; rounds are small, so only slow links bend it.",
)
