"""What the cost model says of each cell, from parts measured in the same sweep: beside the measurement it
shows where time goes that is not in the model.

Parts come from all links together (drafting and verifying do not depend on the link), acceptance comes from
replaying the texts, of trees from their own rounds, the round trip is the profile's nominal one and what messages cost
without any (the least of what cells saw beyond nominal). The model is of one session alone, and so are these
predictions.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, round_s
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.samples import AcceptanceSequence, sequences_of
from outrider.experiments.shared.short_texts import alphas_of, models_of, text_token_s, tree_token_s
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.results.records import Prediction, RequestRow, RoundRow

_Setting = tuple[object, ...]
_MODES = (
    ExecutionMode.SPECULATIVE,
    ExecutionMode.CLOUD_ONLY,
    ExecutionMode.CO_LOCATED,
    ExecutionMode.EDGE_ONLY,
)


@dataclass(frozen=True, slots=True)
class TreeRounds:
    """Holds what rounds of whole trees of one size took and brought, over all links."""

    draft_s: float
    verify_s: float
    num_accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """Holds what a prediction is made of."""

    models: ModelCosts
    overhead_s: float  # of a round's messages, on a link of no delay
    texts: tuple[AcceptanceSequence, ...]
    trees: dict[int, TreeRounds]  # by nodes


def predict_all(
    cells: Sequence[Cell],
    requests: Mapping[str, Sequence[RequestRow]],
    rounds: Mapping[str, Sequence[RoundRow]],
) -> list[Prediction]:
    """Predicts the TPOT of cells that draft a fixed length, or trees of one size, with `coupled`, and of the
    baselines; other cells have no prediction."""
    found: dict[str, Prediction] = {}
    cells = [cell for cell in cells if cell.num_sessions == 1]
    for lead in {_setting(cell): cell for cell in cells if _is_plain_speculation(cell)}.values():
        group = [cell for cell in cells if _is_of_setting(cell, lead)]
        parts = _measure_parts(group, requests, rounds)
        if parts is None:
            continue
        for cell in group:
            lengths = [row.num_tokens for row in requests.get(cell.id, ())]
            prediction = _predict(cell, parts, round(statistics.fmean(lengths))) if lengths else None
            if prediction is not None:
                found.setdefault(cell.id, prediction)
    return list(found.values())


def _measure_parts(
    cells: Sequence[Cell],
    requests: Mapping[str, Sequence[RequestRow]],
    rounds: Mapping[str, Sequence[RoundRow]],
) -> Parts | None:
    """Returns None where no cell drafts a fixed length, or none streams cloud-only."""
    drafting = [cell for cell in cells if _is_plain_speculation(cell)]
    seen = [r for cell in drafting for r in rounds.get(cell.id, ()) if r.is_answered and r.num_draft_tokens]
    streamed = [
        row for cell in cells if cell.mode == ExecutionMode.CLOUD_ONLY for row in requests.get(cell.id, ())
    ]
    calls = sum(row.verifier_calls for row in streamed)
    texts = _texts(drafting, requests, rounds)
    if not seen or not calls or not texts:
        return None
    overheads = [
        statistics.median(r.net_ms for r in rounds[cell.id] if r.is_answered) - cell.link.rtt_ms
        for cell in drafting
        if any(r.is_answered for r in rounds.get(cell.id, ()))
    ]
    models = models_of(
        seen,
        stream_forward_s=sum(row.forward_s for row in streamed) / calls,
        colocated_rounds=[
            r for c in cells if c.mode == ExecutionMode.CO_LOCATED for r in rounds.get(c.id, ())
        ],
    )
    return Parts(models, max(0.0, min(overheads)) / 1e3, texts, _tree_rounds(cells, rounds))


def _tree_rounds(cells: Sequence[Cell], rounds: Mapping[str, Sequence[RoundRow]]) -> dict[int, TreeRounds]:
    by_size: dict[int, list[RoundRow]] = {}
    for cell in cells:
        if isinstance(cell.tree, int) and cell.mode == ExecutionMode.SPECULATIVE and _is_plain(cell):
            whole = [r for r in rounds.get(cell.id, ()) if r.is_answered and r.num_draft_tokens == cell.tree]
            by_size.setdefault(cell.tree, []).extend(whole)
    return {
        size: TreeRounds(
            statistics.fmean(r.draft_ms for r in whole) / 1e3,
            statistics.fmean(r.verifier_ms for r in whole) / 1e3,
            tuple(r.num_accepted_tokens for r in whole),
        )
        for size, whole in by_size.items()
        if whole
    }


def _texts(
    drafting: Sequence[Cell],
    requests: Mapping[str, Sequence[RequestRow]],
    rounds: Mapping[str, Sequence[RoundRow]],
) -> tuple[AcceptanceSequence, ...]:
    """Returns what was accepted where, text by text, each once: over another link the same text comes
    again."""
    known = {row.request for cell in drafting for row in requests.get(cell.id, ())}
    by_request: dict[str, list[RoundRow]] = {}
    for each in (r for cell in drafting for r in rounds.get(cell.id, ()) if r.request in known):
        by_request.setdefault(each.request, []).append(each)
    whole = [rows for rows in by_request.values() if all(r.is_answered for r in rows)]
    texts = {tuple((r.num_accepted_tokens, r.num_draft_tokens) for r in rows): None for rows in whole}
    return sequences_of([text for text in texts if any(drafted for _, drafted in text)])


def _predict(cell: Cell, parts: Parts, num_tokens: int) -> Prediction | None:
    if not _is_plain(cell) or cell.mode not in _MODES:
        return None
    n, models, link = cell.num_speculative_tokens or 0, parts.models, _link_costs(cell, parts)
    num_later = max(1, num_tokens - 1)
    if isinstance(cell.tree, int):
        if cell.mode != ExecutionMode.SPECULATIVE or cell.tree not in parts.trees:
            return None
        return _predict_tree(cell, cell.tree, parts, num_later)
    alphas = alphas_of(parts.texts, n or 1)
    token_s = text_token_s(ExecutionMode(cell.mode), n, alphas, num_later, models, link)
    inputs: dict[str, Any] = {
        **{name: _short(value) for name, value in dataclasses.asdict(models).items() if value is not None},
        "rtt_s": _short(link.rtt_s),
        "acceptance": [round(alpha, 4) for alpha in alphas],
    }
    return Prediction(cell.id, "tpot_ms", _short(token_s * 1e3), "ms", "costmodel", inputs)


def _predict_tree(cell: Cell, num_nodes: int, parts: Parts, num_tokens: int) -> Prediction:
    trees, link = parts.trees[num_nodes], _link_costs(cell, parts)
    tree_s = trees.draft_s + link.rtt_s + trees.verify_s + link.transfer_s(num_nodes)
    token_s = tree_token_s(trees.num_accepted, num_tokens, tree_s, round_s(0, parts.models, link))
    inputs = {
        "draft_s": _short(trees.draft_s),
        "verify_s": _short(trees.verify_s),
        "rtt_s": _short(link.rtt_s),
        "tokens_per_round": _short(1 + statistics.fmean(trees.num_accepted)),
    }
    return Prediction(cell.id, "tpot_ms", _short(token_s * 1e3), "ms", "costmodel", inputs)


def _setting(cell: Cell) -> _Setting:
    """Returns what parts depend on: not the link, and not how long drafts are."""
    return cell.temperature, cell.min_forward_ms, cell.min_draft_ms, cell.tls, cell.constraint.name


def _is_of_setting(cell: Cell, lead: Cell) -> bool:
    is_same_draft = cell.min_draft_ms == lead.min_draft_ms or cell.mode in (
        ExecutionMode.CLOUD_ONLY,
        ExecutionMode.CO_LOCATED,
    )
    is_same_target = (cell.min_forward_ms, cell.tls) == (lead.min_forward_ms, lead.tls)
    is_same_target = is_same_target or cell.mode == ExecutionMode.EDGE_ONLY
    is_same_text = (cell.temperature, cell.constraint) == (lead.temperature, lead.constraint)
    return is_same_text and is_same_draft and is_same_target


def _is_plain(cell: Cell) -> bool:
    is_fixed = cell.depth_policy == "fixed" and cell.tree != "auto"
    return is_fixed and cell.method == "coupled" and not cell.variant.name


def _is_plain_speculation(cell: Cell) -> bool:
    return cell.mode == ExecutionMode.SPECULATIVE and _is_plain(cell) and cell.tree == "off"


def _link_costs(cell: Cell, parts: Parts) -> LinkCosts:
    def rate(mbit: float) -> float:
        return mbit * 1e6 / 8 if mbit else math.inf

    rtt_s = cell.link.rtt_ms / 1e3 + parts.overhead_s
    return LinkCosts(rtt_s, rate(cell.link.up_mbit), rate(cell.link.down_mbit))


def _short(value: float) -> float:
    return float(f"{value:.5g}")
