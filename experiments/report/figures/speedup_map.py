"""Speed-up over co-located speculation on RTT × acceptance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from outrider.experiments.report.figures.base import MAX_CHARTS, Chart, ReportFigure, Table
from outrider.experiments.report.figures.tpot_rtt import family_key, largest_family
from outrider.experiments.report.findings import sentence
from outrider.experiments.report.naming import CO_LOCATED, Arm, Setting, link_label, setting_label
from outrider.experiments.report.numbers import interval, plain, ratio_spread, spread, times
from outrider.experiments.report.style import Size
from outrider.experiments.report.verdicts import Relation, aa_factor, outcome
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import CellRow, Comparison

MAX_ROWS = 10
SAME_ACCEPTANCE = 0.03


@dataclass(frozen=True, slots=True)
class _Tile:
    comparison: Comparison
    outcome: Relation
    link: str
    arm: str
    acceptance: float


@dataclass(frozen=True, slots=True)
class _Row:
    acceptance: float
    tiles: dict[float, _Tile]  # by RTT: the best arm of the row


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds what one chart draws."""

    rtts: list[float]
    rows: list[_Row]  # by falling acceptance

    @property
    def tiles(self) -> list[_Tile]:
        """Returns the tiles of all rows."""
        return [tile for row in self.rows for tile in row.tiles.values()]


def charts(view: View) -> list[Chart]:
    """Returns the charts of a folder."""
    # Temperature changes acceptance and little else, so one map spans every temperature.
    groups: dict[Setting, list[Setting]] = {}
    for setting in view.settings:
        groups.setdefault(replace(setting, temperature=0.0), []).append(setting)
    found = []
    for group in groups.values():
        shaped = shape(view, group)
        if shaped:
            found.append(_chart(_group_label(group, list(groups)), shaped))
    return found[:MAX_CHARTS]


def _group_label(group: Sequence[Setting], groups: Sequence[Setting]) -> str:
    return setting_label(replace(group[0], temperature=0.0), groups)


def shape(view: View, settings: Sequence[Setting]) -> Shape | None:
    """Returns the map; None without a comparison with co-located at two round-trip times or two
    acceptances."""
    rows: dict[tuple[Setting, Arm], list[tuple[CellRow, _Tile]]] = {}
    factor = aa_factor(view)
    for setting in settings:
        cells = view.cells_of(setting)
        family = largest_family(cells)
        for cell in cells:
            if family_key(cell.link) != family:
                continue
            tile = _tile(view, cell, factor)
            if tile:
                rows.setdefault((setting, Arm.of(cell)), []).append((cell, tile))
    made = [_row([tile for _, tile in pairs], [cell.rtt_ms for cell, _ in pairs]) for pairs in rows.values()]
    merged = _merge(made)
    rtts = sorted({rtt for row in merged for rtt in row.tiles})
    return Shape(rtts, merged) if len(rtts) > 1 or len(merged) > 1 else None


def _tile(view: View, cell: CellRow, factor: float) -> _Tile | None:
    arm = Arm.of(cell)
    comparison = view.comparison(cell, CO_LOCATED)
    acceptance = _acceptance_of(view, cell)
    if not view.is_speculating(cell) or comparison is None or acceptance is None:
        return None
    return _Tile(comparison, outcome(comparison, factor), link_label(cell.link), view.label(arm), acceptance)


def _acceptance_of(view: View, cell: CellRow) -> float | None:
    """Returns the share of the judged draft tokens that were accepted.

    Those after a rejection are not judged, so that the share does not fall with the draft's length.
    """
    rounds = [row for row in view.rounds_of(cell) if row.is_answered]
    judged = sum(min(row.num_accepted_tokens + 1, row.num_draft_tokens) for row in rounds)
    return sum(row.num_accepted_tokens for row in rounds) / judged if judged else None


def _row(tiles: Sequence[_Tile], rtts: Sequence[float]) -> _Row:
    by_rtt: dict[float, _Tile] = {}
    for rtt, tile in zip(rtts, tiles, strict=True):
        if rtt not in by_rtt or tile.comparison.ratio > by_rtt[rtt].comparison.ratio:
            by_rtt[rtt] = tile
    return _Row(statistics.fmean(tile.acceptance for tile in tiles), by_rtt)


def _merge(rows: Sequence[_Row]) -> list[_Row]:
    """Merges rows of nearly one acceptance, the best tiles kept, until few enough are left."""
    step = SAME_ACCEPTANCE
    while len(groups := _groups(rows, step)) > MAX_ROWS:
        step *= 1.5
    merged = []
    for group in groups:
        pairs = [(rtt, tile) for row in group for rtt, tile in row.tiles.items()]
        merged.append(_row([tile for _, tile in pairs], [rtt for rtt, _ in pairs]))
    return sorted(merged, key=lambda row: -row.acceptance)


