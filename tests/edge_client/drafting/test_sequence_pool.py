"""The draft's memory of texts that ended: found again by prefix, bounded, and harmless."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.config.run_config import default_draft_dir
from outrider.edge_client.drafting.base import ProposesAlong
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.pool import DraftLease, SequencePool
from outrider.edge_client.drafting.union import UnionModel

TEXT = list(range(40, 100))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Iterator[OnnxDraftModel]:
    with OnnxDraftModel.open(default_draft_dir()) as opened:
        yield opened


def use(
    pool: SequencePool, token_ids: list[int], sampling: SamplingParams = GREEDY
) -> tuple[DraftLease, Draft]:
    """A session: a lease, a text, a draft, and back."""
    lease = pool.lease()
    sequence = lease.sequence(sampling, num_prompt_tokens=len(token_ids))
    sequence.commit(token_ids)
    draft = sequence.propose(4)
    sequence.check_integrity()
    sequence.close()
    pool.check_integrity()
    return lease, draft


def test_a_text_that_goes_on_finds_what_was_read(model: OnnxDraftModel) -> None:
    pool = SequencePool(model, 64 << 20)
    assert use(pool, TEXT[:50])[0].num_reused_tokens == 0
    lease, draft = use(pool, TEXT, SamplingParams(temperature=0.7, seed=9))
    assert lease.num_reused_tokens == 50 and pool.num_idle == 1
    fresh = SequencePool(model, 0)
    assert use(fresh, TEXT, SamplingParams(temperature=0.7, seed=9))[1] == draft, "its parameters are its own"
    pool.close()


def test_what_was_written_before_the_first_draft_is_no_part_of_the_prompt(model: OnnxDraftModel) -> None:
    pool = SequencePool(model, 64 << 20)
    use(pool, TEXT)
    lease = pool.lease()
    sequence = lease.sequence(GREEDY, num_prompt_tokens=40)
    sequence.commit(TEXT)  # the target wrote 20 tokens alone
    sequence.close()
    assert lease.num_reused_tokens == 40
    pool.close()


def test_proposals_in_the_place_of_known_text_pass_a_lease_and_a_union(model: OnnxDraftModel) -> None:
    plain = model.sequence(GREEDY)
    plain.commit(TEXT[:50])
    expected = plain.propose_along(TEXT[50:])
    assert len(expected) == 11
    pool = SequencePool(model, 64 << 20)
    union = UnionModel(pool.lease(), [PromptLookupModel(model.num_tokens, "")])
    for draft in (pool.lease(), union):
        sequence = draft.sequence(GREEDY, num_prompt_tokens=60)
        sequence.commit(TEXT[:50])
        assert isinstance(sequence, ProposesAlong) and sequence.propose_along(TEXT[50:]) == expected
        assert sequence.position == 60
        sequence.check_integrity()
        sequence.close()
    pool.close()


def test_a_conversation_keeps_its_memory_when_another_begins(model: OnnxDraftModel) -> None:
    pool = SequencePool(model, 64 << 20)
    use(pool, TEXT)
    other = TEXT[:10] + list(range(200, 260))
    assert use(pool, other)[0].num_reused_tokens == 0, "taking it would forget five times what it saves"
    assert pool.num_idle == 2
    assert use(pool, [*TEXT, 7])[0].num_reused_tokens == len(TEXT)
    assert use(pool, [*other, 7])[0].num_reused_tokens == len(other)
    pool.close()


def test_two_at_once_never_share_a_sequence(model: OnnxDraftModel) -> None:
    pool = SequencePool(model, 64 << 20)
    use(pool, TEXT)
    sequences = [pool.lease().sequence(GREEDY) for _ in range(2)]
    for sequence in sequences:
        sequence.commit(TEXT)
    assert pool.num_idle == 0
    assert sequences[0].propose(4).token_ids == sequences[1].propose(4).token_ids
    for sequence in sequences:
        sequence.close()
    assert pool.num_idle == 2
    pool.close()


def test_memory_is_bounded_and_the_oldest_goes_first(model: OnnxDraftModel) -> None:
    pool = SequencePool(model, 64 << 20)
    use(pool, TEXT)
    one = pool.num_idle_bytes
    small = SequencePool(model, 2 * one)
    for start in (100, 300, 500):
        use(small, list(range(start, start + 20)))
    assert small.num_idle == 2 and small.num_idle_bytes == 2 * one
    assert use(small, list(range(100, 121)))[0].num_reused_tokens == 0
    assert use(small, list(range(500, 521)))[0].num_reused_tokens == 20
    pool.close()
    small.close()


def test_an_idle_sequence_holds_its_kv_and_hardly_more(model: OnnxDraftModel) -> None:
    pool, sampling = SequencePool(model, 64 << 20), SamplingParams(temperature=0.7, seed=9)
    use(pool, TEXT)
    tracemalloc.start()
    for start in range(100, 900, 100):
        lease = pool.lease()
        sequence = lease.sequence(sampling)
        sequence.commit(range(start, start + 20))
        for _ in sequence.prepare(8):
            pass
        sequence.propose(4)
        assert isinstance(sequence, ProposesAlong) and len(sequence.propose_along(range(8))) == 9
        sequence.close()
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_idle == 9
    assert (
        held_bytes < 1.05 * 8 / 9 * pool.num_idle_bytes
    )  # one row of this vocabulary takes a fourth of the KV
    pool.close()


def test_a_strategy_without_memory_keeps_none() -> None:
    with PromptLookupModel.open(default_draft_dir()) as lookup:
        pool = SequencePool(lookup, 64 << 20)
        use(pool, TEXT)
        assert pool.num_idle == 0


def test_common_prefixes_end_at_the_first_difference_or_the_shorter_end() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([], [1], [1, 2, 4], [1, 2, 3, 4])] == [0, 1, 2, 3]
