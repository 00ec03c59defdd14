"""`TargetRows` over logits that stay on a GPU: one launch for all rows of a step, one copy of what it found.

A residual sample, and p of an id that nobody drafted, is a launch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import ProcessedRows, StepRound, check_total
from outrider.common.noise.draws import Purpose
from outrider.common.sampling.processors import apply_text, is_plain, wire
from outrider.common.sampling.truncation import row_edges
from outrider.common.types import SamplingParams, TokenIds

if TYPE_CHECKING:
    import torch

_FOUND = 5  # columns of a step's table: token id, top, log_sum, entropy, edge; then the logits foreseen


def scan_step(
    logits: torch.Tensor, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
) -> list[DeviceRows]:
    """The rows of each round, in order, out of float32 [Σ num_rows, vocab_size]; ids at or above `num_tokens`
    do not exist.
    """
    raw = logits[:, :num_tokens]
    ends = np.cumsum([each.num_rows for each in rounds]).tolist()
    places = [slice(end - each.num_rows, end) for each, end in zip(rounds, ends, strict=True)]
    texted = _apply_texts(raw, rounds, places, eos_token_ids)
    edges = raw.new_full((len(raw),), -math.inf)
    for each, place in zip(rounds, places, strict=True):
        if (found := _find_edges(texted[place], each.sampling)) is not None:
            edges[place] = found
    foreseen = [each.foreseen(row) for each in rounds for row in range(each.num_rows)]
    table = _scan(texted, edges, rounds, foreseen)
    return [
        DeviceRows(each, raw[p], texted[p], table[p], foreseen[p])
        for each, p in zip(rounds, places, strict=True)
    ]


def _apply_texts(
    raw: torch.Tensor, rounds: Sequence[StepRound], places: Sequence[slice], eos_token_ids: TokenIds
) -> torch.Tensor:
    import torch

    if all(is_plain(each.sampling) and not each.sampling.logit_bias for each in rounds):
        return raw
    texted = raw.clone()
    for each, place in zip(rounds, places, strict=True):
        texted[place] = apply_text(
            torch,
            raw[place],
            each.sampling,
            prompt_ids=each.prompt_ids,
            output_ids=each.output_ids,
            draft_token_ids=each.draft_token_ids,
            eos_token_ids=eos_token_ids,
        )
    return texted


def _find_edges(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor | None:
    """float32 [rows] on the scores' scale, None where nothing is cut."""
    import torch

    top_k = sampling.top_k if sampling.top_k < logits.shape[1] else 0
    is_whole = not top_k and sampling.top_p >= 1 and sampling.min_p <= 0
    if sampling.temperature == 0 or is_whole:
        return None
    scores = logits / wire(sampling.temperature)
    edges: torch.Tensor = row_edges(torch, scores, top_k, wire(sampling.top_p), wire(sampling.min_p))
    return edges[:, 0].float()


def _scan(
    texted: torch.Tensor, edges: torch.Tensor, rounds: Sequence[StepRound], foreseen: Sequence[TokenIds]
) -> NDArray[np.float64]:
    """[rows, _FOUND + most ids foreseen]: one launch, one copy to the host."""
    import torch

    from outrider.kernels import device

    keys = [
        (each.sampling.seed, Purpose.COUPLED, each.position + row, 0)
        for each in rounds
        for row in range(each.num_rows)
    ]
    temperatures = [wire(each.sampling.temperature) for each in rounds for _ in range(each.num_rows)]
    ids = np.zeros((len(foreseen), max(map(len, foreseen))), np.int64)
    for row, row_ids in enumerate(foreseen):
        ids[row, : len(row_ids)] = row_ids
    scanned = device.scan(texted, texted.new_tensor(temperatures), edges, _on_device(_bits(keys), texted))
    found = (scanned.token_ids, scanned.tops, scanned.log_sums, scanned.entropies, edges)
    columns = torch.stack([each.double() for each in found], 1)
    logits = texted.gather(1, _on_device(ids, texted)).double()
    return np.asarray(torch.cat((columns, logits), 1).cpu().numpy())


class DeviceRows(ProcessedRows):
    """One round's rows of a step. Made by `scan_step`."""

    def __init__(
        self,
        step_round: StepRound,
        raw: torch.Tensor,
        texted: torch.Tensor,
        table: NDArray[np.float64],
        foreseen: Sequence[TokenIds],
    ) -> None:
        """Each its rows alone: `raw` and `texted` [rows, num_tokens], `table` [rows, _FOUND + foreseen]."""
        super().__init__(step_round.sampling, step_round.position)
        self._raw, self._texted, self._table = raw, texted, table
        self._known = [
            dict(zip(ids, logits.tolist(), strict=False))
            for ids, logits in zip(foreseen, table[:, _FOUND:], strict=True)
        ]

    def raw_logits(self) -> NDArray[np.float32]:
        return np.asarray(self._raw.cpu().numpy())

    def own_sample(self, row: int) -> int:
        self._total(row)  # raises where the row has NaN
        return int(self._table[row, 0])

    def _logits_at(self, row: int, token_ids: Sequence[int]) -> list[float]:
        known = self._known[row]
        if all(token_id in known for token_id in token_ids):
            return [known[token_id] for token_id in token_ids]
        logits: list[float] = self._texted[row, list(token_ids)].tolist()
        return logits

    def _edge(self, row: int) -> float:
        return float(self._table[row, 4])

    def _total(self, row: int) -> tuple[float, float]:
        return check_total(float(self._table[row, 1]), float(self._table[row, 2]))

    def _entropy(self, row: int) -> float:
        self._total(row)
        return float(self._table[row, 3])

    def _sample(self, row: int, key: NoiseKey, changed: Mapping[int, float]) -> int:
        from outrider.kernels import device

        assert len(changed) <= device.MAX_CHANGED, f"{len(changed)} changed weights"
        ids = np.full((1, device.MAX_CHANGED), device.NO_CHANGE, np.int32)
        weights = np.full((1, device.MAX_CHANGED), -math.inf)
        ids[0, : len(changed)], weights[0, : len(changed)] = list(changed), list(changed.values())
        logits = self._texted[row : row + 1]
        top, log_sum = self._total(row)
        picked = device.sample(
            logits,
            logits.new_tensor([self._temperature]),
            logits.new_tensor([self._edge(row)]),
            _on_device(_bits([tuple(self._key(key).tolist())]), logits),
            _on_device(np.array([top]), logits),
            _on_device(np.array([log_sum]), logits),
            _on_device(ids, logits),
            _on_device(weights, logits),
        )
        return int(picked[0])


def _bits(keys: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    return np.array(keys, np.uint64).view(np.int64)


def _on_device(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(values).to(like.device)
