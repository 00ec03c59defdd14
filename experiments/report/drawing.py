"""Draws what several figures share: axes with readable ticks, legends under the plot, points with intervals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from outrider.experiments.report.numbers import plain
from outrider.experiments.report.style import SeriesStyle, Size, colour
from outrider.experiments.sweep.results.records import Metric

HOLLOW = "Hollow marks are what the cost model predicts."
LEGEND_LINES = 3  # that a drawing's usual height has room for
LOG_FROM = 12.0  # an axis whose ends lie further apart than this many times is logarithmic


def spread_axis(axes: Axes, which: str, values: Sequence[float], size: Size) -> None:
    """Sets ticks at the values themselves, as many as fit; logarithmic where they are far apart, 0
    allowed."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    wanted = sorted(set(values))
    above = [value for value in wanted if value > 0]
    if above and above[-1] / above[0] > LOG_FROM:
        set_scale = axes.set_xscale if which == "x" else axes.set_yscale
        if wanted[0] <= 0:
            set_scale("symlog", linthresh=above[0], linscale=0.5)
        else:
            set_scale("log")
    axis.set_minor_locator(NullLocator())
    to_display = axis.get_transform().transform
    places = [float(to_display(value)) for value in wanted]
    length = (places[-1] - places[0]) or 1.0
    gap = length * (0.13 if size.is_narrow else 0.06)
    kept: list[int] = []
    for index, place in enumerate(places):
        is_last = index == len(places) - 1
        if kept and is_last and place - places[kept[-1]] < gap and len(kept) > 1:
            kept.pop()
        if not kept or is_last or place - places[kept[-1]] >= gap:
            kept.append(index)
    axis.set_ticks([wanted[index] for index in kept], labels=[plain(wanted[index]) for index in kept])


def number_axis(axes: Axes, which: str) -> None:
    """Sets plain numbers for ticks; linear from zero, unless the values are far apart."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if low > 0 and high / low > LOG_FROM:
        log_axis(axes, which)
        return
    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    (axes.set_xlim if which == "x" else axes.set_ylim)(0, high * 1.06 or 1)


def log_axis(axes: Axes, which: str) -> None:
    """Sets plain numbers at 1, 2 and 5, or at powers of ten over many decades."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * max(low, 1e-9) else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def legend_below(figure: Figure, axes: Axes, size: Size, columns: int = 0) -> None:
    """Draws the legend under the plot, where it hides nothing; long names are broken, not cut."""
    pairs = list(zip(*axes.get_legend_handles_labels(), strict=True))
    if not pairs:
        return
    pairs.sort(key=lambda pair: not hasattr(pair[0], "has_yerr"))  # series with bars before plain lines
    handles, labels = [handle for handle, _ in pairs], [label for _, label in pairs]
    longest = max(map(len, labels))
    if not columns:
        room = 40 if size.is_narrow else 92
        columns = max(1, min(len(labels), room // (longest + 7)))
    width = 34 if size.is_narrow else 80
    wrapped = [textwrap.fill(label, width) for label in labels]
    num_lines = math.ceil(sum(label.count("\n") + 1 for label in wrapped) / columns)
    extra_px = max(0, num_lines - LEGEND_LINES) * size.font_px * 1.4
    figure.set_figheight(figure.get_figheight() + extra_px / 72)  # a long legend takes nothing from the plot
    figure.legend(handles, wrapped, loc="outside lower center", ncols=columns, columnspacing=1.4)


def points(
    axes: Axes,
    places: Sequence[float],
    metrics: Sequence[Metric],
    style: SeriesStyle,
    label: str,
    is_joined: bool = True,
) -> None:
    """Draws a series with its 95 % intervals as bars."""
    arguments = style.line_arguments() | ({} if is_joined else {"linestyle": "none"})
    values = [metric.value for metric in metrics]
    below = [max(0.0, m.value - m.low) if m.low is not None else 0.0 for m in metrics]
    above = [max(0.0, m.high - m.value) if m.high is not None else 0.0 for m in metrics]
    axes.errorbar(places, values, yerr=[below, above], capsize=3, elinewidth=1.2, label=label, **arguments)


def predicted_points(axes: Axes, pairs: Sequence[tuple[float, float]], style: SeriesStyle) -> None:
    """Draws larger hollow marks over a series' own, joined by a thin dotted line; the caption explains
    them."""
    hollow = {"markerfacecolor": "none", "linestyle": (0, (1, 2)), "linewidth": 1.0, "markersize": 8.5}
    axes.plot([x for x, _ in pairs], [y for _, y in pairs], **(style.line_arguments() | hollow))


def upright_line(axes: Axes, place: float, label: str, is_dotted: bool) -> None:
    """Draws a marked place on the x axis, named in the legend."""
    name = "muted" if is_dotted else "ink"
    axes.axvline(place, color=colour(name), linestyle=":" if is_dotted else "-", linewidth=1.3, label=label)
