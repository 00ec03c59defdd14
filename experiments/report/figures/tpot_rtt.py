"""TPOT against RTT: every way to decode on every link, the break-even, what the cost model predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.experiments.report.drawing import (
    HOLLOW,
    legend_below,
    number_axis,
    points,
    predicted_points,
    spread_axis,
    upright_line,
)
from outrider.experiments.report.figures.base import MAX_CHARTS, MAX_SERIES, Chart, ReportFigure, Table
from outrider.experiments.report.findings import crossing, sentence, standings
from outrider.experiments.report.naming import CLOUD_ONLY, TPOT, Arm, Setting, link_label
from outrider.experiments.report.numbers import ABSENT, counted, plain, spread, with_interval
from outrider.experiments.report.style import Size, colour, series_style
from outrider.experiments.report.verdicts import RIVALS, Verdict, fastest, verdicts
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, Metric


@dataclass(frozen=True, slots=True)
class Series:
    """Holds one arm's TPOT by RTT."""

    label: str
    style: int
    joined: list[tuple[float, Metric]]  # links that differ in nothing but RTT
    loose: list[tuple[float, Metric]]
    predicted: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds what one chart draws."""

    series: list[Series]
    edge_only: Metric | None
    verdicts: list[Verdict]  # of the links that differ in nothing but RTT
    break_even: float | None  # measured: best speculation against cloud-only
    predicted_break_even: float | None
    rtts: list[float] = field(default_factory=list)


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    found = [(setting, shape(view, setting)) for setting in view.settings]
    drawable = [(setting, each) for setting, each in found if each is not None]
    return [_chart(view, setting, each) for setting, each in drawable[:MAX_CHARTS]]


def shape(view: View, setting: Setting) -> Shape | None:
    """Returns what is drawn of a setting; None where it has links of one RTT alone."""
    cells = view.cells_of(setting)
    rtts = sorted({cell.rtt_ms for cell in cells})
    if len(rtts) < 2:
        return None
    family = largest_family(cells)
    joined = [verdict for verdict in verdicts(view, setting) if family_key(verdict.link) == family]
    best = {v.rtt_ms: v.best.metrics[TPOT].value for v in joined if v.best}
    cloud = {v.rtt_ms: v.rivals[CLOUD_ONLY].metrics[TPOT].value for v in joined if CLOUD_ONLY in v.rivals}
    edge_only = view.edge_only_of(setting)
    styles = view.styles(chosen_arms(view, cells))
    return Shape(
        series=[_series(view, arm, style, cells, family) for arm, style in styles.items()],
        edge_only=edge_only.metrics[TPOT] if edge_only else None,
        verdicts=joined,
        break_even=crossing(best, cloud),
        predicted_break_even=_predicted_break_even(view, cells, family),
        rtts=rtts,
    )


def family_key(link: dict[str, object]) -> str:
    """Returns a key that links share which differ in RTT alone."""
    others = {name: value for name, value in link.items() if name not in ("name", "rtt_ms", "seed")}
    return repr(sorted(others.items()))


def largest_family(cells: Sequence[CellRow]) -> str:
    """Returns the key of the family with most round-trip times."""
    by_family: dict[str, set[float]] = {}
    for cell in cells:
        by_family.setdefault(family_key(cell.link), set()).add(cell.rtt_ms)
    return max(by_family, key=lambda key: len(by_family[key]))


def chosen_arms(view: View, cells: Sequence[CellRow], most: int = MAX_SERIES) -> list[Arm]:
    """Returns the arms to draw, in the report's order. Too many: the baselines and those fastest somewhere
    come first."""
    present = {Arm.of(cell) for cell in cells}
    arms = [arm for arm in view.arms if arm in present]
    if len(arms) <= most:
        return arms
    winners = set()
    for link in {link_label(cell.link) for cell in cells}:
        here = [c for c in cells if link_label(c.link) == link and view.is_speculating(c)]
        winners |= {Arm.of(cell) for cell in [fastest(here)] if cell}
    ranked = sorted(arms, key=lambda arm: (arm.is_speculation, arm not in winners, arms.index(arm)))
    return [arm for arm in arms if arm in ranked[:most]]


def _series(view: View, arm: Arm, style: int, cells: Sequence[CellRow], family: str) -> Series:
    mine = sorted((cell for cell in cells if Arm.of(cell) == arm), key=lambda cell: cell.rtt_ms)
    joined = [(cell.rtt_ms, cell.metrics[TPOT]) for cell in mine if family_key(cell.link) == family]
    loose = [(cell.rtt_ms, cell.metrics[TPOT]) for cell in mine if family_key(cell.link) != family]
    predicted = [(cell.rtt_ms, view.predicted(cell)) for cell in mine if family_key(cell.link) == family]
    known = [(rtt, value) for rtt, value in predicted if value is not None]
    return Series(view.label(arm), style, joined, loose, known)


def _predicted_break_even(view: View, cells: Sequence[CellRow], family: str) -> float | None:
    best: dict[float, float] = {}
    cloud: dict[float, float] = {}
    for cell in cells:
        value = view.predicted(cell)
        if value is None or family_key(cell.link) != family:
            continue
        if cell.mode == CLOUD_ONLY:
            cloud[cell.rtt_ms] = value
        elif view.is_speculating(cell) and view.is_exact(cell):
            best[cell.rtt_ms] = min(value, best.get(cell.rtt_ms, value))
    return crossing(best, cloud)


def finding(shaped: Shape) -> str:
    """Says where speculation loses, then where it wins."""
    outcomes = {
        kind: {v.rtt_ms: v.outcomes[kind] for v in shaped.verdicts if kind in v.outcomes} for kind in RIVALS
    }
    parts = standings(outcomes, "speculation", "RTT", "ms")
    if shaped.break_even is not None and parts:
        parts[-1] += f" (break-even with cloud-only near {plain(shaped.break_even)} ms)"
    return sentence(parts) or f"TPOT at {spread(shaped.rtts, 'ms')} RTT; nothing to compare with"


def _chart(view: View, setting: Setting, shaped: Shape) -> Chart:
    cells = view.cells_of(setting)
    num_left_out = len({Arm.of(cell) for cell in cells}) - len(shaped.series)
    n = [metric.n for series in shaped.series for _, metric in series.joined + series.loose]
    words = [
        f"Mean time per output token after the first; 95 % bootstrap intervals over {spread(n)} requests "
        "a point.",
        "Lines join links that differ in RTT alone; single points are links that differ in more."
        if any(series.loose for series in shaped.series)
        else "",
        HOLLOW if any(series.predicted for series in shaped.series) else "",
        "Edge-only writes the draft's text, not the target's." if shaped.edge_only else "",
        f"{counted(num_left_out, 'further arm')} in the table of cells alone." if num_left_out > 0 else "",
    ]
    return Chart(
        finding=finding(shaped),
        caption=" ".join(word for word in words if word),
        table=_table(view, setting),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=view.describe(setting),
    )


def _table(view: View, setting: Setting) -> Table:
    cells = sorted(view.cells_of(setting), key=lambda cell: (cell.rtt_ms, link_label(cell.link)))
    rows = []
    for cell in cells:
        metric, predicted = cell.metrics[TPOT], view.predicted(cell)
        error = ABSENT if not predicted else f"{100 * (predicted / metric.value - 1):+.0f} %"
        names = (plain(cell.rtt_ms), link_label(cell.link), view.label(Arm.of(cell)))
        rows.append((*names, with_interval(metric), plain(predicted), error, str(metric.n)))
    columns = ("RTT, ms", "link", "arm", "TPOT, ms [95 %]", "predicted, ms", "error", "n")
    return Table(columns, tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the shape."""
    axes = figure.add_subplot()
    for series in shaped.series:
        _draw_series(axes, series)
    if shaped.edge_only:
        label = "edge-only (unverified)"
        axes.axhline(shaped.edge_only.value, color=colour("muted"), linestyle=(0, (1, 3)), label=label)
    if shaped.break_even is not None:
        upright_line(axes, shaped.break_even, f"break-even, {plain(shaped.break_even)} ms", is_dotted=False)
    if shaped.predicted_break_even is not None:
        label = f"break-even predicted, {plain(shaped.predicted_break_even)} ms"
        upright_line(axes, shaped.predicted_break_even, label, is_dotted=True)
    spread_axis(axes, "x", shaped.rtts, size)
    number_axis(axes, "y")
    axes.set_xlabel("round-trip time, ms")
    axes.set_ylabel("TPOT, ms")
    legend_below(figure, axes, size)


def _draw_series(axes: Axes, series: Series) -> None:
    style = series_style(series.style)
    if series.joined:
        rtts, metrics = [rtt for rtt, _ in series.joined], [metric for _, metric in series.joined]
        points(axes, rtts, metrics, style, series.label)
    if series.loose:
        rtts, metrics = [rtt for rtt, _ in series.loose], [metric for _, metric in series.loose]
        points(axes, rtts, metrics, style, "" if series.joined else series.label, is_joined=False)
    if series.predicted:
        predicted_points(axes, series.predicted, style)


FIGURE = ReportFigure(
    title="Time per token against round-trip time",
    needs="a sweep over links of at least two round-trip times",
    charts=charts,
    reading="Lower is better. Left of the break-even line speculation is faster than streaming cloud-only.",
)
