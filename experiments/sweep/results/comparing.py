"""Cells against their baselines, and one against itself: ratios over the same prompts and repeats. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.experiments.sweep.config.cells import Cell, find_baselines
from outrider.experiments.sweep.results.intervals import of_ratio
from outrider.experiments.sweep.results.records import BASELINES, Comparison, RequestRow

TIMES = ("tpot_ms", "ttft_ms", "total_ms")  # smaller is better: baseline / cell

Rows = Mapping[str, Sequence[RequestRow]]  # by cell, those that ended without an error


def compare_all(cells: Sequence[Cell], rows: Rows) -> list[Comparison]:
    """Compares every cell with the best baseline of each kind in its setting, but a baseline not with its
    own kind."""
    found = []
    for cell in cells:
        for kind in BASELINES:
            best = None if cell.baseline == kind else best_of(find_baselines(cell, kind, list(cells)), rows)
            if best is not None and best.id != cell.id:
                found += [c for metric in TIMES if (c := compare(cell.id, best.id, kind, metric, rows))]
    return found


def best_of(cells: Sequence[Cell], rows: Rows) -> Cell | None:
    """Returns the cell of lowest mean time per token: a baseline may choose its draft length, as ours may."""
    ranked = [(mean, cell) for cell in cells if (mean := _mean_of(rows.get(cell.id, ()), "tpot_ms"))]
    return min(ranked, key=lambda entry: entry[0])[1] if ranked else None


def _mean_of(rows: Sequence[RequestRow], metric: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, metric)) is not None]
    return math.fsum(values) / len(values) if values else None


def compare(cell: str, baseline: str, kind: str, metric: str, rows: Rows) -> Comparison | None:
    """Returns how many times faster `cell` is; None without a request that both have."""
    theirs = {_key(row): getattr(row, metric) for row in rows.get(baseline, ())}
    pairs = [
        (theirs[_key(row)], getattr(row, metric))
        for row in rows.get(cell, ())
        if theirs.get(_key(row)) is not None and getattr(row, metric) is not None
    ]
    result = of_ratio([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None
    if result is None:
        return None
    ratio, interval = result
    low, high = interval or (None, None)
    return Comparison(cell, baseline, kind, metric, _short(ratio), _short(low), _short(high), len(pairs))  # type: ignore[arg-type]


def a_a_of(cell: Cell, rows: Rows) -> dict[str, Any]:
    """Compares the twin with its original: what noise alone makes of a ratio."""
    found: dict[str, Any] = {"twin": cell.twin}
    for metric in TIMES:
        if result := compare(cell.id, cell.twin, "", metric, rows):
            found[metric] = {"speedup": result.ratio, "low": result.low, "high": result.high}
    return found


def _key(row: RequestRow) -> tuple[int, int, str]:
    return row.repeat, row.session, row.prompt


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
