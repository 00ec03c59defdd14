"""What the cost model says of each cell, from parts measured in the same sweep: beside the measurement it
shows where time goes that the model does not know.

Parts come from all links together (drafting and verifying do not depend on the link), the round trip is the
profile's nominal one and what messages cost without any (the least of what cells saw beyond nominal).
Texts of a sweep are short, so their ends count: the last round is cut to what is wanted, and asking for a
stream costs one round trip.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.costmodel import (
    LinkCosts,
    ModelCosts,
    cloud_only_s,
    colocated_models,
    edge_only_s,
    rounds_s,
)
from edge_client.options import Mode
from experiments.sweep.cells import Cell
from experiments.sweep.metrics import acceptance_by_position
from experiments.sweep.records import Prediction, RequestRow, RoundRow

_Setting = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    models: ModelCosts
    overhead_s: float  # of a round's messages, on a link of no delay
    acceptance: dict[int, list[float]]  # by draft length, then by position


def predict_all(
    cells: Sequence[Cell],
    requests: Mapping[str, Sequence[RequestRow]],
    rounds: Mapping[str, Sequence[RoundRow]],
) -> list[Prediction]:
    """TPOT of cells that draft a fixed length with `coupled`, and of the baselines; other cells have none."""
    found: dict[str, Prediction] = {}
    for lead in {_setting(cell): cell for cell in cells if _is_plain_speculation(cell)}.values():
        group = [cell for cell in cells if _is_of_setting(cell, lead)]
        parts = measure_parts(group, requests, rounds)
        if parts is None:
            continue
        for cell in group:
            lengths = [row.num_tokens for row in requests.get(cell.id, ())]
            prediction = _predict(cell, parts, round(statistics.fmean(lengths))) if lengths else None
            if prediction is not None:
                found.setdefault(cell.id, prediction)
    return list(found.values())


def measure_parts(
    cells: Sequence[Cell],
    requests: Mapping[str, Sequence[RequestRow]],
    rounds: Mapping[str, Sequence[RoundRow]],
) -> Parts | None:
    """None where no cell drafts a fixed length, or none streams cloud-only."""
    drafting = [cell for cell in cells if _is_plain_speculation(cell)]
    seen = [r for cell in drafting for r in rounds.get(cell.id, ()) if r.is_answered and r.num_draft_tokens]
    streamed = [row for cell in cells if cell.mode == Mode.CLOUD_ONLY for row in requests.get(cell.id, ())]
    calls = sum(row.verifier_calls for row in streamed)
    if not seen or not calls:
        return None
    fixed_ms, token_ms = _verify_line(seen)
    overheads = [
        statistics.median(r.net_ms for r in rounds[cell.id] if r.is_answered) - cell.link.rtt_ms
        for cell in drafting
        if any(r.is_answered for r in rounds.get(cell.id, ()))
    ]
    drafted_there = [r for c in cells if c.mode == Mode.CO_LOCATED for r in rounds.get(c.id, ())]
    return Parts(
        ModelCosts(
            draft_token_s=_draft_token_s(seen) or 0.0,
            target_token_s=sum(row.forward_s for row in streamed) / calls,
            verify_fixed_s=fixed_ms / 1e3,
            verify_token_s=token_ms / 1e3,
            colocated_draft_token_s=_draft_token_s(drafted_there),
        ),
        overhead_s=max(0.0, min(overheads)) / 1e3,
        acceptance=_acceptance(drafting, rounds),
    )


def _predict(cell: Cell, parts: Parts, num_tokens: int) -> Prediction | None:
    token_s = _token_s(cell, parts, max(1, num_tokens - 1))
    if token_s is None:
        return None
    models, link, alphas = parts.models, _link_costs(cell, parts), _alphas(cell, parts)
    inputs: dict[str, Any] = {
        **{name: _short(value) for name, value in dataclasses.asdict(models).items() if value is not None},
        "rtt_s": _short(link.rtt_s),
        "acceptance": [round(alpha, 4) for alpha in alphas],
    }
    return Prediction(cell.id, "tpot_ms", _short(token_s * 1e3), "ms", "costmodel", inputs)


def _token_s(cell: Cell, parts: Parts, num_tokens: int) -> float | None:
    """Seconds a token of the `num_tokens` after the first, which comes with the opening."""
    models, link, alphas = parts.models, _link_costs(cell, parts), _alphas(cell, parts)
    if _is_plain_speculation(cell):
        return rounds_s(alphas, _length(cell), num_tokens, models, link) / num_tokens
    match cell.mode:
        case Mode.CLOUD_ONLY:
            return cloud_only_s(models, link) + link.rtt_s / num_tokens
        case Mode.CO_LOCATED:
            there_s = rounds_s(alphas, _length(cell), num_tokens, colocated_models(models), LinkCosts(0.0))
            return (there_s + link.rtt_s) / num_tokens
        case Mode.EDGE_ONLY:
            return edge_only_s(models)
        case _:
            return None


def _acceptance(cells: Sequence[Cell], rounds: Mapping[str, Sequence[RoundRow]]) -> dict[int, list[float]]:
    """A later token of a long draft stands less often than that of a short one: each length has its own."""
    by_length: dict[int, list[RoundRow]] = {}
    for cell in cells:
        by_length.setdefault(_length(cell), []).extend(rounds.get(cell.id, ()))
    return {n: acceptance_by_position(found)[0] for n, found in by_length.items()}


def _alphas(cell: Cell, parts: Parts) -> list[float]:
    """Of the cell's length, else of the longest there is."""
    known = {n: alphas for n, alphas in parts.acceptance.items() if alphas}
    return known.get(_length(cell), known[max(known)])


