"""Tokens a second against draft length, a line a link, and one for trees where some were drafted; what the cost model
predicts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.figure import Figure

from outrider.experiments.report.drawing import (
    HOLLOW,
    legend_below,
    number_axis,
    points,
    predicted_points,
    spread_axis,
)
from outrider.experiments.report.figures.base import (
    MAX_CHARTS,
    MAX_SERIES,
    Chart,
    ReportFigure,
    Table,
    evenly,
)
from outrider.experiments.report.findings import sentence
from outrider.experiments.report.naming import CLOUD_ONLY, CO_LOCATED, TPOT, Setting, link_label
from outrider.experiments.report.numbers import ABSENT, counted, listed, plain, spread, with_interval
from outrider.experiments.report.style import Size, colour, series_style
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, Metric

MAX_GROUPS = 3  # of links with one answer: past it the title tells of the first and the last link


@dataclass(frozen=True, slots=True)
class Line:
    """Holds one link's tokens a second by draft length, or by the nodes of trees."""

    link: str
    rtt_ms: float
    is_tree: bool
    measured: dict[int, Metric]
    predicted: dict[int, float]
    cloud_only: float | None

    @property
    def best(self) -> int:
        """Returns the fastest length."""
        return max(self.measured, key=lambda n: self.measured[n].value)

    @property
    def as_good(self) -> list[int]:
        """Returns the lengths whose interval reaches the best one's."""
        return self.reaching(_low(self.measured[self.best]))

    def reaching(self, bar: float) -> list[int]:
        """Returns the lengths whose interval reaches so many tokens a second."""
        return sorted(n for n, metric in self.measured.items() if _high(metric) >= bar)


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds what one chart draws."""

    arm: str
    lines: list[Line]
    num_left_out: int

    @property
    def has_trees(self) -> bool:
        """Returns whether a line is of trees."""
        return any(line.is_tree for line in self.lines)

    @property
    def links(self) -> list[list[Line]]:
        """Returns the lines by link."""
        return [list(lines) for _, lines in groupby(self.lines, key=lambda line: line.link)]


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = [(setting, each) for setting in view.settings for each in shapes(view, setting)]
    return [_chart(view, setting, each) for setting, each in found[:MAX_CHARTS]]


def shapes(view: View, setting: Setting) -> list[Shape]:
    """Returns one shape for each way to speculate that was run with several draft lengths, or sizes of trees, on a
    link."""
    groups: dict[tuple[str, str, str, str], dict[str, list[CellRow]]] = {}
    for cell in view.cells_of(setting):
        is_sized = drafted(cell) and cell.tree != "auto"
        if is_sized and (cell.mode == CO_LOCATED or view.is_speculating(cell)):
            key = (cell.mode, cell.depth_policy, cell.method, cell.variant)
            groups.setdefault(key, {}).setdefault(link_label(cell.link), []).append(cell)
    found = []
    for key, by_link in groups.items():
        several = [cells for cells in by_link.values() if len({(c.tree, drafted(c)) for c in cells}) > 1]
        kinds = [
            [cell for cell in cells if (cell.tree != "off") == is_tree]
            for cells in several
            for is_tree in (False, True)
        ]
        unsorted = [_line(view, setting, cells) for cells in kinds if cells]
        lines = sorted(unsorted, key=lambda line: (line.rtt_ms, line.link, line.is_tree))
        if lines:
            kept = evenly(lines, MAX_SERIES)
            found.append(Shape(", ".join(part for part in key if part), kept, len(lines) - len(kept)))
    return sorted(found, key=lambda each: (each.arm.startswith(CO_LOCATED), -len(each.lines)))


def drafted(cell: CellRow) -> int | None:
    """Returns how many tokens a round drafts: a chain's length, or a tree's nodes; None: a policy decides."""
    return cell.tree if isinstance(cell.tree, int) else cell.num_speculative_tokens


def _line(view: View, setting: Setting, cells: Sequence[CellRow]) -> Line:
    measured, predicted = {}, {}
    for cell in cells:
        n = drafted(cell)
        assert n is not None, "only cells with a draft length come here"
        measured[n] = _per_second(cell.metrics[TPOT])
        value = view.predicted(cell)
        if value:
            predicted[n] = 1e3 / value
    link = cells[0].link
    cloud = [c for c in view.cells_of(setting) if c.mode == CLOUD_ONLY and c.link == link]
    rate = 1e3 / cloud[0].metrics[TPOT].value if cloud else None
    is_tree, by_length = cells[0].tree != "off", dict(sorted(measured.items()))
    return Line(link_label(link), cells[0].rtt_ms, is_tree, by_length, predicted, rate)


def _per_second(tpot: Metric) -> Metric:
    low = 1e3 / tpot.high if tpot.high else None
    high = 1e3 / tpot.low if tpot.low else None
    return Metric(1e3 / tpot.value, "1/s", low, high, tpot.n)


def finding(shaped: Shape) -> str:
    """Names the best length, and the lengths that cannot be told from it."""
    if shaped.has_trees:
        return _finding_of_trees(shaped)
    by_length: dict[tuple[int, ...], list[Line]] = {}
    for line in shaped.lines:
        by_length.setdefault(tuple(line.as_good), []).append(line)
    if len(by_length) == 1:
        (lengths,) = by_length
        where = f"on {shaped.lines[0].link}" if len(shaped.lines) == 1 else "on every link"
        return sentence([f"drafting {_lengths(lengths)} tokens is fastest {where}"])
    if len(by_length) > MAX_GROUPS:
        told = [(line.as_good, [line]) for line in (shaped.lines[0], shaped.lines[-1])]
    else:
        told = [(list(lengths), lines) for lengths, lines in by_length.items()]
    parts = [f"{_lengths(lengths)} on {listed([line.link for line in lines])}" for lengths, lines in told]
    return sentence([f"the fastest draft length is {'; '.join(parts)}"])


def _finding_of_trees(shaped: Shape) -> str:
    """Names the best trees and chains, and what cannot be told from them."""
    by_best: dict[str, list[str]] = {}
    for lines in shaped.links:
        fastest = _best_line(lines)
        bar = _low(fastest.measured[fastest.best])
        told = [
            f"{'trees' if line.is_tree else 'chains'} of {_lengths(line.reaching(bar))} tokens"
            for line in sorted(lines, key=lambda line: -line.measured[line.best].value)
            if line.reaching(bar)
        ]
        by_best.setdefault(" or ".join(told), []).append(lines[0].link)
    if len(by_best) == 1 and len(shaped.links) > 1:
        return sentence([f"fastest on every link are {next(iter(by_best))}"])
    found = list(by_best.items())
    if len(found) > MAX_GROUPS:
        found = [found[0], found[-1]]
    return sentence([f"fastest are {'; '.join(f'{what} on {listed(links)}' for what, links in found)}"])


def _best_line(lines: Sequence[Line]) -> Line:
    """Returns the line that has the fastest length."""
    return max(lines, key=lambda line: line.measured[line.best].value)


def _lengths(lengths: Sequence[int]) -> str:
    if len(lengths) > 3:
        return f"{lengths[0]} to {lengths[-1]}"
    return listed([str(n) for n in lengths]).replace(" and ", " or ")


def _chart(view: View, setting: Setting, shaped: Shape) -> Chart:
    n = [metric.n for line in shaped.lines for metric in line.measured.values()]
    words = [
        f"Output tokens a second after the first (1000 / TPOT) of {shaped.arm}; 95 % bootstrap intervals "
        f"over {spread(n)} requests a point. A ring marks the best length of a link; where intervals "
        "overlap, the title names all lengths that may be the best.",
        HOLLOW if any(line.predicted for line in shaped.lines) else "",
        f"{counted(shaped.num_left_out, 'further link')} in the table of cells alone."
        if shaped.num_left_out
        else "",
    ]
    return Chart(
        finding=finding(shaped),
        caption=" ".join(word for word in words if word),
        table=_table(shaped),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=", ".join(part for part in (view.describe(setting), shaped.arm) if part),
    )


def _table(shaped: Shape) -> Table:
    rows = []
    for line in shaped.lines:
        for n, metric in line.measured.items():
            predicted = plain(line.predicted.get(n))
            cloud = plain(line.cloud_only) if line.cloud_only else ABSENT
            length = f"{n}, tree" if line.is_tree else str(n)
            rows.append((line.link, length, with_interval(metric), predicted, cloud, str(metric.n)))
    columns = (
        "link",
        "draft length",
        "tokens/s [95 %]",
        "predicted, tokens/s",
        "cloud-only, tokens/s",
        "n",
    )
    return Table(columns, tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the shape."""
    axes = figure.add_subplot()
    lengths: set[int] = set()
    ringed = [_best_line(lines) for lines in shaped.links]
    for index, line in enumerate(shaped.lines):
        style = series_style(index)
        ns = list(line.measured)
        lengths.update(ns)
        kind = "" if not shaped.has_trees else ", trees" if line.is_tree else ", chains"
        label = f"{line.link}, RTT {plain(line.rtt_ms)} ms{kind}"
        points(axes, ns, list(line.measured.values()), style, label)
        if line in ringed:
            axes.plot(line.best, line.measured[line.best].value, "o", markersize=13, markerfacecolor="none",
                      markeredgecolor=colour("ink"), markeredgewidth=1.2)  # fmt: skip
        if line.predicted:
            predicted_points(axes, sorted(line.predicted.items()), style)
    spread_axis(axes, "x", sorted(lengths), size)
    number_axis(axes, "y")
    axes.set_xlabel("drafted tokens a round" if shaped.has_trees else "draft length, tokens")
    axes.set_ylabel("tokens per second")
    legend_below(figure, axes, size)


def _low(metric: Metric) -> float:
    return metric.low if metric.low is not None else metric.value


def _high(metric: Metric) -> float:
    return metric.high if metric.high is not None else metric.value


FIGURE = ReportFigure(
    title="Tokens per second against draft length",
    needs="a sweep over draft_lengths, or trees, of at least two values on one link",
    charts=charts,
    reading="Higher is better. Longer drafts pay where a round trip is dear and acceptance is high. A tree holds "
    "several continuations: of as many tokens it is accepted further than a chain.",
)
