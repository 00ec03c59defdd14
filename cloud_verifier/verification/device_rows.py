"""`TargetRows` over logits that stay on a GPU: one launch for all rows of a step, one copy of the results.

A residual sample is a launch of its own, and so is p of an id that was not drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import ProcessedRows, StepRound, check_total, penalize
from outrider.common.noise.draws import Purpose
from outrider.common.sampling.processors import is_plain, wire
from outrider.common.sampling.truncation import row_thresholds
from outrider.common.types import SamplingParams, TokenIds

if TYPE_CHECKING:
    import torch

_FOUND = 5  # columns of a step's table: token id, top, log_sum, entropy, threshold; then logits of needed ids


def make_device_rows(
    logits: torch.Tensor, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
) -> list[DeviceRows]:
    """Returns the rows of each round, in order, from float32 logits [Σ num_rows, vocab_size] on a GPU.

    Ids at or above `num_tokens` do not exist.
    """
    if not rounds:  # a step of chunks of prompts alone
        return []
    raw = logits[:, :num_tokens]
    ends = np.cumsum([each.num_rows for each in rounds]).tolist()
    slices = [slice(end - each.num_rows, end) for each, end in zip(rounds, ends, strict=True)]
    penalized = _penalize(raw, rounds, slices, eos_token_ids)
    thresholds = raw.new_full((len(raw),), -math.inf)
    for each, place in zip(rounds, slices, strict=True):
        if (found := _thresholds_of(penalized[place], each.sampling)) is not None:
            thresholds[place] = found
    needed_ids = [each.needed_ids(row) for each in rounds for row in range(each.num_rows)]
    table = _compute_table(penalized, thresholds, rounds, needed_ids)
    return [
        DeviceRows(each, raw[p], penalized[p], table[p], needed_ids[p])
        for each, p in zip(rounds, slices, strict=True)
    ]


def _penalize(
    raw: torch.Tensor, rounds: Sequence[StepRound], slices: Sequence[slice], eos_token_ids: TokenIds
) -> torch.Tensor:
    import torch

    if all(is_plain(each.sampling) and not each.sampling.logit_bias for each in rounds):
        return raw
    penalized = raw.clone()
    for each, place in zip(rounds, slices, strict=True):
        penalized[place] = penalize(torch, raw[place], each, eos_token_ids)
    return penalized


def _thresholds_of(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor | None:
    """Returns float32 [rows] on the scores' scale, None where nothing is cut."""
    import torch

    top_k = sampling.top_k if sampling.top_k < logits.shape[1] else 0
    is_whole = not top_k and sampling.top_p >= 1 and sampling.min_p <= 0
    if sampling.temperature == 0 or is_whole:
        return None
    # Divided by a tensor on the device: by a number CUDA multiplies with its reciprocal, and a threshold that is
    # the last bit above the kernel's own score cuts the id that it was taken from.
    scores = logits / logits.new_tensor(wire(sampling.temperature))
    thresholds: torch.Tensor = row_thresholds(
        torch, scores, top_k, wire(sampling.top_p), wire(sampling.min_p)
    )
    return thresholds[:, 0].float()


def _compute_table(
    penalized: torch.Tensor,
    thresholds: torch.Tensor,
    rounds: Sequence[StepRound],
    needed_ids: Sequence[TokenIds],
) -> NDArray[np.float64]:
    """Returns [rows, _FOUND + the most needed ids of a row]: one launch, one copy to the host."""
    import torch

    from outrider.kernels import device

    keys = [
        (each.sampling.seed, Purpose.COUPLED, each.row_position(row), 0)
        for each in rounds
        for row in range(each.num_rows)
    ]
    temperatures = [wire(each.sampling.temperature) for each in rounds for _ in range(each.num_rows)]
    ids = np.zeros((len(needed_ids), max(map(len, needed_ids))), np.int64)
    for row, row_ids in enumerate(needed_ids):
        ids[row, : len(row_ids)] = row_ids
    sampled = device.gumbel_argmax(
        penalized, penalized.new_tensor(temperatures), thresholds, _on_device(_bits(keys), penalized)
    )
    found = (sampled.token_ids, sampled.tops, sampled.log_sums, sampled.entropies, thresholds)
    columns = torch.stack([each.double() for each in found], 1)
    logits = penalized.gather(1, _on_device(ids, penalized)).double()
    return np.asarray(torch.cat((columns, logits), 1).cpu().numpy())


class DeviceRows(ProcessedRows):
    """Holds one round's rows of a step, made by `make_device_rows`."""

    def __init__(
        self,
        step_round: StepRound,
        raw: torch.Tensor,
        penalized: torch.Tensor,
        table: NDArray[np.float64],
        needed_ids: Sequence[TokenIds],
    ) -> None:
        """Takes one round's `raw` and `penalized` [rows, num_tokens] and `table` [rows, _FOUND + needed ids]."""
        super().__init__(step_round)
        self._raw, self._penalized_logits, self._table = raw, penalized, table
        self._known = [
            dict(zip(ids, logits.tolist(), strict=False))
            for ids, logits in zip(needed_ids, table[:, _FOUND:], strict=True)
        ]

    def raw_logits(self) -> NDArray[np.float32]:
        return np.asarray(self._raw.cpu().numpy())

    def target_sample(self, row: int) -> int:
        self._total(row)  # raises where the row has NaN
        return int(self._table[row, 0])

    def _logits_at(self, row: int, token_ids: Sequence[int]) -> list[float]:
        known = self._known[row]
        if all(token_id in known for token_id in token_ids):
            return [known[token_id] for token_id in token_ids]
        logits: list[float] = self._penalized_logits[row, list(token_ids)].tolist()
        return logits

    def _threshold(self, row: int) -> float:
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
        logits = self._penalized_logits[row : row + 1]
        top, log_sum = self._total(row)
        picked = device.sample(
            logits,
            logits.new_tensor([self._temperature]),
            logits.new_tensor([self._threshold(row)]),
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