def _groups(rows: Sequence[_Row], step: float) -> list[list[_Row]]:
    groups: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: row.acceptance):
        if groups and row.acceptance - groups[-1][0].acceptance <= step:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def finding(shaped: Shape) -> str:
    """Says where co-located is faster, then where speculation over the link is."""
    tiles = shaped.tiles
    lost = [tile for tile in tiles if tile.outcome is Relation.WORSE]
    won = [tile for tile in tiles if tile.outcome is Relation.BETTER]
    if not won and not lost:
        return f"Speculation over the link and co-located cannot be told apart in any of {len(tiles)} places"
    parts = []
    if lost:
        ratios = ratio_spread([1 / tile.comparison.ratio for tile in lost])
        parts.append(f"co-located is faster in {len(lost)} of {len(tiles)} places, {ratios} times")
    if won:
        ratios = ratio_spread([tile.comparison.ratio for tile in won])
        parts.append(f"speculation over the link is faster in {len(won)} of {len(tiles)}, {ratios} times")
    return sentence(parts)


def _chart(setting: str, shaped: Shape) -> Chart:
    n = [tile.comparison.n for tile in shaped.tiles]
    caption = (
        "Co-located TPOT / TPOT over the link, by pairs of requests with one prompt, repeat and session "
        f"({spread(n)} pairs a place); links that differ in RTT alone. A place has the best arm of its "
        "acceptance, the measured share of judged draft tokens that were accepted; = marks a difference that the "
        "95 % interval or the A/A spread does not bear out."
    )
    return Chart(
        finding=finding(shaped),
        caption=caption,
        table=_table(shaped),
        draw=lambda figure, size: draw(shaped, figure, size),
        setting=setting,
        height=min(1.0, 0.45 + 0.08 * len(shaped.rows)),
    )


def _table(shaped: Shape) -> Table:
    rows = []
    for row in shaped.rows:
        for rtt, tile in sorted(row.tiles.items()):
            c = tile.comparison
            ratio = f"{times(c.ratio)} {interval(c.low, c.high)}".strip()
            names = (plain(rtt), tile.link, plain(tile.acceptance), tile.arm)
            rows.append((*names, ratio, str(tile.outcome), str(c.n)))
    columns = (
        "RTT, ms",
        "link",
        "acceptance",
        "arm",
        "speed-up over co-located [95 %]",
        "outcome",
        "pairs",
    )
    return Table(columns, tuple(rows))


def draw(shaped: Shape, figure: Figure, size: Size) -> None:
    """Draws the map."""

    # Orange to blue through white, told apart with any colour vision; the number in each place says the same.
    shades = LinearSegmentedColormap.from_list("loss-win", ["#b35806", "#f7f7f7", "#2166ac"])
    axes = figure.add_subplot()
    largest = max([0.2, *(abs(math.log(tile.comparison.ratio)) for tile in shaped.tiles)])
    for y, row in enumerate(reversed(shaped.rows)):
        for rtt, tile in row.tiles.items():
            share = math.log(tile.comparison.ratio) / largest / 2 + 0.5
            x = shaped.rtts.index(rtt)
            axes.add_patch(
                Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=shades(share), edgecolor="none")
            )
            mark = "=" if tile.outcome is Relation.EVEN else ""
            ink = "#ffffff" if abs(share - 0.5) > 0.32 else "#111111"
            text = mark + times(tile.comparison.ratio)
            axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=_type_size(shaped, size))
    axes.set_xlim(-0.5, len(shaped.rtts) - 0.5)
    axes.set_ylim(-0.5, len(shaped.rows) - 0.5)
    axes.set_xticks(range(len(shaped.rtts)), [plain(rtt) for rtt in shaped.rtts])
    labels = [f"{row.acceptance:.2f}" for row in reversed(shaped.rows)]
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("round-trip time, ms")
    axes.set_ylabel("acceptance")


def _type_size(shaped: Shape, size: Size) -> float:
    room = (size.width - 60) / max(1, len(shaped.rtts))
    return max(7.5, min(size.font_px, room / 3.4))


FIGURE = ReportFigure(
    title="Speed-up over co-located speculation",
    needs="speculation and co-located at two round-trip times, or with drafts of two acceptances",
    charts=charts,
    reading="Blue, above 1: drafting at the edge pays. Orange, below 1: the draft belongs in the cloud.",
)
