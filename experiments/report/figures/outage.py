"""Draws the tokens that are written while the link is gone, by origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from outrider.common.types import Origin
from outrider.experiments.report.drawing import legend_below
from outrider.experiments.report.figures.base import MAX_CHARTS, Chart, ReportFigure, Table
from outrider.experiments.report.findings import sentence
from outrider.experiments.report.naming import Arm, link_label, outages_of
from outrider.experiments.report.numbers import counted, plain
from outrider.experiments.report.style import Size, colour, series_style
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, RequestRow

NUM_BINS = 36
_UNVERIFIED = tuple(str(origin) for origin in Origin if not origin.is_verified)


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds tokens a second by origin and time since the link opened, mean over requests: with each of them outages
    begin anew."""

    arm: str
    link: str
    outages: list[tuple[float, float]]  # from, to; seconds
    edges_s: NDArray[np.float64]  # [num_bins + 1]
    rates: dict[str, NDArray[np.float64]]  # by origin: [num_bins]
    num_requests: int
    written: float  # tokens of a request during outages
    unverified: float  # of them
    back_after_s: float | None  # from the last outage's end to the first verified token, mean

    @property
    def verified(self) -> float:
        """Returns the verified tokens of a request during outages."""
        return self.written - self.unverified


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = []
    for setting in view.settings:
        cells = [cell for cell in view.cells_of(setting) if outages_of(cell.link)]
        shapes = [each for cell in cells if (each := shape(view, cell))]
        shapes.sort(key=lambda each: -each.written)
        found += [_chart(view.describe(setting), each) for each in shapes]
    return found[:MAX_CHARTS]


def shape(view: View, cell: CellRow) -> Shape | None:
    """Returns what is drawn of a cell; None where no request was running when an outage began."""
    outages = outages_of(cell.link)
    rows = view.requests_of(cell)
    tokens = [(row, (row.link_age_ms + at) / 1e3, origin) for row in rows for at, origin in _tokens(row)]
    if not tokens or not any(_spans(row, outages[0][0]) for row in rows):
        return None
    last = max(outages[-1][1] * 1.6, outages[-1][1] + 2.0)
    tokens = [each for each in tokens if each[1] <= last]
    end = min(last, max(time for _, time, _ in tokens))
    edges = np.linspace(0.0, max(end, outages[-1][1]), NUM_BINS + 1)
    num_requests = len({row.request for row in rows})
    rates = {}
    origins = [str(each) for each in Origin]
    for origin in dict.fromkeys(origins + [mine for *_, mine in tokens]):
        times = [time for _, time, mine in tokens if mine == origin]
        if times:
            rates[origin] = np.histogram(times, edges)[0] / num_requests / (edges[1] - edges[0])
    during = [origin for _, time, origin in tokens if any(low <= time < high for low, high in outages)]
    unverified = sum(origin in _UNVERIFIED for origin in during)
    return Shape(
        arm=view.label(Arm.of(cell)),
        link=link_label(cell.link),
        outages=outages,
        edges_s=edges,
        rates=rates,
        num_requests=num_requests,
        written=len(during) / num_requests,
        unverified=unverified / num_requests,
        back_after_s=_back_after_s(tokens, outages[-1][1]),
    )


def _tokens(row: RequestRow) -> list[tuple[float, str]]:
    return list(zip(row.token_times_ms, row.token_origins, strict=False))


def _spans(row: RequestRow, at_s: float) -> bool:
    times = row.token_times_ms
    return bool(times) and row.link_age_ms / 1e3 <= at_s <= (row.link_age_ms + times[-1]) / 1e3


def _back_after_s(tokens: Sequence[tuple[RequestRow, float, str]], end_s: float) -> float | None:
    first: dict[str, float] = {}
    for row, time, origin in tokens:
        if time >= end_s and origin not in _UNVERIFIED:
            first[row.request] = min(time, first.get(row.request, time))
    return float(np.mean(list(first.values()))) - end_s if first else None


def finding(shaped: Shape) -> str:
    """Says how many tokens were written while the link was gone, how many of them unverified, and when it
    went on."""
    length = plain(sum(high - low for low, high in shaped.outages))
    written, unverified = plain(round(shaped.written, 1)), plain(round(shaped.unverified, 1))
    if shaped.written < 0.05:
        text = f"{shaped.arm} writes nothing while the link is gone for {length} s"
    elif shaped.unverified < 0.05:
        text = f"{shaped.arm} writes {written} tokens in {length} s without a link, every one verified"
    else:
        text = f"{shaped.arm} writes {written} tokens in {length} s without a link, {unverified} unverified"
    if shaped.back_after_s is None:
        return sentence([text, "no verified token came after it"])
    back = plain(round(shaped.back_after_s, 2))
    return sentence([text, f"verified tokens come again {back} s after it is back"])


def _chart(setting: str, shaped: Shape) -> Chart:
    caption = (
        f"Tokens a second by origin, mean over {counted(shaped.num_requests, 'request')} on {shaped.link}, in bins of "
        f"{plain(float(shaped.edges_s[1]))} s since the link opened; the link is gone in the shaded time. "
        "Tokens that arrive just after it began were on their way."
    )
    return Chart(
        finding=finding(shaped),
        caption=caption,
        table=_table(shaped),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=", ".join(part for part in (setting, shaped.arm) if part),
    )


def _table(shaped: Shape) -> Table:
    centres = (shaped.edges_s[:-1] + shaped.edges_s[1:]) / 2
    width = shaped.edges_s[1] - shaped.edges_s[0]
    is_during = np.zeros(len(centres), bool)
    for low, high in shaped.outages:
        is_during |= (centres >= low) & (centres < high)
    is_before = centres < shaped.outages[0][0]
    rows = []
    for origin, rates in shaped.rates.items():
        counts = [plain(round(float(rates[mask].sum() * width), 2)) for mask in
                  (is_before, is_during, ~is_before & ~is_during)]  # fmt: skip
        rows.append((origin, "no" if origin in _UNVERIFIED else "yes", *counts))
    columns = ("origin", "verified", "tokens of a request before", "during", "after or between")
    return Table(columns, tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the shape."""
    axes = figure.add_subplot()
    for index, (low, high) in enumerate(shaped.outages):
        axes.axvspan(low, high, color=colour("muted"), alpha=0.22, linewidth=0,
                     label="link gone" if index == 0 else None)  # fmt: skip
    floor = np.zeros(len(shaped.edges_s) - 1)
    order = [str(origin) for origin in Origin]
    for origin, rates in shaped.rates.items():
        style = series_style(order.index(origin) if origin in order else len(order))
        name = f"{origin} (unverified)" if origin in _UNVERIFIED else origin
        axes.bar(shaped.edges_s[:-1], rates, width=np.diff(shaped.edges_s), bottom=floor, align="edge",
                 color=style.colour, hatch=style.hatch, edgecolor=colour("paper"), linewidth=0.3,
                 label=name)  # fmt: skip
        floor = floor + rates
    axes.set_xlim(0, shaped.edges_s[-1])
    axes.set_ylim(0, None)
    axes.set_xlabel("seconds since the link opened")
    axes.set_ylabel("tokens per second")
    legend_below(figure, axes, size)


FIGURE = ReportFigure(
    title="While the link is gone",
    needs="a link with outages, and requests long enough to meet them",
    charts=charts,
    reading="Unverified tokens are the draft's own and marked in the text.",
)
