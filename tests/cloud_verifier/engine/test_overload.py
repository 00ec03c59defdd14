"""The engine under more than it can serve: refusals, deadlines, tenants, limits. In virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import pytest
from support.fakes import FakeBackend
from test_engine import GREEDY, Clock, Harness

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.admission import MAX_WAITING
from outrider.cloud_verifier.engine.backlog import Refusal
from outrider.cloud_verifier.engine.job import REPORT_S, Job
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.common.types import (
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

STEP_S, TOKEN_S = 0.006, 0.0002


class SlowBackend(FakeBackend):
    """Forwards take virtual time, like a target on a CPU."""

    clock: Clock

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        self.clock.now_s += STEP_S + TOKEN_S * sum(len(item.token_ids) for item in items)
        return super().forward(items)


def make_harness(num_sessions: int = 60, **options: object) -> tuple[Harness, list[tuple[bytes, Opened]]]:
    """An engine that has opened sessions and knows what its steps cost."""
    harness = Harness(SlowBackend(), max_sessions=200, **options)  # type: ignore[arg-type]
    harness.backend.clock = harness.clock  # type: ignore[attr-defined]
    opened = [
        harness.open(name, prompt=[1 + name % 30, *range(1, 2 + name % 8)]) for name in range(num_sessions)
    ]
    for session_id, one in opened[:2]:
        harness.ask(session_id, VerifyRequest(1, one.position, one.hash, draft_tokens=(9,) * 9))
    return harness, opened[2:]


def flood(
    harness: Harness, opened: Sequence[tuple[bytes, Opened]], **fields: object
) -> list[list[SessionResponse]]:
    replies = []
    for session_id, one in opened:
        request = VerifyRequest(1, one.position, one.hash, draft_tokens=(9,) * 9, **fields)  # type: ignore[arg-type]
        replies.append(harness.submit(session_id, request))
    return replies


def refusals(replies: Sequence[list[SessionResponse]]) -> list[RoundError]:
    errors = [reply for (reply,) in replies if isinstance(reply, RoundError)]
    assert all(error.code is RoundErrorCode.REFUSED and error.retry_after_ms > 0 for error in errors)
    return errors


def test_what_cannot_be_served_in_time_is_refused_with_a_hint_and_everything_is_answered() -> None:
    harness, opened = make_harness(queue_limits=QueueLimits(max_queue_ms=40.0))
    replies = flood(harness, opened)
    harness.settle()
    refused = refusals(replies)
    assert 10 <= len(replies) - len(refused) <= 30, "40 ms are about 200 tokens, 10 a round"
    waits_s = [r.metrics.total_ns for (r,) in replies if isinstance(r, Verdict)]
    assert len(waits_s) + len(refused) == len(opened)


def test_a_refused_round_is_answered_when_it_comes_again_as_it_was() -> None:
    harness, opened = make_harness(queue_limits=QueueLimits(max_queue_ms=20.0))
    replies = flood(harness, opened)
    harness.settle()
    session_id, one = next(o for o, (r,) in zip(opened, replies, strict=True) if isinstance(r, RoundError))
    error = next(r for (r,) in replies if isinstance(r, RoundError))
    again = VerifyRequest(1, one.position, one.hash, draft_tokens=(9,) * 9)
    harness.clock.now_s += error.retry_after_ms / 1000.0
    assert isinstance(harness.ask(session_id, again), Verdict)


def test_a_replay_is_answered_however_much_waits() -> None:
    harness, opened = make_harness(queue_limits=QueueLimits(max_queue_ms=0.0))
    session_id, one = opened[0]
    request = VerifyRequest(1, one.position, one.hash, draft_tokens=(9,))
    verdict = harness.ask(session_id, request)
    flood(harness, opened[1:])
    replies = harness.submit(session_id, request)
    harness.settle()
    assert isinstance(verdict, Verdict) and replies == [verdict]


def test_a_round_whose_deadline_passed_while_it_waited_is_dropped_before_the_forward() -> None:
    harness, opened = make_harness()
    (session_id, one), (other_id, other) = opened[:2]
    late = VerifyRequest(1, one.position, one.hash, (4, 4), draft_tokens=(9,), deadline_ms=30)
    num_forwards = harness.backend.num_forwards
    replies = harness.submit(session_id, late)
    in_time = harness.submit(other_id, VerifyRequest(1, other.position, other.hash, deadline_ms=500))
    harness.clock.now_s += 0.1
    harness.settle()
    (refused,) = refusals([replies])
    assert (refused.position, refused.hash) == (one.position, one.hash)
    assert isinstance(in_time[-1], Verdict)
    assert harness.backend.num_forwards == num_forwards + 1 and harness.backend.batches[-1] == [1]
    assert isinstance(harness.ask(session_id, late), Verdict)


def test_a_round_that_catches_up_is_never_dropped_for_its_deadline() -> None:
    harness = Harness(FakeBackend(max_context=600))
    session_id, opened = harness.open()
    kept = tuple(i % 31 + 1 for i in range(100))
    replies = harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash, kept, deadline_ms=1))
    harness.clock.now_s += 10.0
    harness.settle()
    assert isinstance(replies[-1], Verdict)


def test_a_flood_of_one_tenant_neither_refuses_nor_delays_the_round_of_another() -> None:
    harness, opened = make_harness(max_step_tokens=64, queue_limits=QueueLimits(max_queue_ms=60.0))
    own_id, own = harness.open(200, tenant="quiet")
    assert refusals_of_flood(harness, opened) > 0
    verdict = harness.submit(own_id, VerifyRequest(1, own.position, own.hash, draft_tokens=(9,)), "quiet")
    harness.engine.step()
    assert isinstance(verdict[0], Verdict), "served in the very next step"


def refusals_of_flood(harness: Harness, opened: Sequence[tuple[bytes, Opened]]) -> int:
    replies = flood(harness, opened)
    harness.engine.step()
    return len(refusals([reply for reply in replies if reply]))


def test_one_session_cannot_pile_up_requests_without_bound() -> None:
    harness, opened = make_harness()
    session_id, one = opened[0]
    replies = [
        harness.submit(session_id, VerifyRequest(round_id, one.position, one.hash))
        for round_id in range(1, MAX_WAITING + 4)
    ]
    harness.settle()
    assert len(refusals([r for r in replies if "wait already" in getattr(r[0], "message", "")])) == 2
    assert all(len(reply) == 1 for reply in replies)


def test_a_tenant_at_its_limit_loses_its_own_oldest_session_and_nobody_elses() -> None:
    harness = Harness(tenant_max_sessions=2)
    other_id, other = harness.open(9, tenant="other")
    ids = [harness.open(name)[0] for name in (1, 2, 3)]
    known = [is_known(harness, session_id) for session_id in ids]
    assert known == [False, True, True]
    round_ = VerifyRequest(1, other.position, other.hash)
    assert isinstance(harness.ask(other_id, round_, "other"), Verdict)


def test_a_full_store_makes_room_at_the_tenant_that_has_most() -> None:
    harness = Harness(max_sessions=4)
    only_id, only = harness.open(9, tenant="small")  # the least recently used of all
    ids = [harness.open(name, tenant="big")[0] for name in (1, 2, 3)]
    harness.open(10, tenant="third")
    round_ = VerifyRequest(1, only.position, only.hash)
    assert isinstance(harness.ask(only_id, round_, "small"), Verdict)
    assert [is_known(harness, session_id, "big") for session_id in ids] == [False, True, True]


def is_known(harness: Harness, session_id: bytes, tenant: str = "default") -> bool:
    error = harness.ask(session_id, VerifyRequest(1, 0, 0), tenant)
    assert isinstance(error, RoundError)
    return error.code is not RoundErrorCode.UNKNOWN_SESSION


def test_a_tenant_whose_sessions_are_all_busy_is_refused_by_name_of_the_limit() -> None:
    harness = Harness(tenant_max_sessions=1)
    session_id, opened = harness.open(ignore_eos=True)
    harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=30))
    harness.engine.step()
    opening = harness.submit(b"n" * 16, OpenRequest(b"n" * 16, (5,), 1, GREEDY))
    harness.engine.step()
    (error,) = refusals([opening])
    assert "all 1 sessions of this tenant" in error.message


def open_with_stop_ids(
    harness: Harness, name: int, num_ids: int, tenant: str = "default", position: int = 1
) -> RoundError | Opened:
    """A stop id counts as two."""
    request = OpenRequest(
        bytes([name]) * 16, (5,) * position, 1, GREEDY, stop_token_ids=(0,) * num_ids, ignore_eos=True
    )
    answer = harness.ask(request.session_id, request, tenant)
    assert isinstance(answer, RoundError | Opened)
    return answer


def test_what_all_sessions_of_a_tenant_keep_to_sample_with_is_bounded() -> None:
    harness = Harness(tenant_max_sampling_ids=100)
    for tenant in ("default", "other"):
        for name in (1, 2, 3):
            assert isinstance(open_with_stop_ids(harness, name, 20, tenant), Opened)
    assert [is_known(harness, bytes([name]) * 16) for name in (1, 2, 3)] == [False, True, True]
    assert isinstance(open_with_stop_ids(harness, 4, 0), Opened), "it keeps none"
    assert [is_known(harness, bytes([name]) * 16) for name in (2, 3, 4)] == [True, True, True]
    # Another opening of a session counts in place of its first one.
    assert isinstance(open_with_stop_ids(harness, 3, 30, position=2), Opened)
    assert [is_known(harness, bytes([name]) * 16) for name in (2, 3, 4)] == [True, True, True]
    assert isinstance(open_with_stop_ids(harness, 3, 31, position=3), Opened)
    assert [is_known(harness, bytes([name]) * 16) for name in (2, 3, 4)] == [False, True, True]
    assert isinstance(open_with_stop_ids(harness, 3, 500, position=4), Opened), "one opening always fits"
    assert [is_known(harness, bytes([name]) * 16, "other") for name in (1, 2, 3)] == [False, True, True]
    for name in (3, 4):
        harness.ask(bytes([name]) * 16, CloseRequest(bytes([name]) * 16))
    assert isinstance(open_with_stop_ids(harness, 5, 50), Opened), "closed sessions keep nothing"


def test_busy_sessions_do_not_give_way_to_an_openings_stop_ids() -> None:
    harness = Harness(tenant_max_sampling_ids=100)
    opened = open_with_stop_ids(harness, 1, 40)
    assert isinstance(opened, Opened)
    harness.submit(bytes([1]) * 16, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=30))
    harness.engine.step()
    opening = OpenRequest(bytes([2]) * 16, (5,), 1, GREEDY, stop_token_ids=(7,) * 11)
    replies = harness.submit(bytes([2]) * 16, opening)
    harness.engine.step()
    (error,) = refusals([replies])
    assert "80 of 100 sampling ids of this tenant (--tenant-max-sampling-ids) are busy" in error.message


def test_sessions_that_are_gone_are_not_awaited() -> None:
    """Beside a generation no step waits, so nothing else would forget them."""
    harness = Harness(session_idle_ttl_ms=5000)
    for name in range(1, 6):
        session_id, opened = harness.open(name)
        for round_id in (1, 2, 3):
            harness.clock.now_s += 0.01
            verdict = harness.ask(session_id, VerifyRequest(round_id, opened.position, opened.hash))
            assert isinstance(verdict, Verdict)
            opened = verdict
    gathering = harness.engine._gathering
    assert len(gathering._expected_s) == 5
    harness.pass_time(20.0)
    assert not harness.engine.sessions and not gathering._expected_s


def test_a_session_is_silent_only_from_the_end_of_its_last_work() -> None:
    harness = Harness(session_idle_ttl_ms=5000)
    session_id, opened = harness.open(ignore_eos=True)
    replies = harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=20))
    while not (isinstance(replies[-1:], list) and replies and getattr(replies[-1], "is_last", False)):
        harness.clock.now_s += 1.0
        harness.engine.step()
    harness.clock.now_s += 3.0
    harness.engine.step()
    last = replies[-1]
    assert isinstance(last, GeneratedTokens)
    assert isinstance(harness.ask(session_id, VerifyRequest(2, last.position, last.hash)), Verdict)


@pytest.mark.parametrize("is_over_own_bound", [False, True])
def test_a_session_that_is_refused_before_the_engine_has_its_request_is_in_use(
    is_over_own_bound: bool,
) -> None:
    harness = Harness(session_idle_ttl_ms=3000, queue_limits=QueueLimits(max_queue_ms=0.0))
    session_id, opened = harness.open()
    idle_id, _ = harness.open(2, prompt=(7, 8))
    backlog = harness.engine.backlog
    backlog.observe(5, 2.0)
    for _ in range(10):
        backlog.enter_round(DEFAULT_TENANT, 50)  # of another session
        if is_over_own_bound:
            backlog.note_refused(DEFAULT_TENANT, session_id)
        else:
            refusal = backlog.enter_round(DEFAULT_TENANT, 5, session_id=session_id)
            assert isinstance(refusal, Refusal) and refusal.retry_after_ms <= 1500, "half of what ends it"
        harness.clock.now_s += 1.5
        harness.engine.step()
    assert isinstance(harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash)), Verdict)
    assert harness.engine.sessions.get(DEFAULT_TENANT, idle_id) is None


def test_a_session_whose_round_waits_to_be_admitted_does_not_expire() -> None:
    harness = Harness(max_sessions=100, session_idle_ttl_ms=3000)
    session_id, opened = harness.open()
    submit_openings(harness, range(10, 20))
    replies = harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash))
    admit = harness.engine.admission.admit

    def slow(job: Job) -> object:
        harness.clock.now_s += 1.0  # one a step
        return admit(job)

    harness.engine.admission.admit = slow  # type: ignore[assignment, method-assign]
    harness.settle()
    assert isinstance(replies[0], Verdict)


def test_a_session_whose_round_waits_to_be_admitted_does_not_make_room_for_an_opening() -> None:
    harness = Harness(max_sessions=2)
    known = [harness.open(name) for name in (1, 2)]
    opening = submit_openings(harness, [3])
    rounds = [
        harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash))
        for session_id, opened in known
    ]
    harness.settle()
    assert all(isinstance(each[0], Verdict) for each in rounds)
    assert "all 2 sessions" in refusals(opening)[0].message


def submit_openings(harness: Harness, names: Iterable[int]) -> list[list[SessionResponse]]:
    ids = [bytes([name]) * 16 for name in names]
    return [harness.submit(each, OpenRequest(each, (5, 6), 2, GREEDY)) for each in ids]


def test_openings_that_wait_for_their_turn_hear_so_at_once_and_again() -> None:
    harness = Harness(SlowBackend(), max_sessions=100, max_step_tokens=8)
    harness.backend.clock = harness.clock  # type: ignore[attr-defined]
    ids = [bytes([name]) * 16 for name in range(10, 14)]
    replies = [harness.submit(each, OpenRequest(each, (5,) * 8, 8, GREEDY, round_id=3)) for each in ids]
    waits = Progress(3, 0, 8)
    harness.engine.step()
    assert [type(each[-1]) for each in replies] == [Opened, Progress, Progress, Progress]
    harness.engine.step()
    assert replies[2:] == [[waits], [waits]]
    harness.clock.now_s += REPORT_S
    harness.engine.step()
    assert replies[3] == [waits, waits]


def test_an_opening_that_waits_for_its_own_sessions_round_hears_so() -> None:
    harness = Harness(FakeBackend(max_context=600), max_step_tokens=8)
    session_id, opened = harness.open()
    kept = tuple(i % 31 + 1 for i in range(100))
    harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash, kept))
    harness.engine.step()
    again = harness.submit(session_id, OpenRequest(session_id, (1, 2), 2, GREEDY, round_id=2))
    harness.engine.step()
    assert again == [Progress(2, 0, 2)]
    harness.settle()
    assert isinstance(again[-1], Opened)


def test_sessions_do_not_expire_for_a_time_in_which_the_process_was_stopped() -> None:
    harness = Harness(session_idle_ttl_ms=10_000)
    session_id, opened = harness.open()
    harness.pass_time(8.0)
    harness.clock.now_s += 3600.0
    harness.engine.step()  # before the messages in sockets are read
    verdict = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash))
    assert isinstance(verdict, Verdict)
    harness.pass_time(9.0)
    assert len(harness.engine.sessions) == 1
    harness.pass_time(3.0)
    assert len(harness.engine.sessions) == 0


@pytest.mark.parametrize("request_", [CloseRequest(), OpenRequest(bytes([5]) * 16, (1, 2), 2, GREEDY)])
def test_closing_and_opening_again_are_never_refused(request_: SessionRequest) -> None:
    harness, opened = make_harness(queue_limits=QueueLimits(max_queue_ms=0.0))
    flood(harness, opened[10:])
    replies = harness.submit(bytes([5]) * 16, request_)
    harness.settle()
    assert not isinstance(replies[-1], RoundError)
    assert dataclasses.is_dataclass(replies[-1])


def test_a_thousand_sessions_that_expire_together_do_not_hold_up_a_step() -> None:
    harness = Harness(max_sessions=1100, session_idle_ttl_ms=10_000)
    for number in range(1000):
        session_id = number.to_bytes(16, "little")
        harness.submit(session_id, OpenRequest(session_id, (1, 2), 2, GREEDY))
    harness.settle()
    harness.pass_time(10.0)
    harness.clock.now_s += 0.5
    session_id, opened = harness.open(prompt=(7, 8))
    most = 0
    for _ in range(200):
        harness.clock.now_s += 0.01
        num_before = len(harness.engine.sessions)
        harness.engine.step()
        most = max(most, num_before - len(harness.engine.sessions))
    assert len(harness.engine.sessions) == 1 and len(harness.backend.sequences) == 1
    assert most <= 8
    assert isinstance(harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash)), Verdict)
