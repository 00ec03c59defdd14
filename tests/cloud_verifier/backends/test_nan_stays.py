"""NaN in KV that is not a sequence's own never reaches its rows: masked attention multiplies it by zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.twins import twin_of

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.verification.staging import Staging
from outrider.kernels.kv_pool import KVPool

TEXT = [(37 * i + 11) % 300 for i in range(200)]
# Queries and lengths that are padded into one call, that attend alone, and that fill their last block.
DECODERS = {"lean": "lean", "lean in fp8": "lean", "cuda": "cuda"}
LENGTHS = (1, 3, 8, 9, 17, 31, 33, 70, 16)


@pytest.fixture(params=["lean", "lean in fp8", "cuda", "generic", "gpt2", "staged"], scope="module")
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> PagedBackend:
    directory = target_of("gpt2" if request.param == "gpt2" else "qwen3")
    backend = load_target(
        directory,
        kv_tokens=1024,
        block_size=8,
        decoder=DECODERS.get(request.param, "transformers"),
        kv_dtype="fp8" if "fp8" in request.param else "auto",
    )
    if request.param == "staged":  # as on a device
        backend.inputs = Staging(torch.device("cpu"))
    return backend


def poison(backend: PagedBackend, block_ids: Sequence[int]) -> None:
    for pool in (*backend.memory.key_pools, *backend.memory.value_pools):
        (pool.rows if pool.scales is None else pool.scales)[list(block_ids)] = math.nan


def free_blocks(backend: PagedBackend) -> list[int]:
    return [block for block, is_taken in enumerate(backend.blocks._is_taken) if not is_taken]


def texts_of(backend: PagedBackend, *, is_poisoned: bool) -> list[Logits]:
    """Rows of prefills, decoding and rounds with rejected drafts, of several sequences in each forward, one
    of which is NaN from its second forward on where `is_poisoned`."""
    sequences = [backend.new_sequence() for _ in LENGTHS]
    victim = backend.new_sequence()
    found: list[Logits] = []

    def forward(num_new: Sequence[int], num_rows: int) -> None:
        if is_poisoned:
            poison(backend, [*free_blocks(backend), *victim.table.block_ids])
        items = [
            ForwardItem(sequence, TEXT[sequence.length : sequence.length + num], min(num, num_rows))
            for sequence, num in zip(sequences, num_new, strict=True)
        ]
        rows = backend.forward([ForwardItem(victim, TEXT[:5], 5), *items])
        found.append(np.array(rows[5:]))

    forward(LENGTHS, 1)
    forward([1] * len(LENGTHS), 1)
    forward([1 + i % 5 for i in range(len(LENGTHS))], 5)
    for sequence in sequences:
        backend.truncate(sequence, sequence.length - 1)
    forward([5] * len(LENGTHS), 5)
    forward([70, *[2] * (len(LENGTHS) - 1)], 2)
    for sequence in (*sequences, victim):
        backend.close(sequence)
    return found


def test_no_row_depends_on_what_others_left_or_hold(backend: PagedBackend) -> None:
    backend.clear_kv()
    clean = texts_of(backend, is_poisoned=False)
    backend.clear_kv()
    poisoned = texts_of(backend, is_poisoned=True)
    for theirs, ours in zip(poisoned, clean, strict=True):
        assert np.isfinite(theirs).all()
        assert np.array_equal(theirs, ours)
    backend.check_integrity()


def test_nan_in_one_sequences_rows_stays_in_them(backend: PagedBackend) -> None:
    """The embedding of one id is NaN: all that is computed of a sequence with it, and nothing of the others."""
    backend.clear_kv()
    hostile, other, third = (backend.new_sequence() for _ in range(3))
    items = [ForwardItem(other, TEXT[:9], 9), ForwardItem(third, TEXT[5:25], 20)]
    expected = np.array(backend.forward(items))
    for sequence in (other, third):
        backend.truncate(sequence, 0)
    decoder, bad_id = backend.decoder, 499
    try:
        backend.use_decoder(NanAtId(decoder, bad_id))
        rows = backend.forward([ForwardItem(hostile, [1, bad_id, 2], 3), *items])
    finally:
        backend.use_decoder(decoder)
    assert np.isnan(rows[1:3]).all(), "the plant does nothing"
    assert np.array_equal(rows[3:], expected)
    for sequence in (hostile, other, third):
        backend.close(sequence)


class NanAtId:
    """A decoder whose keys and values are NaN at one id."""

    def __init__(self, decoder: Decoder, token_id: int) -> None:
        self._decoder, self._token_id = decoder, token_id
        self.writes_padding = decoder.writes_padding

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: object
    ) -> torch.Tensor:
        hit = (token_ids == self._token_id).nonzero().flatten()
        attention = plan.attention  # type: ignore[attr-defined]

        def attend(query: torch.Tensor, keys: KVPool, values: KVPool, rule: object) -> torch.Tensor:
            num_slots = keys.rows.flatten(0, 1).shape[0]
            slots = torch.arange(num_slots)[plan.write][hit]  # type: ignore[attr-defined]
            for pool in (keys, values):
                pool.write(slots, torch.full_like(pool.read(slots), math.nan))
            return attention(query, keys, values, rule)

        plan.attention = attend  # type: ignore[attr-defined]
        return self._decoder(token_ids, positions, rows, plan)  # type: ignore[operator]


def test_a_copied_block_brings_no_nan_of_its_last_holder(backend: PagedBackend) -> None:
    backend.clear_kv()
    poison(backend, range(backend.blocks.num_blocks))
    origin = backend.new_sequence()
    backend.forward([ForwardItem(origin, TEXT[:10], 1)])
    twin = twin_of(backend, origin, TEXT[:10])
    rows = backend.forward([ForwardItem(twin, [3, 4], 2), ForwardItem(origin, [5], 1)])
    assert np.isfinite(rows).all()
    for sequence in (origin, twin):
        backend.close(sequence)
