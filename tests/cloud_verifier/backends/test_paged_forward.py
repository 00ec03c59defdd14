"""What the KV pool must survive: chunks, truncation, shared blocks, gaps, exhaustion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.devices import GPU_DEVICE, ON_GPU
from support.twins import twin_of

from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, KVSequence, Logits
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend

TEXT = [(37 * i + 11) % 300 for i in range(90)]


@pytest.fixture(params=["lean", "cuda", "generic", "gpt2", pytest.param("gpu", marks=ON_GPU)], scope="module")
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> PagedBackend:
    directory = target_of("gpt2" if request.param == "gpt2" else "qwen3")
    decoder = {"generic": "transformers", "gpt2": "auto", "gpu": "cuda"}.get(request.param, request.param)
    device = GPU_DEVICE if request.param == "gpu" else "cpu"
    backend = load_target(
        directory, device=device, dtype="float32", kv_tokens=1024, block_size=4, decoder=decoder
    )
    backend.has_device_logits = False
    return backend


@pytest.fixture(autouse=True)
def _all_blocks_return(backend: PagedBackend) -> Iterator[None]:
    yield
    backend.check_integrity()
    for table in list(backend.blocks._tables):
        backend.blocks.free(table)


def feed(backend: PagedBackend, sequence: KVSequence, token_ids: list[int], num_rows: int = 1) -> Logits:
    return backend.forward([ForwardItem(sequence, token_ids, num_rows)])


def fresh(backend: PagedBackend, token_ids: list[int], num_rows: int = 1) -> Logits:
    return feed(backend, backend.new_sequence(), token_ids, num_rows)


def assert_close(ours: Logits, reference: Logits) -> None:
    assert ours.dtype == np.float32 and ours.shape == reference.shape
    np.testing.assert_allclose(ours, reference, atol=2e-4)


def test_prefill_in_chunks_equals_prefill_at_once(backend: PagedBackend) -> None:
    whole = fresh(backend, TEXT, len(TEXT))
    sequence = backend.new_sequence()
    assert feed(backend, sequence, TEXT[:7], 0).shape == (0, backend.vocab_size)
    rest = [feed(backend, sequence, TEXT[7:72], 65), feed(backend, sequence, TEXT[72:], 18)]
    assert_close(np.concatenate(rest), whole[7:])


def test_only_the_last_rows_asked_for_come_back_in_item_order(backend: PagedBackend) -> None:
    first, second, third = (backend.new_sequence() for _ in range(3))
    rows = backend.forward(
        [ForwardItem(first, TEXT[:9], 2), ForwardItem(second, TEXT[:5], 0), ForwardItem(third, TEXT[3:8], 5)]
    )
    assert_close(rows[:2], fresh(backend, TEXT[:9], 2))
    assert_close(rows[2:], fresh(backend, TEXT[3:8], 5))


def test_truncate_and_refeed_equals_a_fresh_sequence(backend: PagedBackend) -> None:
    sequence = backend.new_sequence()
    feed(backend, sequence, TEXT[:30])
    feed(backend, sequence, [1, 2, 3, 4, 5])
    for length in (30, 17, 16, 3):
        backend.truncate(sequence, length)
        assert sequence.length == length
        assert_close(feed(backend, sequence, TEXT[length:40], 1), fresh(backend, TEXT[:40]))


def test_sequences_that_share_a_block_never_disturb_each_other(backend: PagedBackend) -> None:
    origin = backend.new_sequence()
    feed(backend, origin, TEXT[:18])
    twin = twin_of(backend, origin, TEXT[:18])
    rows = backend.forward([ForwardItem(origin, [5, 6, 7], 1), ForwardItem(twin, [8, 9], 1)])
    assert_close(rows[:1], fresh(backend, [*TEXT[:18], 5, 6, 7]))
    assert_close(rows[1:], fresh(backend, [*TEXT[:18], 8, 9]))
    backend.close(origin)
    assert_close(feed(backend, twin, [4]), fresh(backend, [*TEXT[:18], 8, 9, 4]))


def test_a_sequence_scattered_over_the_pool_is_gathered(backend: PagedBackend) -> None:
    sequences = [backend.new_sequence() for _ in range(100)]
    for start in range(0, 12, 4):
        backend.forward([ForwardItem(s, TEXT[start : start + 4], 0) for s in sequences[:80]])
    scattered = [s for s in sequences[:80] if not s.table.is_contiguous]
    assert scattered, "the pool is too roomy for this test"
    rows = backend.forward([ForwardItem(scattered[0], [7, 8], 2), ForwardItem(sequences[90], TEXT[:3], 1)])
    assert_close(rows[:2], fresh(backend, [*TEXT[:12], 7, 8], 2))
    assert_close(feed(backend, scattered[0], [9]), fresh(backend, [*TEXT[:12], 7, 8, 9]))


def test_an_exhausted_pool_is_reported_and_nothing_changes(backend: PagedBackend) -> None:
    full = backend.new_sequence()
    feed(backend, full, [1] * 400, 0)
    others = [backend.new_sequence(), backend.new_sequence()]
    feed(backend, others[0], TEXT[:10])
    free, counters = backend.num_free_tokens, (backend.num_forwards, backend.num_query_rows)
    with pytest.raises(KVExhausted, match="KV blocks needed"):
        backend.forward(
            [
                ForwardItem(others[0], [3], 1),
                ForwardItem(others[1], [1] * 500, 0),
                ForwardItem(backend.new_sequence(), [1] * 200, 0),
            ]
        )
    assert [s.length for s in others] == [10, 0]
    assert (backend.num_free_tokens, backend.num_forwards, backend.num_query_rows) == (free, *counters)
    assert_close(feed(backend, others[0], [3]), fresh(backend, [*TEXT[:10], 3]))


def test_a_forward_that_breaks_leaves_lengths_as_they_were(backend: PagedBackend) -> None:
    if backend.device != "cpu":
        pytest.skip("an id out of range ends the CUDA context of the whole process")
    sequence = backend.new_sequence()
    feed(backend, sequence, TEXT[:10])
    with pytest.raises(IndexError):
        feed(backend, sequence, [backend.vocab_size + 5])
    assert sequence.length == 10
    assert_close(feed(backend, sequence, [3]), fresh(backend, [*TEXT[:10], 3]))


def test_closing_returns_every_block(backend: PagedBackend) -> None:
    before = backend.num_free_tokens
    sequence = backend.new_sequence()
    feed(backend, sequence, TEXT)
    backend.close(sequence)
    backend.close(sequence)
    assert backend.num_free_tokens == before


def test_a_sequence_cannot_appear_twice_nor_pass_the_context(backend: PagedBackend) -> None:
    sequence = backend.new_sequence()
    with pytest.raises(AssertionError, match="twice"):
        backend.forward([ForwardItem(sequence, [1], 1), ForwardItem(sequence, [2], 1)])
    with pytest.raises(AssertionError, match="context"):
        feed(backend, sequence, [1] * (backend.max_context + 1))
