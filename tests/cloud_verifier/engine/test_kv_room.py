"""Whose KV goes where the pool is short: tenants with more sessions than fit, whose edges draft between rounds."""

from __future__ import annotations

import numpy as np
import pytest
from support.fakes import FakeBackend
from test_engine import Harness
from test_overload import SlowBackend

from outrider.cloud_verifier.engine.scheduler import OTHERS_ABOUT_S
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

SMALL, LARGE = "small", "large"
Known = dict[bytes, Opened | Verdict]
"""The last answer of each session."""


@pytest.fixture
def harness() -> Harness:
    return Harness(FakeBackend(kv_tokens=1000, max_context=500), max_sessions=20)


def open_session(harness: Harness, known: Known, name: int, tenant: str, num_tokens: int) -> bytes:
    prompt = np.random.default_rng(name).integers(1, 31, num_tokens).tolist()
    session_id, known[session_id] = harness.open(name, prompt, tenant=tenant, ignore_eos=True)
    return session_id


def fed_by_a_round(harness: Harness, known: Known, session_id: bytes, tenant: str, round_id: int) -> int:
    """Returns how many tokens the target was fed for a round with one draft token."""
    after, num_before = known[session_id], harness.backend.num_query_rows
    round_ = VerifyRequest(round_id, after.position, after.hash, draft_tokens=(3,))
    verdict = harness.ask(session_id, round_, tenant)
    assert isinstance(verdict, Verdict), verdict
    known[session_id] = verdict
    return harness.backend.num_query_rows - num_before


def held_by(harness: Harness, tenant: str) -> int:
    return sum(session.kv_length for session in harness.engine.sessions if session.tenant == tenant)


def generate(harness: Harness, known: Known, session_id: bytes) -> list[SessionResponse]:
    after = known[session_id]
    request = GenerateRequest(1, after.position, after.hash, max_new_tokens=30)
    return harness.submit(session_id, request, LARGE)


def test_a_tenant_with_long_texts_recomputes_its_own_and_nobody_elses(harness: Harness) -> None:
    known: Known = {}
    own = open_session(harness, known, 1, SMALL, 200)
    theirs = [open_session(harness, known, 10 + number, LARGE, 300) for number in range(6)]
    fed = []
    for round_id in range(1, 5):
        for session_id in theirs:  # each was used later than the small tenant's
            assert fed_by_a_round(harness, known, session_id, LARGE, round_id) > 200
        fed.append(fed_by_a_round(harness, known, own, SMALL, round_id))
    assert fed == [2, 2, 2, 2]
    assert held_by(harness, LARGE) > 600


def test_several_works_of_the_largest_tenant_give_way_before_anothers_session_in_use(
    harness: Harness,
) -> None:
    known: Known = {}
    own = open_session(harness, known, 1, SMALL, 200)
    theirs = [open_session(harness, known, 10 + number, LARGE, 300) for number in range(4)]
    fed_by_a_round(harness, known, own, SMALL, 1)
    replies = [generate(harness, known, session_id) for session_id in theirs]
    harness.settle()
    ends = [each[-1] for each in replies]
    assert [isinstance(end, GeneratedTokens) and end.is_last for end in ends] == [True, True, False, False]
    for end in ends[2:]:
        assert isinstance(end, RoundError) and end.code is RoundErrorCode.REFUSED and end.retry_after_ms > 0
    assert fed_by_a_round(harness, known, own, SMALL, 2) == 2


def hint_beside(num_prompts: int) -> int:
    """Returns the hint of a generation that gives way while so many prompts wait."""
    backend = SlowBackend(kv_tokens=1000, max_context=500)
    harness = Harness(backend, max_sessions=20, max_step_tokens=8)
    backend.clock = harness.clock
    known: Known = {}
    theirs = [open_session(harness, known, 10 + number, LARGE, 480) for number in range(2)]
    for number in range(num_prompts):
        session_id = bytes([20 + number]) * 16
        harness.submit(session_id, OpenRequest(session_id, (9,) * 80, 80, SamplingParams()), SMALL)
    replies = [generate(harness, known, session_id) for session_id in theirs]
    harness.settle()
    (refused,) = [end for (*_, end) in replies if isinstance(end, RoundError)]
    assert refused.code is RoundErrorCode.REFUSED
    return refused.retry_after_ms


def test_the_hint_of_a_refusal_grows_with_what_waits() -> None:
    assert 50 < hint_beside(2) < hint_beside(6) / 2


def test_a_session_that_was_left_alone_gives_way_to_works_of_the_largest_tenant(harness: Harness) -> None:
    known: Known = {}
    open_session(harness, known, 1, SMALL, 200)
    theirs = [open_session(harness, known, 10 + number, LARGE, 300) for number in range(3)]
    harness.pass_time(2 * OTHERS_ABOUT_S)
    replies = [generate(harness, known, session_id) for session_id in theirs]
    harness.settle()
    assert all(isinstance(each[-1], GeneratedTokens) for each in replies)
    assert held_by(harness, SMALL) == 0


def test_the_only_work_of_the_largest_tenant_goes_on(harness: Harness) -> None:
    """Otherwise a text that does not fit beside others' would wait for as long as they are used."""
    known: Known = {}
    open_session(harness, known, 1, SMALL, 300)
    open_session(harness, known, 2, "third", 260)
    long = open_session(harness, known, 10, LARGE, 420)
    replies = generate(harness, known, long)
    harness.settle()
    end = replies[-1]
    assert isinstance(end, GeneratedTokens) and end.is_last
    assert [held_by(harness, tenant) > 0 for tenant in (SMALL, "third", LARGE)] == [False, True, True]
