"""From rows to sweep.json and summary.csv: what every cell comes to. Reads nothing but its arguments."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig, link_record
from outrider.experiments.sweep.results.comparing import a_a_of, compare_all
from outrider.experiments.sweep.results.metrics import Observed, acceptance_by_position, compute_metrics
from outrider.experiments.sweep.results.predicting import predict_all
from outrider.experiments.sweep.results.records import (
    BASELINES,
    NO_LINK,
    SUMMARY,
    SWEEP,
    CellRow,
    Metric,
    RequestRow,
    RoundRow,
    Sweep,
    TextCheck,
    VisitRow,
    write_json,
)
from outrider.experiments.sweep.results.texts import JudgeTie, check_texts, collect_references, num_failures

Losses = dict[str, Metric]  # target_nats_per_token by cell, where texts were scored


@dataclasses.dataclass(slots=True)
class ByCell:
    """Holds rows of a folder by cell; `requests` those that ended without an error."""

    requests: dict[str, list[RequestRow]]
    failed: dict[str, list[RequestRow]]
    rounds: dict[str, list[RoundRow]]
    visits: dict[str, list[VisitRow]]


def by_cell(requests: Sequence[RequestRow], rounds: Sequence[RoundRow], visits: Sequence[VisitRow]) -> ByCell:
    """Sorts rows by cell."""
    found = ByCell(defaultdict(list), defaultdict(list), defaultdict(list), defaultdict(list))
    for request in requests:
        (found.failed if request.error else found.requests)[request.cell].append(request)
    for round_row in rounds:
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
        num_different_texts=num_failures([row.texts for row in made], num_tokens),
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
    *("id", "link", "rtt_ms", "realisation", "mode", "depth_policy", "num_speculative_tokens", "method"),
    *("tls", "temperature", "num_sessions", "min_forward_ms", "min_draft_ms", "variant", "baseline", "twin"),
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
        method=cell.method,
        tls=cell.tls,
        temperature=cell.temperature,
        num_sessions=cell.num_sessions,
        min_forward_ms=cell.min_forward_ms,
        min_draft_ms=cell.min_draft_ms,
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
