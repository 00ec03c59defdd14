"""What methods read of a step's rows, computed on a GPU for all rows together.

Its inputs (`StagedRounds`) go up with those of the forward, whose logits none of them depends on, and its results come
down in one copy (`staging`): sums and the target's samples, the samples that methods may ask for besides (`foreseen`),
the logits of ids that are read, log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.verification import foreseen
from outrider.cloud_verifier.verification.foreseen import Foreseen, SampleInputs
from outrider.cloud_verifier.verification.rows import (
    PathPenalties,
    RawLogprobs,
    StepRound,
    penalize,
    penalties_of_round,
)
from outrider.cloud_verifier.verification.staging import Download, Staging
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.noise.draws import Purpose
from outrider.common.sampling.penalties import Penalties, wire
from outrider.common.types import SamplingParams, TokenIds
from outrider.kernels import device
from outrider.kernels.device_truncation import truncation_thresholds

# Columns of the tables. Of rows; from the last on: the logits of the target's sample and of the needed ids.
TOKEN, TOP, LOG_SUM, ENTROPY, THRESHOLD, _LOGITS = range(6)
# Of foreseen samples: the token, its logit and its raw logit.
# Of rows with log-probabilities: log Σ exp of the raw logits, these logits of the target's sample and of the needed
# ids, then the most probable ids, and their logits.
_LOG_TOTAL, _RAW_LOGITS = range(2)


class StagedRounds:
    """Holds what the rows of a step's rounds are computed with: known before the forward, and sent with its inputs."""

    def __init__(
        self, rounds: Sequence[StepRound], num_tokens: int, staging: Staging, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Attaches it to the next step of `staging`; `num_tokens` are the ids that exist. Adds what each round alone
        takes to its `host_s`, by `clock`."""
        self.rounds, self.num_tokens = rounds, num_tokens
        self._penalties, samples = list[list[PathPenalties]](), list[list[Foreseen]]()
        for each in rounds:
            begin_s = clock.now()
            try:
                self._penalties.append(penalties_of_round(each))  # first: the draft may be cut
                samples.append(foreseen.foresee(each))
            finally:
                each.host_s += clock.now() - begin_s
        self.inputs, self.samples = _StepInputs(rounds, num_tokens), SampleInputs(rounds, samples)
        self._arrays = self.inputs.arrays, self.samples.arrays, _flat(self._penalties)
        self._attached = staging.attach(list(chain.from_iterable(self._arrays)))

    def on_device(
        self,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[PathPenalties]]]:
        """Returns (what rows, what samples are computed with, what changes the logits), once they are sent."""
        tensors = iter(self._attached.tensors)
        of_rows, of_samples, of_penalties = (list(islice(tensors, len(each))) for each in self._arrays)
        sent = {id(array): tensor for array, tensor in zip(self._arrays[2], of_penalties, strict=True)}
        return of_rows, of_samples, _like(self._penalties, sent)


class DeviceStep:
    """Holds a step's rows: computed from the beginning on, waited for where they are read first."""

    def __init__(self, raw: torch.Tensor, staged: StagedRounds, eos_token_ids: TokenIds) -> None:
        """Takes float32 logits [Σ num_rows, num_tokens] of the rounds, which are on the device."""
        rounds = staged.rounds
        ends = list(accumulate(each.num_rows for each in rounds))
        self.slices = [slice(end - each.num_rows, end) for each, end in zip(rounds, ends, strict=True)]
        self.raw = raw
        self._inputs, self._samples = staged.inputs, staged.samples
        of_rows, of_samples, penalties = staged.on_device()
        self.penalized = self._penalize(rounds, penalties, eos_token_ids)
        self._download = Download(self._compute(of_rows, of_samples))

    def _penalize(
        self, rounds: Sequence[StepRound], found: Sequence[Sequence[PathPenalties]], eos_token_ids: TokenIds
    ) -> torch.Tensor:
        if not any(found):
            return self.raw
        penalized = self.raw.clone()
        for each, place, of_round in zip(rounds, self.slices, found, strict=True):
            if of_round:
                penalized[place] = penalize(torch, self.raw[place], each, of_round, eos_token_ids)
        return penalized

    def _compute(
        self, staged: Sequence[torch.Tensor], of_samples: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the tables that come to the host: of rows, samples and rows with log-probabilities."""
        raw, penalized = self.raw, self.penalized
        keys, temperatures, ids, logprob_rows, *cuts = staged
        thresholds = truncation_thresholds(penalized, temperatures, *cuts)
        found = device.gumbel_argmax(penalized, temperatures, thresholds, keys)
        read = torch.cat((found.token_ids.clamp(min=0)[:, None], ids), 1)
        columns = found.token_ids, found.tops, found.log_sums, found.entropies, thresholds
        tables = [torch.cat((_table(*columns), penalized.gather(1, read).double()), 1)]
        if self._samples.num:
            token_ids, rows = foreseen.draw(penalized, temperatures, thresholds, found, of_samples)
            places = rows, token_ids.clamp(min=0)
            tables.append(_table(token_ids, penalized[places], raw[places]))
        else:
            tables.append(_table(*raw.new_empty((3, 0))))
        if self._inputs.num_top:
            tables.append(_logprobs(raw[logprob_rows], read[logprob_rows], self._inputs.num_top))
        return tables

    @property
    def is_computed(self) -> bool:
        """Returns whether the results are on the host."""
        return self._download.is_computed

    def wait(self) -> None:
        """Waits for the results."""
        self._download.wait()

    @cached_property
    def table(self) -> list[list[float]]:
        """Returns what was found of each row, in the columns named above."""
        return _lists(self._download.arrays[0])

    @cached_property
    def _sampled(self) -> list[list[float]]:
        return _lists(self._download.arrays[1])

    @cached_property
    def _of_logprobs(self) -> list[list[float]]:
        return _lists(self._download.arrays[2])

    @cached_property
    def samples(self) -> list[list[tuple[int, Foreseen]]]:
        """Returns the samples that were foreseen of each round."""
        tokens = (int(token_id) for token_id, *_ in self._sampled)
        return [[(next(tokens), each) for each in of_round] for of_round in self._samples.of_round]

    def known_logits(self, row: int) -> dict[int, float]:
        """Returns the logits at the ids of the row that are known here."""
        known = self._known(row, self.table[row][_LOGITS:])
        return known | {int(token_id): logit for token_id, logit, _ in self._sampled_of(row)}

    def raw_logprobs(self, row: int, token_id: int, num_top: int) -> RawLogprobs:
        """Returns `ProcessedRows.raw_logprobs` of a row whose round asked for some."""
        found, most = self._of_logprobs[self._inputs.logprob_numbers[row]], self._inputs.num_top
        log_total, raw_logits = found[_LOG_TOTAL], self._known(row, found[_RAW_LOGITS:])
        raw_logits |= {int(token_id): raw_logit for token_id, _, raw_logit in self._sampled_of(row)}
        if token_id not in raw_logits:
            raw_logits[token_id] = self.raw[row, token_id].item()
        top = zip(found[-2 * most : -most][:num_top], found[-most:][:num_top], strict=True)
        finite = [(int(top_id), logit - log_total) for top_id, logit in top if logit > -math.inf]
        return RawLogprobs(
            raw_logits[token_id] - log_total,
            tuple(top_id for top_id, _ in finite),
            tuple(lp for _, lp in finite),
        )

    def _known(self, row: int, logits: Sequence[float]) -> dict[int, float]:
        ids = int(self.table[row][TOKEN]), *self._inputs.needed_ids[row]
        return dict(zip(ids, logits, strict=False))

    def _sampled_of(self, row: int) -> list[list[float]]:
        return [
            self._sampled[number]
            for number in self._samples.of_row.get(row, ())
            if self._sampled[number][0] >= 0
        ]


class _StepInputs:
    """Holds what the rows of a step are computed with, as arrays."""

    def __init__(self, rounds: Sequence[StepRound], num_tokens: int) -> None:
        self.needed_ids, seeds, temperatures = list[TokenIds](), list[int](), list[float]()
        positions, logprob_rows, cuts = list[int](), list[int](), _Cuts(num_tokens)
        for each in rounds:
            first, num_rows, sampling = len(seeds), each.num_rows, each.sampling
            self.needed_ids += map(each.needed_ids, range(num_rows))
            positions += each.row_positions
            seeds += [sampling.seed] * num_rows
            temperatures += [wire(sampling.temperature)] * num_rows
            rows = range(first, first + num_rows)
            cuts.add(rows, sampling)
            if each.num_logprobs:
                logprob_rows += rows
        self.num_top = min(max(each.num_logprobs for each in rounds), num_tokens)
        self.logprob_numbers = {row: number for number, row in enumerate(logprob_rows)}
        keys = np.zeros((len(seeds), 4), np.uint64)
        keys[:, 0], keys[:, 1], keys[:, 2] = seeds, Purpose.COUPLED, positions
        width = max(map(len, self.needed_ids))
        padded = chain.from_iterable((*ids, *[0] * (width - len(ids))) for ids in self.needed_ids)
        self.arrays: tuple[NDArray[Any], ...] = (
            keys.view(np.int64),
            np.array(temperatures, np.float32),
            np.fromiter(padded, np.int64, len(seeds) * width).reshape(len(seeds), width),
            np.array(logprob_rows, np.int64),
            *cuts.arrays,
        )


class _Cuts:
    """Collects the arguments of `truncation_thresholds` from its `rows` on."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._rows, self._cuts = list[int](), list[tuple[int, float, float]]()

    def add(self, rows: range, sampling: SamplingParams) -> None:
        """Adds rows that are cut alike; nothing where they are not cut."""
        top_k = sampling.top_k if sampling.top_k < self._num_tokens else 0
        if sampling.temperature != 0 and (top_k or sampling.top_p < 1 or sampling.min_p > 0):
            min_p = wire(sampling.min_p)
            cut = top_k, wire(sampling.top_p), math.log(min_p) if min_p > 0 else -math.inf
            self._rows += rows
            self._cuts += [cut] * len(rows)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Returns them, one number of each for every row that is cut."""
        top_ks, top_ps, log_min_ps = np.array(self._cuts, np.float64).reshape(-1, 3).T
        return np.array(self._rows, np.int64), top_ks.astype(np.int32), top_ps, log_min_ps


def _flat(found: Sequence[Sequence[PathPenalties]]) -> list[NDArray[Any]]:
    """Returns the arrays of all rounds, each once: the paths of a tree share those of their session."""
    arrays = dict[int, NDArray[Any]]()
    for of_path in chain.from_iterable(found):
        arrays |= {id(each): each for each in (*of_path.penalties, of_path.rows) if each is not None}
    return list(arrays.values())


def _like(
    found: Sequence[Sequence[PathPenalties]], sent: Mapping[int, torch.Tensor]
) -> list[list[PathPenalties]]:
    """Returns `found` with tensors in place of its arrays: those that were `sent`, by their identity."""

    def on_device(of_path: PathPenalties) -> PathPenalties:
        penalties = Penalties(*(sent[id(each)] for each in of_path.penalties))
        rows = None if of_path.rows is None else sent[id(of_path.rows)]
        return PathPenalties(penalties, rows, of_path.num_new)

    return [[on_device(of_path) for of_path in of_round] for of_round in found]


def _lists(table: NDArray[np.float64]) -> list[list[float]]:
    rows: list[list[float]] = table.tolist()
    return rows


def _table(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.double() for each in columns], 1)


def _logprobs(raw: torch.Tensor, read: torch.Tensor, num_top: int) -> torch.Tensor:
    """Returns the table of rows with log-probabilities; equal logits are in the order of their ids."""
    log_totals = raw.double().logsumexp(1, keepdim=True)
    bits = (raw + 0.0).view(torch.int32).long()  # without -0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of the logits
    del bits  # memory for a step of many such rows
    ids = torch.arange(raw.shape[1], device=raw.device)
    top_ids = order.bitwise_left_shift_(32).sub_(ids).topk(num_top).indices
    return torch.cat(
        (log_totals, raw.gather(1, read).double(), top_ids.double(), raw.gather(1, top_ids).double()), 1
    )
