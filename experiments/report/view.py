"""A results folder as the report looks at it: settings, arms, who is compared with whom. Pure.

Cells that repeat another for the A/A measure are left out: they only show how far apart two equal things are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from outrider.common.types import Origin
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.experiments.report.naming import EDGE_ONLY, TPOT, Arm, Setting, arm_label, setting_label
from outrider.experiments.report.style import NUM_SERIES
from outrider.experiments.sweep.results.records import (
    NO_LINK,
    CellRow,
    Comparison,
    Prediction,
    RequestRow,
    Results,
    RoundRow,
    Sweep,
    rounds_of_ended,
)

RowT = TypeVar("RowT", RequestRow, RoundRow)


class View:
    """Looks things up in one folder. Everything is in the order of sweep.json."""

    def __init__(self, results: Results, sweep: Sweep) -> None:
        self.results = results
        self.sweep = sweep
        self.cells = [cell for cell in sweep.cells if not cell.twin and TPOT in cell.metrics]

    @cached_property
    def settings(self) -> list[Setting]:
        """Returns the settings of speculation over a link, and of whatever fits none of these.

        Measured before synthetic; those with more cells first.
        """
        linked = [cell for cell in self.cells if cell.realisation != NO_LINK]
        found: dict[Setting, None] = {}
        for cell in sorted(linked, key=lambda cell: not Arm.of(cell).is_speculation):
            if not any(setting.fits(cell) for setting in found):
                found[Setting.of(cell)] = None
        sizes = {setting: sum(map(setting.fits, linked)) for setting in found}
        return sorted(found, key=lambda setting: (setting.is_synthetic, -sizes[setting], setting))

    def cells_of(self, setting: Setting) -> list[CellRow]:
        """Returns the setting's cells over a link."""
        return [cell for cell in self.cells if cell.realisation != NO_LINK and setting.fits(cell)]

    def edge_only_of(self, setting: Setting) -> CellRow | None:
        """Returns the setting's cell of the draft alone."""
        return next((c for c in self.cells if c.mode == EDGE_ONLY and setting.fits(c)), None)

    def describe(self, setting: Setting) -> str:
        """Returns what distinguishes this setting from the others of the folder; empty where there is one alone."""
        return setting_label(setting, self.settings)

    @cached_property
    def arms(self) -> list[Arm]:
        """Returns each mode's arm of most cells in the order of `ExecutionMode`, then the others: a mode keeps its
        colour."""
        counts = Counter(Arm.of(cell) for cell in self.cells)
        found = list(counts)
        order = [str(mode) for mode in REQUESTABLE_MODES]
        leading = {arm.mode: arm for arm, _ in reversed(counts.most_common())}
        leaders = sorted(
            leading.values(), key=lambda a: order.index(a.mode) if a.mode in order else len(order)
        )
        return leaders + [arm for arm in found if arm not in leaders]

    def styles(self, arms: Sequence[Arm]) -> dict[Arm, int]:
        """Returns places in the palette, no two alike in one drawing as far as it goes; an arm keeps its
        own."""
        own = {arm: self.arms.index(arm) for arm in arms}
        kept = {arm: place for arm, place in own.items() if place < NUM_SERIES}
        free = iter([place for place in range(NUM_SERIES) if place not in kept.values()])
        return {arm: kept[arm] if arm in kept else next(free, own[arm]) for arm in arms}

    def label(self, arm: Arm) -> str:
        """Returns the mode, and what distinguishes it from the other arms of its mode."""
        return arm_label(arm, self.arms)

    @cached_property
    def _comparisons(self) -> dict[tuple[str, str, str], Comparison]:
        return {(each.cell, each.kind, each.metric): each for each in self.sweep.comparisons}

    def comparison(self, cell: CellRow, kind: str, metric: str = TPOT) -> Comparison | None:
        """Returns the cell's comparison of TPOT with a kind of baseline."""
        return self._comparisons.get((cell.id, kind, metric))

    @cached_property
    def _predictions(self) -> dict[tuple[str, str], list[Prediction]]:
        found: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
        for each in self.sweep.predictions:
            found[each.cell, each.metric].append(each)
        return found

    def predicted(self, cell: CellRow, metric: str = TPOT) -> float | None:
        """Returns the TPOT that the cost model predicted; what something else predicted where that did
        not."""
        found = self._predictions.get((cell.id, metric), [])
        return min(found, key=lambda each: each.source != "costmodel").value if found else None

    @cached_property
    def _requests(self) -> dict[str, list[RequestRow]]:
        return _by_cell(row for row in self.results.requests if not row.error)

    @cached_property
    def _rounds(self) -> dict[str, list[RoundRow]]:
        return _by_cell(rounds_of_ended(self.results.requests, self.results.rounds))

    def requests_of(self, cell: CellRow) -> list[RequestRow]:
        """Returns the cell's requests that ended as they should."""
        return self._requests.get(cell.id, [])

    def is_exact(self, cell: CellRow) -> bool:
        """Returns whether the text is the target's own, in distribution at least: judged by an exact
        method, and no token kept that the target never confirmed."""
        kept = cell.metrics.get("unverified_share")
        return Arm.of(cell).is_exact and (kept is None or kept.value == 0)

    def is_speculating(self, cell: CellRow) -> bool:
        """Returns whether the cell speculates over the link, and did: a mode that chooses may have
        streamed instead."""
        if not Arm.of(cell).is_speculation:
            return False
        origins = [origin for row in self.requests_of(cell) for origin in row.token_origins]
        return 2 * origins.count(Origin.TARGET) <= len(origins)

    def rounds_of(self, cell: CellRow) -> list[RoundRow]:
        """Returns the rounds of the cell's requests that ended as they should."""
        return self._rounds.get(cell.id, [])


def _by_cell(rows: Iterable[RowT]) -> dict[str, list[RowT]]:
    found: dict[str, list[RowT]] = defaultdict(list)
    for row in rows:
        found[row.cell].append(row)
    return found
