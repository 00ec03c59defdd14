"""A real model behind the wire: the prefix cache and a pool too small change latency and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from support.processes.decoding import decode
from support.processes.server import serving

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.types import SamplingParams

SHARED = [(31 * i + 5) % 300 for i in range(70)]
NUM_NEW = 24


def prompt_of(index: int) -> list[int]:
    return [*SHARED, *((17 * index + 3 * i) % 300 for i in range(9))]


def sampling_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0 if index % 2 else 0.9, seed=index)


def write(address: str, index: int) -> Sequence[int]:
    return decode(address, prompt_of(index), sampling_of(index), num_new=NUM_NEW).token_ids


@pytest.fixture(scope="module")
def texts(tiny_pair) -> list[Sequence[int]]:  # type: ignore[no-untyped-def]
    """What each session gets from a verifier that has never seen anybody."""
    alone = []
    for index in range(10):
        with serving(load_target(tiny_pair.target)) as server:
            alone.append(write(f"127.0.0.1:{server.port}", index))
    return alone


def all_free(backend: PagedBackend) -> bool:
    return backend.num_free_tokens == backend.num_kv_tokens


def test_sessions_that_find_their_prefix_get_the_same_text(tiny_pair, texts) -> None:  # type: ignore[no-untyped-def]
    backend = load_target(tiny_pair.target)
    with serving(backend) as server:
        address = f"127.0.0.1:{server.port}"
        fed = []
        for index in (0, 1, 2, 0, 1):
            before = backend.num_query_rows
            assert write(address, index) == texts[index]
            fed.append(backend.num_query_rows - before)
        server.engine.check_integrity()
    assert fed[0] == len(SHARED) + 9 + NUM_NEW - 1, "the first computes all of its prompt"
    assert fed[1] == fed[2] == fed[0] - 64, "the next finds four blocks of what they share"
    assert fed[3] == fed[4] == fed[0] - 64, (
        "and one that comes again all of it but the last, partly filled block"
    )
    assert all_free(backend)


def test_ten_sessions_at_once_in_a_pool_for_three_get_the_same_texts(tiny_pair, texts) -> None:  # type: ignore[no-untyped-def]
    backend = load_target(tiny_pair.target, kv_tokens=3 * 112)
    found: dict[int, Sequence[int]] = {}
    with serving(backend) as server:
        address = f"127.0.0.1:{server.port}"

        def run(index: int) -> None:
            found[index] = write(address, index)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        server.engine.check_integrity()
    assert [found[index] for index in range(10)] == texts
    assert all_free(backend)
