"""The samples that a round's method may ask for after it has judged, drawn on a GPU before it has.

None of them depends on what is accepted: a method asks for a sample of one row, whose weights follow from p and the
draft's own q. So they are drawn with the target's samples, for every row that may be asked for, and come to the host
in the same copy. A second copy would wait for what the device was given meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey, Resampling
from outrider.cloud_verifier.verification.methods.supports import support_probs
from outrider.cloud_verifier.verification.rows import StepRound
from outrider.common.noise.draws import Purpose
from outrider.common.types import TokenIds
from outrider.kernels import device


@dataclass(slots=True)
class Foreseen:
    """Names one sample: of a row of its round, with the noise of `key`.

    The weights of `token_ids` are changed: what is left of p at these ids after `rejected`, the draft's distribution
    at each rejection in turn, [token_ids] each.
    """

    row: int
    key: NoiseKey
    token_ids: TokenIds = ()
    rejected: Sequence[NDArray[np.float64]] = ()


def foresee(each: StepRound) -> list[Foreseen]:
    """Returns the samples that the round's method may ask for. A greedy one asks for none."""
    if each.sampling.temperature == 0 or each.resampling is Resampling.NONE:
        return []
    num_drafted = len(each.draft_token_ids)
    if each.resampling is Resampling.CANDIDATES:
        rows, start = range(max(1, num_drafted)), each.position
        keys = [(row, NoiseKey(Purpose.CANDIDATE, start + row, i)) for row in rows for i in each.candidates]
        return [Foreseen(row, key) for row, key in keys]
    if each.resampling is Resampling.WITHOUT_DRAFTED:
        everything = [np.array([np.inf])]
        return [
            Foreseen(row, NoiseKey(Purpose.RESIDUAL, each.position, row), (token_id,), everything)
            for row, token_id in enumerate(each.draft_token_ids)
        ]
    judged = range(num_drafted) if each.tree is None else [node + 1 for node in each.tree.internal]
    return [
        Foreseen(
            row,
            NoiseKey(Purpose.RESIDUAL, each.position, row),
            each.supports[row].token_ids,
            _rejected(each, row),
        )
        for row in judged
    ]


def _rejected(each: StepRound, row: int) -> list[NDArray[np.float64]]:
    """Returns q at a row, and what is left of it without each drafted child but the last."""
    support = each.supports[row]
    weights, found = np.array(support.weights, np.float64), [support_probs(support)]
    children = () if each.tree is None else each.tree.children(row - 1)
    for child in children[:-1]:
        weights[support.token_ids.index(each.draft_token_ids[child])] = 0.0
        found.append(weights / weights.sum())
    return found


class SampleInputs:
    """Holds the foreseen samples of a step as arrays, and draws them on the device."""

    def __init__(self, rounds: Sequence[StepRound], of_round: Sequence[Sequence[Foreseen]]) -> None:
        """Takes the samples that were foreseen of each round."""
        self.of_round = of_round
        rows, keys, first_row = list[int](), list[tuple[int, ...]](), 0
        samples = [sample for each in of_round for sample in each]
        for each, its_samples in zip(rounds, of_round, strict=True):
            for sample in its_samples:
                key = sample.key
                rows.append(first_row + sample.row)
                keys.append((each.sampling.seed, key.purpose, key.position, key.index))
            first_row += each.num_rows
        width = max((len(sample.token_ids) for sample in samples), default=0)
        ids = np.full((len(samples), width), device.NO_CHANGE, np.int32)
        probs = np.zeros((max((len(s.rejected) for s in samples), default=0), *ids.shape))
        for number, sample in enumerate(samples):
            ids[number, : len(sample.token_ids)] = sample.token_ids
            for turn, rejected in enumerate(sample.rejected):
                probs[turn, number, : len(rejected)] = rejected
        self.num = len(samples)
        self.of_row: dict[int, list[int]] = {}  # the numbers of its samples
        for number, row in enumerate(rows):
            self.of_row.setdefault(row, []).append(number)
        self.arrays = (
            np.array(rows, np.int64),
            np.array(keys, np.uint64).reshape(-1, 4).view(np.int64),
            ids,
            probs,
            *_chains(rounds, of_round),
        )


def _chains(
    rounds: Sequence[StepRound], of_round: Sequence[Sequence[Foreseen]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (the numbers of each chain's samples [chains, longest], the place of each sample's drafted token in its
    ids [samples]) of the rounds that are judged as blocks; one past the last sample where a chain is shorter."""
    num_samples, first = sum(map(len, of_round)), 0
    places, chains = np.zeros(num_samples, np.int64), list[range]()
    for each, samples in zip(rounds, of_round, strict=True):
        if each.resampling is Resampling.BLOCK_RESIDUAL:
            chains.append(range(first, first + len(samples)))
            for sample in samples:
                drafted = each.draft_token_ids[sample.row]
                places[first + sample.row] = sample.token_ids.index(drafted)
        first += len(samples)
    numbers = np.full((len(chains), max(map(len, chains), default=0)), num_samples, np.int64)
    for chain, samples_of in zip(numbers, chains, strict=True):
        chain[: len(samples_of)] = samples_of
    return numbers, places


def draw(
    penalized: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    found: device.SampledRows,
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the foreseen samples and their rows, int64 [samples].

    The first arguments are those of `outrider.kernels.device.gumbel_argmax` and what it found; `inputs` are
    `SampleInputs.arrays` on the device.
    """
    rows, keys, ids, probs, chains, places = inputs
    tops, log_sums = found.tops.double(), found.log_sums
    is_changed = ids != device.NO_CHANGE
    logits = penalized[rows[:, None], torch.where(is_changed, ids, 0).long()]
    temperature = temperatures[rows][:, None]
    is_kept = is_changed & (logits / temperature >= thresholds[rows][:, None])
    logs = (logits.double() - tops[rows][:, None]) / temperature.double() - log_sums[rows][:, None]
    target = torch.where(is_kept, logs.exp(), 0.0)
    left = _reject(target, probs, _kept(target, probs, chains, places))
    padding = 0, device.MAX_CHANGED - ids.shape[1]
    changes = device.Changes(
        rows,
        tops,
        log_sums,
        torch.nn.functional.pad(ids, padding, value=device.NO_CHANGE),
        torch.nn.functional.pad(torch.where(is_changed, left.log(), -torch.inf), padding, value=-torch.inf),
    )
    return device.sample(penalized, temperatures, thresholds, keys, changes), rows


def _reject(target: torch.Tensor, probs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Returns what is left of p, [samples, ids], after each rejection; see `methods.supports.Remainder`."""
    outside = (1.0 - target.sum(1)).clamp(min=0.0)
    for turn, rejected in enumerate(probs):
        taken = rejected / kept[:, None] if turn == 0 else rejected * (target.sum(1) + outside)[:, None]
        target = (target - torch.where(rejected > 0, taken, 0.0)).clamp(min=0.0)
    return target


def _kept(
    target: torch.Tensor, probs: torch.Tensor, chains: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Returns c, [samples]: of a block the probability that what is drafted before the row is accepted, else 1."""
    kept = target.new_ones(len(target) + 1)
    if not chains.numel():
        return kept[:-1]
    ratios = target.gather(1, places[:, None]) / probs[0].gather(1, places[:, None])
    of_chains = torch.nn.functional.pad(ratios[:, 0], (0, 1))[chains]  # [chains, longest]
    before, columns = target.new_ones(len(chains)), list[torch.Tensor]()
    for column in of_chains.unbind(1):
        columns.append(before)
        before = (before * column).clamp(max=1.0)
    kept[chains] = torch.stack(columns, 1)
    return kept[:-1]