def _setting(cell: Cell) -> _Setting:
    """What parts depend on: not the link, and not how long drafts are."""
    return cell.temperature, cell.num_sessions, cell.min_forward_ms, cell.min_draft_ms, cell.tls


def _is_of_setting(cell: Cell, lead: Cell) -> bool:
    """Equal in what concerns the cell's mode."""
    is_same_draft = cell.min_draft_ms == lead.min_draft_ms or cell.mode in (Mode.CLOUD_ONLY, Mode.CO_LOCATED)
    is_same_target = (cell.min_forward_ms, cell.tls) == (lead.min_forward_ms, lead.tls)
    is_same_work = (cell.temperature, cell.num_sessions) == (lead.temperature, lead.num_sessions)
    return is_same_work and is_same_draft and (is_same_target or cell.mode == Mode.EDGE_ONLY)


def _is_plain_speculation(cell: Cell) -> bool:
    is_plain = cell.depth_policy == "fixed" and cell.method == "coupled" and not cell.variant.name
    return cell.mode == Mode.SPECULATIVE and is_plain


def _length(cell: Cell) -> int:
    return cell.num_speculative_tokens or 0


def _link_costs(cell: Cell, parts: Parts) -> LinkCosts:
    def rate(mbit: float) -> float:
        return mbit * 1e6 / 8 if mbit else math.inf

    rtt_s = cell.link.rtt_ms / 1e3 + parts.overhead_s
    return LinkCosts(rtt_s, rate(cell.link.up_mbit), rate(cell.link.down_mbit))


def _draft_token_s(rounds: Sequence[RoundRow]) -> float | None:
    drafted = sum(r.num_draft_tokens for r in rounds)
    return sum(r.draft_ms for r in rounds) / drafted / 1e3 if drafted else None


def _verify_line(rounds: Sequence[RoundRow]) -> tuple[float, float]:
    """The verifier's time over drafted tokens, ms: a line through the medians of each length; through one
    length alone it is flat. A slope below zero is noise."""
    medians = dict(_medians(rounds))
    lengths = list(medians)
    if len(lengths) < 2:
        return medians[lengths[0]], 0.0
    slope, start = statistics.linear_regression(lengths, [medians[n] for n in lengths])
    if slope < 0:
        return statistics.median(r.verifier_ms for r in rounds), 0.0
    return max(0.0, start), slope


def _medians(rounds: Sequence[RoundRow]) -> Iterator[tuple[int, float]]:
    for n in sorted({r.num_draft_tokens for r in rounds}):
        yield n, statistics.median(r.verifier_ms for r in rounds if r.num_draft_tokens == n)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
