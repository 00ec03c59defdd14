"""What a sweep found, for a terminal. What speaks against speculation over this link comes first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

from experiments.sweep.records import BASELINES, CellRow, Comparison, Metric, Sweep

_RIVALS = BASELINES
_MOST_LOSSES = 12


def print_sweep(sweep: Sweep, out: TextIO = sys.stdout) -> None:
    print("\n".join(lines_of(sweep)), file=out)


def lines_of(sweep: Sweep) -> Iterator[str]:
    yield from _warnings(sweep)
    yield from _verdict(sweep)
    yield ""
    yield from _table(sweep)
    yield from _noise(sweep)


def losses_of(sweep: Sweep) -> list[Comparison]:
    """Where cloud-only or co-located is faster than a cell of ours beyond the interval, worst first."""
    ours = {cell.id for cell in sweep.cells if is_ours(cell)}
    lost = [
        each
        for each in sweep.comparisons
        if each.cell in ours
        and each.kind in ("cloud-only", "co-located")
        and each.metric == "tpot_ms"
        and each.is_worse
    ]
    return sorted(lost, key=lambda each: each.ratio)


def is_ours(cell: CellRow) -> bool:
    """A cell that drafts at the edge for a verifier: what the baselines are compared with."""
    return cell.mode not in ("cloud-only", "co-located", "edge-only") and not cell.twin


def _warnings(sweep: Sweep) -> Iterator[str]:
    if sweep.num_different_texts:
        yield f"TEXTS DIFFER: {sweep.num_different_texts} texts are not cloud-only's that must be:"
        for cell in sweep.cells:
            bad = cell.texts.num_different + cell.texts.num_unjudged
            if cell.texts.is_exact_text and bad:
                note = f", {cell.texts.num_unjudged} not judged" if cell.texts.num_unjudged else ""
                examples = f": {', '.join(cell.texts.examples)}" if cell.texts.examples else ""
                yield f"  {cell.id}: {bad} of {cell.texts.num_compared}{note}{examples}"
        yield ""
    if not sweep.is_complete:
        yield "interrupted: this is what there is; --resume goes on"
    if sweep.missing_baselines:
        yield f"left out by the sweep's own wish: {', '.join(sweep.missing_baselines)}"
    if any(cell.is_synthetic for cell in sweep.cells):
        yield "synthetic models: acceptance and times were given, nothing was computed"
    for cell in sweep.cells:
        if cell.num_errors:
            yield f"{cell.id}: {cell.num_errors} requests failed"


def _verdict(sweep: Sweep) -> Iterator[str]:
    num_ours = sum(is_ours(cell) for cell in sweep.cells)
    lost = losses_of(sweep)
    if not num_ours:
        return
    if not lost:
        yield f"in none of {num_ours} cells is cloud-only or co-located faster beyond the interval"
        return
    num_lost = len({each.cell for each in lost})
    yield f"cloud-only or co-located is FASTER in {num_lost} of {num_ours} cells, worst first:"
    for each in lost[:_MOST_LOSSES]:
        yield f"  {each.cell}: {each.ratio:.2f} times the speed of {each.kind}{_range(each)}"
    if len(lost) > _MOST_LOSSES:
        yield f"  and {len(lost) - _MOST_LOSSES} more: the table below has them first"


def _table(sweep: Sweep) -> Iterator[str]:
    by_cell: dict[str, dict[str, Comparison]] = {cell.id: {} for cell in sweep.cells}
    for each in sweep.comparisons:
        if each.metric == "tpot_ms":
            by_cell[each.cell][each.kind] = each
    width = max((len(cell.id) for cell in sweep.cells if cell.num_requests), default=4)
    yield f"{'':<{width}}  {'TPOT ms':>20} {'TTFT ms':>8} {'accept':>7} {'tok/rd':>6}   speed : " + ", ".join(
        _RIVALS
    )
    cells = [cell for cell in sweep.cells if cell.num_requests]
    for cell in sorted(cells, key=lambda cell: _worst(by_cell[cell.id])):
        ratios = [_ratio(by_cell[cell.id].get(kind)) for kind in _RIVALS]
        tpot, ttft = cell.metrics.get("tpot_ms"), cell.metrics.get("ttft_ms")
        rate, per_round = cell.metrics.get("acceptance_rate"), cell.metrics.get("tokens_per_round")
        mark = f"  [{cell.baseline}]" if cell.baseline else "  [A/A]" if cell.twin else ""
        yield (
            f"{cell.id:<{width}}  {_value(tpot):>20} {_plain(ttft):>8} {_plain(rate, 2):>7} "
            f"{_plain(per_round, 2):>6}   {' '.join(ratios)}{mark}"
        )


def _noise(sweep: Sweep) -> Iterator[str]:
    for cell in sweep.cells:
        if found := cell.a_a.get("tpot_ms"):
            low, high = found["low"], found["high"]
            spread = f" ({low:.3f} to {high:.3f})" if low is not None else ""
            yield ""
            yield f"A/A: {cell.twin} against itself: {found['speedup']:.3f}{spread}; less is noise"


def _worst(comparisons: dict[str, Comparison]) -> float:
    """Cells that lose to cloud-only or co-located first; those that are not compared last."""
    ratios = [comparisons[kind].ratio for kind in ("cloud-only", "co-located") if kind in comparisons]
    return min(ratios, default=float("inf"))


def _ratio(comparison: Comparison | None) -> str:
    return "     –" if comparison is None else f"{comparison.ratio:>5.2f}x"


def _value(metric: Metric | None) -> str:
    if metric is None:
        return "–"
    low, high = metric.low, metric.high
    spread = f" ({low:.2f}-{high:.2f})" if low is not None and high is not None else ""
    return f"{metric.value:.2f}{spread}"


def _plain(metric: Metric | None, digits: int = 1) -> str:
    return "–" if metric is None else f"{metric.value:.{digits}f}"


def _range(comparison: Comparison) -> str:
    low, high = comparison.low, comparison.high
    return f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""


