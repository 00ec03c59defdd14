"""From rows to sweep.json and summary.csv: what every cell comes to. Reads nothing but its arguments."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.experiments.sweep.config.cells import Cell, find_baselines
from outrider.experiments.sweep.config.schema import SweepConfig, link_record
from outrider.experiments.sweep.results.intervals import of_ratio
from outrider.experiments.sweep.results.metrics import Observed, acceptance_by_position, compute_metrics
from outrider.experiments.sweep.results.predicting import predict_all
from outrider.experiments.sweep.results.records import (
    BASELINES,
    NO_LINK,
    SUMMARY,
    SWEEP,
    CellRow,
    Comparison,
    Metric,
    RequestRow,
    RoundRow,
    Sweep,
    TextCheck,
    VisitRow,
    rounds_of_ended,
    write_json,
)
from outrider.experiments.sweep.results.texts import JudgeTie, check_texts, collect_references, num_failures

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


Losses = dict[str, Metric]  # target_nats_per_token by cell, where texts were scored


@dataclasses.dataclass(slots=True)
class ByCell:
    """Holds rows of a folder by cell; `requests` and `rounds` are of those that ended without an error."""

    requests: dict[str, list[RequestRow]]
    failed: dict[str, list[RequestRow]]
    rounds: dict[str, list[RoundRow]]
    visits: dict[str, list[VisitRow]]


def by_cell(requests: Sequence[RequestRow], rounds: Sequence[RoundRow], visits: Sequence[VisitRow]) -> ByCell:
    """Sorts rows by cell."""
    found = ByCell(defaultdict(list), defaultdict(list), defaultdict(list), defaultdict(list))
    for request in requests:
        (found.failed if request.error else found.requests)[request.cell].append(request)
    for round_row in rounds_of_ended(requests, rounds):
        found.rounds[round_row.cell].append(round_row)
    for visit in visits:
        found.visits[visit.cell].append(visit)
    return found


def summarise(
    config: SweepConfig,
    cells: Sequence[Cell],
    rows: ByCell,
    judge: JudgeTie,
    losses: Losses,
    is_complete: bool,
) -> Sweep:
    """Computes the figures of every cell, the comparisons and the predictions."""
    references = collect_references(cells, rows.requests)
    made = []
    for cell in cells:
        texts = check_texts(cell, rows.requests.get(cell.id, []), references, judge)
        made.append(_cell_row(config, cell, rows, texts, losses))
    num_tokens = sum(row.num_tokens for group in rows.requests.values() for row in group)
    return Sweep(
        cells=made,
        comparisons=compare_all(cells, rows.requests),
        predictions=predict_all(cells, rows.requests, rows.rounds),
        is_complete=is_complete,
        missing_baselines=[kind for kind in BASELINES if kind not in config.baselines],
        num_different_texts=num_failures([row.texts for row in made], num_tokens, is_complete),
    )


def write_summary(folder: Path, sweep: Sweep) -> None:
    """Writes sweep.json and summary.csv."""
    write_json(folder / SWEEP, sweep)
    with (folder / SUMMARY).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        names = list(dict.fromkeys(name for cell in sweep.cells for name in cell.metrics))
        writer.writerow([*_FACTS, *(f"{name}{end}" for name in names for end in ("", "_low", "_high"))])
        for cell in sweep.cells:
            facts = [_fact(cell, name) for name in _FACTS]
            writer.writerow([*facts, *(value for name in names for value in _triple(cell.metrics.get(name)))])


_FACTS = (
    *("id", "link", "rtt_ms", "realisation", "mode"),
    *("depth_policy", "num_speculative_tokens", "tree", "method"),
    *("tls", "temperature", "num_sessions", "min_forward_ms", "min_draft_ms"),
    *("constraint", "variant", "baseline", "twin"),
    *("is_synthetic", "num_requests", "num_errors", "num_different_texts", "share_equal", "labels"),
)


def _fact(cell: CellRow, name: str) -> object:
    match name:
        case "link":
            return cell.link["name"]
        case "num_different_texts":
            return cell.texts.num_different + cell.texts.num_unjudged if cell.texts.is_exact_text else ""
        case "share_equal":
            return cell.texts.share_equal
        case "labels":
            return "; ".join(cell.labels)
        case _:
            return getattr(cell, name)


def _triple(metric: Metric | None) -> tuple[object, object, object]:
    return ("", "", "") if metric is None else (metric.value, metric.low, metric.high)


def _cell_row(config: SweepConfig, cell: Cell, rows: ByCell, texts: TextCheck, losses: Losses) -> CellRow:
    requests, rounds = rows.requests.get(cell.id, []), rows.rounds.get(cell.id, [])
    seen = Observed(requests, rounds, rows.visits.get(cell.id, []))
    metrics = compute_metrics(seen, config.slo, config.price_per_hour)
    if cell.id in losses:
        metrics["target_nats_per_token"] = losses[cell.id]
    alphas, a_cum = acceptance_by_position(rounds)
    said = [label for row in requests[:1] for label in row.labels]
    return CellRow(
        id=cell.id,
        link=link_record(cell.link),
        realisation=config.realisation if cell.has_link else NO_LINK,
        mode=cell.mode,
        depth_policy=cell.depth_policy,
        num_speculative_tokens=cell.num_speculative_tokens,
        tree=cell.tree,
        method=cell.method,
        tls=cell.tls,
        temperature=cell.temperature,
        num_sessions=cell.num_sessions,
        min_forward_ms=cell.min_forward_ms,
        min_draft_ms=cell.min_draft_ms,
        constraint=cell.constraint.name,
        variant=cell.variant.name,
        baseline=cell.baseline,
        twin=cell.twin,
        is_synthetic=config.is_synthetic,
        labels=list(dict.fromkeys([*cell.labels(config), *said])),
        num_requests=len(requests),
        num_errors=len(rows.failed.get(cell.id, [])),
        metrics=metrics,
        acceptance_per_position=alphas,
        a_cum=a_cum,
        texts=texts,
        a_a=a_a_of(cell, rows.requests) if cell.twin else {},
    )
