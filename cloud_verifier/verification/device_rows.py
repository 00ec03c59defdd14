"""`TargetRows` over logits that stay on a GPU: `DeviceStep` computes what methods read of all rows of a step.

What nobody foresaw is computed when it is asked for, which waits for the device: candidates that a co-located draft
asks for after the first ones, and a sample of p where rounding leaves nothing of a residual.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import (
    ProcessedRows,
    RawLogprobs,
    StepRound,
    check_total,
)
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.types import TokenIds

if TYPE_CHECKING:
    import torch

    from outrider.cloud_verifier.verification.device_step import DeviceStep, StagedRounds
    from outrider.cloud_verifier.verification.staging import Staging


def is_on_device(logits: object) -> TypeGuard[torch.Tensor]:
    """Returns whether logits are where a GPU computed them, and not an array on the host."""
    return hasattr(logits, "data_ptr")


def stage_rounds(
    rounds: Sequence[StepRound], num_tokens: int, staging: Staging, clock: Clock = SYSTEM_CLOCK
) -> StagedRounds:
    """Attaches what the rows of some rounds are computed with to the next forward's inputs, and adds what each round
    alone takes to its `host_s`, by `clock`.

    Ids at or above `num_tokens` do not exist.
    """
    from outrider.cloud_verifier.verification.device_step import StagedRounds

    return StagedRounds(rounds, num_tokens, staging, clock)


def make_staged_rows(logits: torch.Tensor, staged: StagedRounds, eos_token_ids: TokenIds) -> list[DeviceRows]:
    """Returns the rows of each round that `stage_rounds` took, in order, from float32 logits [Σ num_rows, vocab_size]
    on a GPU.

    The rows are computed from now on and waited for where they are read; the logits stay unchanged until then.
    """
    from outrider.cloud_verifier.verification.device_step import DeviceStep

    step = DeviceStep(logits[:, : staged.num_tokens], staged, eos_token_ids)
    return [DeviceRows(each, step, number) for number, each in enumerate(staged.rounds)]


def make_device_rows(
    logits: torch.Tensor, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
) -> list[DeviceRows]:
    """Returns `make_staged_rows` of rounds that were not staged before the forward: they go up by themselves."""
    if not rounds:  # a step of chunks of prompts alone
        return []
    from outrider.cloud_verifier.verification.staging import Staging

    staging = Staging(logits.device)
    staged = stage_rounds(rounds, min(num_tokens, logits.shape[1]), staging)
    staging.start()
    staging.send()
    return make_staged_rows(logits, staged, eos_token_ids)


class DeviceRows(ProcessedRows):
    """Holds one round's rows of a step, made by `make_staged_rows`."""

    is_on_device = True

    def __init__(self, step_round: StepRound, step: DeviceStep, number: int) -> None:
        """Takes the round's number in its step."""
        super().__init__(step_round)
        self._step, self._number, self._first = step, number, step.slices[number].start

    @property
    def is_computed(self) -> bool:
        return self._step.is_computed

    def wait(self) -> None:
        self._step.wait()

    @cached_property
    def _samples(self) -> dict[tuple[int, ...], int]:
        """Returns the samples that were drawn beforehand, by row, key and whether weights are changed."""
        samples = self._step.samples[self._number]
        return {_name(each.row, each.key, each.token_ids): token_id for token_id, each in samples}

    def _found(self, row: int) -> Sequence[float]:
        return self._step.table[self._first + row]

    def target_sample(self, row: int) -> int:
        self._total(row)  # raises where the row has NaN
        return int(self._found(row)[0])

    def raw_logprobs(self, row: int, token_id: int, num_top: int) -> RawLogprobs:
        return self._step.raw_logprobs(self._first + row, token_id, num_top)

    def _logits_at(self, row: int, token_ids: Sequence[int]) -> list[float]:
        known = self._step.known_logits(self._first + row)
        if all(token_id in known for token_id in token_ids):
            return [known[token_id] for token_id in token_ids]
        logits: list[float] = self._step.penalized[self._first + row][list(token_ids)].tolist()
        return logits

    def _threshold(self, row: int) -> float:
        return self._found(row)[4]

    def _total(self, row: int) -> tuple[float, float]:
        found = self._found(row)
        return check_total(found[1], found[2])

    def _entropy(self, row: int) -> float:
        self._total(row)
        return self._found(row)[3]

    def _sample(self, row: int, key: NoiseKey, changed: Mapping[int, float]) -> int:
        token_id = self._samples.get(_name(row, key, changed))
        return self._sample_now(row, key, changed) if token_id is None else token_id

    def _sample_now(self, row: int, key: NoiseKey, changed: Mapping[int, float]) -> int:
        """Draws what nobody foresaw."""
        from outrider.cloud_verifier.verification.staging import upload
        from outrider.kernels import device

        assert len(changed) <= device.MAX_CHANGED, f"{len(changed)} changed weights"
        ids = np.full((1, device.MAX_CHANGED), device.NO_CHANGE, np.int32)
        weights = np.full((1, device.MAX_CHANGED), -math.inf)
        ids[0, : len(changed)], weights[0, : len(changed)] = list(changed), list(changed.values())
        logits = self._step.penalized[self._first + row][None]
        scale = np.array([[self._temperature], [self._threshold(row)]], np.float32)
        total, key_bits = np.array(self._total(row))[:, None], self._key(key).view(np.int64)[None]
        arrays = scale, total, key_bits, np.zeros(1, np.int64), ids, weights
        (temperature, threshold), (top, log_sum), keys, rows, *changes = upload(arrays, logits.device)
        changed_here = device.Changes(rows, top, log_sum, *changes)
        return int(device.sample(logits, temperature, threshold, keys, changed_here)[0])


def _name(row: int, key: NoiseKey, changed: Collection[int]) -> tuple[int, ...]:
    return row, key.purpose, key.position, key.index, bool(changed)
