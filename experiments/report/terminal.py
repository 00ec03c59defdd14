"""What a sweep found, for a terminal: the report's own first lines, then every cell. What speaks against
speculation over this link comes first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from outrider.experiments.report.cautions import cautions
from outrider.experiments.report.headline import LOSS, headlines
from outrider.experiments.report.numbers import counted
from outrider.experiments.report.view import View
from outrider.experiments.sweep.config.schema import SIMULATED
from outrider.experiments.sweep.results.records import BASELINES, Comparison, Metric, Sweep, read_results

_SAID = {LOSS: "LOSES"}  # of speculation over the link; the other kinds as they are called


def print_results(folder: Path, out: TextIO = sys.stdout) -> None:
    """Prints the results of a folder with a sweep.json, of an interrupted run too."""
    results = read_results(folder)
    assert results.sweep is not None, "nobody prints a run that has not ended"
    print("\n".join(lines_of(View(results, results.sweep))), file=out)


def lines_of(view: View) -> Iterator[str]:
    """Returns the lines that `print_results` prints."""
    yield from _wrong_texts(view.sweep)
    yield _title(view)
    for each in headlines(view):
        if each.setting:
            yield f"{each.setting}:"
        yield from (f"{_SAID.get(said.kind, said.kind):<6}{said.text}" for said in each.statements)
    yield ""
    yield from _table(view.sweep)
    yield ""
    yield from cautions(view)


def _wrong_texts(sweep: Sweep) -> Iterator[str]:
    if not sweep.num_different_texts:
        return
    yield f"TEXTS DIFFER: {sweep.num_different_texts} texts are not cloud-only's that must be:"
    for cell in sweep.cells:
        bad = cell.texts.num_different + cell.texts.num_unjudged
        if cell.texts.is_exact_text and bad:
            note = f", {cell.texts.num_unjudged} not judged" if cell.texts.num_unjudged else ""
            examples = f": {', '.join(cell.texts.examples)}" if cell.texts.examples else ""
            yield f"  {cell.id}: {bad} of {cell.texts.num_compared}{note}{examples}"
    yield ""


def _title(view: View) -> str:
    words = [counted(len(view.sweep.cells), "cell"), counted(len(view.results.requests), "request")]
    words += ["SYNTHETIC MODELS"] if any(cell.is_synthetic for cell in view.sweep.cells) else []
    words += ["SIMULATED"] if any(cell.realisation == SIMULATED for cell in view.sweep.cells) else []
    words += [] if view.sweep.is_complete else ["interrupted: --resume goes on"]
    return f"{view.results.manifest.name}: {', '.join(words)}"


def _table(sweep: Sweep) -> Iterator[str]:
    by_cell: dict[str, dict[str, Comparison]] = {cell.id: {} for cell in sweep.cells}
    for each in sweep.comparisons:
        if each.metric == "tpot_ms":
            by_cell[each.cell][each.kind] = each
    width = max((len(cell.id) for cell in sweep.cells if cell.num_requests), default=4)
    yield f"{'':<{width}}  {'TPOT ms':>20} {'TTFT ms':>8} {'accept':>7} {'tok/rd':>6}   speed : " + ", ".join(
        BASELINES
    )
    cells = [cell for cell in sweep.cells if cell.num_requests]
    for cell in sorted(cells, key=lambda cell: _worst(by_cell[cell.id])):
        ratios = [_ratio(by_cell[cell.id].get(kind)) for kind in BASELINES]
        tpot, ttft = cell.metrics.get("tpot_ms"), cell.metrics.get("ttft_ms")
        rate, per_round = cell.metrics.get("acceptance_rate"), cell.metrics.get("tokens_per_round")
        mark = f"  [{cell.baseline}]" if cell.baseline else "  [A/A]" if cell.twin else ""
        yield (
            f"{cell.id:<{width}}  {_value(tpot):>20} {_plain(ttft):>8} {_plain(rate, 2):>7} "
            f"{_plain(per_round, 2):>6}   {' '.join(ratios)}{mark}"
        )


def _worst(comparisons: dict[str, Comparison]) -> float:
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
