"""The distribution of commit gaps: how long a reader waits for the next tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from outrider.experiments.report.drawing import legend_below, log_axis
from outrider.experiments.report.figures.base import MAX_CHARTS, MAX_SERIES, Chart, ReportFigure, Table
from outrider.experiments.report.figures.tpot_rtt import chosen_arms
from outrider.experiments.report.findings import sentence
from outrider.experiments.report.naming import EDGE_ONLY, Arm, Setting, link_label
from outrider.experiments.report.numbers import interval, plain, spread
from outrider.experiments.report.style import Size, series_style
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, RequestRow

SHARES = np.concatenate([np.arange(0.02, 0.9, 0.02), np.arange(0.9, 0.996, 0.005)])
TOLD = (0.50, 0.95, 0.99)  # in the table
NUM_RESAMPLES = 200
MAX_LINKS = 2  # of one setting

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds quantiles of one arm's gaps at `SHARES`, and their 95 % band."""

    label: str
    style: int
    gaps_ms: Values  # [len(SHARES)]
    low: Values
    high: Values
    told: list[tuple[float, float, float]]  # quantile at each of TOLD, low, high
    num_gaps: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds what one chart draws."""

    link: str
    rtt_ms: float
    curves: list[Curve]


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = []
    for setting in view.settings:
        found += [_chart(view, setting, each) for each in shapes(view, setting)]
    return found[:MAX_CHARTS]


def shapes(view: View, setting: Setting) -> list[Shape]:
    """Returns, of the links of a setting, those of the shortest and the longest RTT."""
    by_link: dict[str, list[CellRow]] = {}
    for cell in view.cells_of(setting):
        by_link.setdefault(link_label(cell.link), []).append(cell)
    ordered = sorted(by_link.values(), key=lambda cells: cells[0].rtt_ms)
    ends = [ordered[index] for index in sorted({0, len(ordered) - 1})] if ordered else []
    found = []
    for cells in ends[:MAX_LINKS]:
        styles = view.styles(chosen_arms(view, cells, MAX_SERIES))
        curves = [curve for arm, style in styles.items() if (curve := _curve(view, arm, style, cells))]
        if curves:
            found.append(Shape(link_label(cells[0].link), cells[0].rtt_ms, curves))
    return found


def _gaps_of(request: RequestRow) -> list[float]:
    times = request.commit_times_ms
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _curve(view: View, arm: Arm, style: int, cells: Sequence[CellRow]) -> Curve | None:
    mine = [cell for cell in cells if Arm.of(cell) == arm and arm.mode != EDGE_ONLY]
    per_request = [gaps for cell in mine for row in view.requests_of(cell) if (gaps := _gaps_of(row))]
    if not per_request:
        return None
    shares = np.concatenate([SHARES, TOLD])
    values, low, high = quantiles(per_request, shares)
    num = len(SHARES)
    told = [(float(values[i]), float(low[i]), float(high[i])) for i in range(num, len(shares))]
    bounds = (values[:num], low[:num], high[:num])
    num_gaps = sum(map(len, per_request))
    return Curve(view.label(arm), style, *bounds, told, num_gaps, len(per_request))


def quantiles(per_request: Sequence[Sequence[float]], shares: Values) -> tuple[Values, Values, Values]:
    """Returns quantiles of all gaps together; bounds by a bootstrap over requests, whose gaps are not
    independent."""
    gaps = np.concatenate([np.asarray(each, float) for each in per_request])
    owners = np.repeat(np.arange(len(per_request)), [len(each) for each in per_request])
    order = np.argsort(gaps, kind="stable")
    gaps, owners = gaps[order], owners[order]
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(per_request), [1 / len(per_request)] * len(per_request), NUM_RESAMPLES)
    resampled = np.stack([_weighted_quantiles(gaps, weights[owners], shares) for weights in drawn])
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return _weighted_quantiles(gaps, np.ones(len(gaps), int), shares), low, high


def _weighted_quantiles(ordered: Values, weights: NDArray[np.int64], shares: Values) -> Values:
    reached = np.cumsum(weights)
    places = np.searchsorted(reached, np.ceil(shares * reached[-1] - 1e-9))
    found: Values = ordered[np.minimum(places, len(ordered) - 1)]
    return found


def finding(shaped: Shape) -> str:
    """Names the arm with the shortest p95, and whether its median is the shortest too."""
    where = f"on {shaped.link} ({plain(shaped.rtt_ms)} ms RTT)"
    if len(shaped.curves) == 1:
        p95 = shaped.curves[0].told[1][0]
        return sentence([f"19 of 20 waits for {shaped.curves[0].label} are under {plain(p95)} ms {where}"])
    by_tail = sorted(shaped.curves, key=lambda curve: curve.told[1][0])
    by_median = sorted(shaped.curves, key=lambda curve: curve.told[0][0])
    steady, worst = by_tail[0], by_tail[-1]
    text = (
        f"{steady.label} has the shortest long waits {where}: p95 {plain(steady.told[1][0])} ms against "
        f"{plain(worst.told[1][0])} ms with {worst.label}"
    )
    if by_median[0] is not steady:
        text += f"; the shortest median is {by_median[0].label}'s, {plain(by_median[0].told[0][0])} ms"
    return sentence([text])


def _chart(view: View, setting: Setting, shaped: Shape) -> Chart:
    gaps = spread([curve.num_gaps for curve in shaped.curves])
    requests = spread([curve.num_requests for curve in shaped.curves])
    caption = (
        f"Time between two commits (tokens that joined the text together), {shaped.link}; {gaps} gaps of "
        f"{requests} requests an arm; bands are 95 % by {NUM_RESAMPLES} resamples of whole requests."
    )
    return Chart(
        finding=finding(shaped),
        caption=caption,
        table=_table(shaped),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=view.describe(setting),
    )


def _table(shaped: Shape) -> Table:
    rows = []
    for curve in shaped.curves:
        told = [f"{plain(value)} {interval(low, high)}" for value, low, high in curve.told]
        rows.append((curve.label, *told, f"{curve.num_gaps:,}", str(curve.num_requests)))
    heads = [f"p{100 * share:.0f}, ms [95 %]" for share in TOLD]
    return Table(("arm", *heads, "gaps", "requests"), tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the shape."""
    axes = figure.add_subplot()
    for curve in shaped.curves:
        style = series_style(curve.style)
        arguments = style.line_arguments() | {"markevery": (curve.style, 9)}
        axes.plot(curve.gaps_ms, SHARES * 100, label=curve.label, **arguments)
        axes.fill_betweenx(SHARES * 100, curve.low, curve.high, color=style.colour, alpha=0.18, linewidth=0)
    log_axis(axes, "x")
    axes.set_ylim(0, 100)
    axes.set_xlabel("commit gap, ms")
    axes.set_ylabel("share of gaps not longer, %")
    legend_below(figure, axes, size)


FIGURE = ReportFigure(
    title="How long a reader waits for the next tokens",
    needs="any sweep with requests of several rounds",
    charts=charts,
    reading="A curve further left waits less; a long tail to the right is what a reader feels as a stall. "
    "Cloud-only brings one token a gap, speculation several.",
)
