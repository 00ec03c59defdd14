"""How much waits and how long it will take: what is refused, with which hint, and what never is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.backlog import MIN_RETRY_MS, AdmissionTicket, Backlog, Refusal
from outrider.common.step_time import LeastSquaresTime, SharedStepTime

BASE_S, TOKEN_S = 0.006, 0.0002


def make_backlog(limits: QueueLimits | None = None, max_step_tokens: int = 512) -> Backlog:
    """One that has seen steps of 5 to 100 tokens."""
    backlog = Backlog(limits or QueueLimits(), max_step_tokens, prefill_chunk_tokens=32)
    for num_tokens in (5, 100, 20, 64):
        backlog.observe(num_tokens, BASE_S + TOKEN_S * num_tokens)
    return backlog


def enter(backlog: Backlog, num_tokens: int = 5, tenant: str = "a", deadline_ms: int = 0) -> int:
    """The retry hint, or 0 when it was let in."""
    admitted = backlog.enter_round(tenant, num_tokens, deadline_ms)
    return admitted.retry_after_ms if isinstance(admitted, Refusal) else 0


def test_step_times_tell_the_base_from_the_tokens_once_they_saw_two_sizes() -> None:
    times = LeastSquaresTime(0.98)
    for _ in range(5):
        times.observe(5, 0.007)
    assert times.base_s == pytest.approx(0.0) and times.token_s == pytest.approx(0.0014)
    assert not times.is_sloped
    times.observe(64, 0.020)
    assert times.is_sloped
    assert times.token_s == pytest.approx(0.013 / 59, rel=0.01)
    assert times.base_s == pytest.approx(0.0059, rel=0.01)


def test_step_times_follow_a_machine_that_became_slower() -> None:
    times = LeastSquaresTime(0.98)
    for factor in (1.0, 3.0):
        for i in range(300):
            num_tokens = (5, 64, 20)[i % 3]
            times.observe(num_tokens, factor * (BASE_S + TOKEN_S * num_tokens))
    assert times.token_s == pytest.approx(3 * TOKEN_S, rel=0.05)


def shared_times(sizes: Sequence[tuple[int, int]], session_s: float = 0.0004) -> tuple[float, float, float]:
    """The parts of steps of (sessions, tokens), 5 times each."""
    times = SharedStepTime(0.98)
    for num_sessions, num_tokens in [*sizes] * 5:
        forward_s = BASE_S + TOKEN_S * num_tokens
        times.observe(num_sessions, num_tokens, forward_s + session_s * num_sessions, forward_s)
    return times.parts


def test_what_a_session_adds_to_a_step_is_told_from_what_its_tokens_do() -> None:
    streams, rounds, prompts = [(n, n) for n in (4, 8, 16)], [(n, 5 * n) for n in (2, 4, 8)], [(1, 200)]
    fixed_s, session_s, token_s = shared_times([*streams, *rounds, *prompts])
    assert (session_s, token_s) == (pytest.approx(0.0004, rel=0.1), pytest.approx(TOKEN_S, rel=0.02))
    assert fixed_s == pytest.approx(BASE_S, rel=0.02)


def test_where_all_stream_forwards_tell_a_session_from_its_token() -> None:
    fixed_s, session_s, token_s = shared_times([(n, n) for n in (4, 8, 16)])
    assert fixed_s + 12 * (session_s + token_s) == pytest.approx(BASE_S + 12 * 0.0006, rel=0.02)
    assert (session_s, token_s) == (pytest.approx(0.0004, rel=0.1), pytest.approx(TOKEN_S, rel=0.1))


def test_a_session_alone_has_the_line_of_its_tokens() -> None:
    times, line = SharedStepTime(0.98), LeastSquaresTime(0.98)
    for num_tokens, seconds in ((1, 0.006), (5, 0.0075), (40, 0.016), (3, 0.007), (200, 0.03)):
        times.observe(1, num_tokens, seconds, seconds)
        line.observe(num_tokens, seconds)
    fixed_s, session_s, token_s = times.parts
    assert (fixed_s + session_s, token_s) == (pytest.approx(line.base_s), pytest.approx(line.token_s))
    falling = SharedStepTime(0.98)
    for num_tokens in (1, 100):
        falling.observe(num_tokens, num_tokens, 1.0 / num_tokens, 0.5 / num_tokens)
    assert min(falling.parts) >= 0.0


def test_rounds_enter_until_the_wait_is_longer_than_allowed_and_again_once_they_are_answered() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=100.0))
    num_entered = 0
    while not (retry_ms := enter(backlog)):
        num_entered += 1
    assert num_entered == pytest.approx(100.0 / (5 * TOKEN_S * 1000), abs=2)
    assert 50 <= retry_ms < 100, "until half of that is free"
    assert backlog.num_refused["queue_ms"] == 1
    backlog.take_arrived()
    backlog.hold({"a": 400}, {})
    assert enter(backlog) == 0


def test_a_refusal_repeats_until_what_waits_changes_and_every_one_counts() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=100.0))
    while not enter(backlog):
        pass
    waiting = backlog.num_tokens()
    first, second = backlog.enter_round("a", 5), backlog.take_round("a", 5, 0)
    assert isinstance(first, Refusal) and first == second
    assert backlog.num_tokens() == waiting
    assert backlog.num_refused["queue_ms"] == 3, "every refusal counts, worked out anew or not"
    backlog.take_arrived()
    backlog.hold({"a": 400}, {})
    assert backlog.take_round("a", 5, 0) is None
    backlog.hold({"a": 4000}, {})
    later = backlog.enter_round("a", 5)
    assert isinstance(later, Refusal) and later.retry_after_ms > first.retry_after_ms


def test_what_the_engine_took_is_neither_forgotten_nor_counted_twice() -> None:
    backlog = make_backlog(QueueLimits(max_queue_tokens=100))
    assert enter(backlog, 60) == 0
    backlog.take_arrived()
    assert enter(backlog, 30) == 0
    assert enter(backlog, 30) > 0, "60 taken and 30 arrived"
    backlog.hold({"a": 60}, {})
    assert enter(backlog, 11) > 0 and enter(backlog, 10) == 0


def test_the_first_in_an_empty_queue_enters_whatever_the_estimates_say() -> None:
    backlog = Backlog(QueueLimits(max_queue_ms=0.0), 512, 32)
    backlog.observe(1, 60.0)
    assert enter(backlog, 5, deadline_ms=1) == 0
    assert enter(backlog, 5, deadline_ms=1) > 0


def test_a_slow_target_does_not_refuse_what_its_next_step_will_carry() -> None:
    backlog = Backlog(QueueLimits(max_queue_ms=100.0), 512, 32)
    for num_tokens in (5, 50):
        backlog.observe(num_tokens, 0.5)  # 500 ms, whatever the step
    for _ in range(60):
        assert enter(backlog) == 0


def test_a_target_slower_than_the_limit_still_serves_a_few_at_once() -> None:
    backlog = Backlog(QueueLimits(max_queue_ms=100.0), 512, 32)
    for num_tokens in (5, 10):
        backlog.observe(num_tokens, 0.1 + 0.03 * num_tokens)  # 250 ms for a round alone
    assert [enter(backlog) > 0 for _ in range(5)] == [False, False, False, False, True]


def test_a_deadline_that_cannot_be_met_is_refused_and_a_later_one_is_not() -> None:
    backlog = make_backlog()
    enter(backlog, 200)  # 40 ms, and 6 for the step
    assert enter(backlog, 5, deadline_ms=30) >= 40
    assert enter(backlog, 5, deadline_ms=60) == 0
    assert backlog.num_refused["deadline"] == 1


def test_a_sessions_own_rounds_neither_wait_for_each_other_as_for_others_nor_count_more_than_once() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=100.0))
    assert enter(backlog, 80) == 0
    for _ in range(15):  # 80 tokens each would be 240 ms of others
        assert isinstance(backlog.enter_round("a", 80, num_own_tokens=80), AdmissionTicket)
    assert backlog.num_tokens() == (80, 0)
    assert enter(backlog, 80, tenant="b") == 0, "others do not wait for the rounds after the first"


def test_a_round_behind_its_own_still_waits_for_others_no_longer_than_allowed() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=100.0))
    while not enter(backlog, 50):  # 550 tokens, 110 ms
        pass

    def is_refused(num_own_tokens: int, deadline_ms: int = 0) -> bool:
        return isinstance(backlog.enter_round("a", 5, deadline_ms, num_own_tokens=num_own_tokens), Refusal)

    assert is_refused(num_own_tokens=5) and not is_refused(num_own_tokens=200)
    assert is_refused(num_own_tokens=200, deadline_ms=30)


def test_a_flood_of_one_tenant_leaves_the_others_their_share() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=100.0))
    while not enter(backlog, tenant="loud"):
        pass
    entered = 0
    while not enter(backlog, tenant="quiet"):
        entered += 1
    assert entered == pytest.approx(50, abs=2), "half of what one alone may have waiting"
    assert enter(backlog, tenant="loud") > 0


def test_a_tenants_own_limit_refuses_it_alone() -> None:
    backlog = make_backlog(QueueLimits(tenant_max_queue_tokens=20))
    assert enter(backlog, 20) == 0 and enter(backlog, 1) >= MIN_RETRY_MS
    assert enter(backlog, 20, tenant="b") == 0
    assert backlog.num_refused["tenant_queue_tokens"] == 1


def prefills(backlog: Backlog, tenant: str, num_tokens: int, number: int) -> int:
    """Returns how many of so many prompts are let in."""
    return sum(backlog.take_prefill(tenant, num_tokens) is None for _ in range(number))


def test_prompts_of_one_tenant_do_not_close_the_queue_to_the_others() -> None:
    backlog = make_backlog(QueueLimits(max_queue_tokens=1000))
    assert prefills(backlog, "flood", 100, 20) == 10
    assert prefills(backlog, "b", 100, 20) == 5, "half of what may wait"
    assert prefills(backlog, "c", 400, 1) == 1, "whatever its first prompt's length"
    assert prefills(backlog, "flood", 1, 1) == 0


def test_however_many_tenants_come_little_more_than_twice_the_bound_waits() -> None:
    backlog = make_backlog(QueueLimits(max_queue_tokens=1000))
    assert sum(prefills(backlog, f"tenant {number}", 50, 30) for number in range(100)) == 2000 // 50


def test_prompts_are_bounded_by_tokens_and_never_in_the_way_of_rounds() -> None:
    backlog = make_backlog(QueueLimits(max_queue_ms=10.0, max_queue_tokens=3000))
    assert backlog.take_prefill("a", 5000) is None, "an empty queue takes any prompt"
    refusal = backlog.take_prefill("a", 10)
    assert refusal is not None and refusal.retry_after_ms > MIN_RETRY_MS
    assert enter(backlog) == 0
