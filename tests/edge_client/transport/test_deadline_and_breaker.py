"""The pure parts, in virtual time."""

from __future__ import annotations

import pytest

from outrider.common.types import Origin
from outrider.edge_client.core.stats import RoundRecord, SessionStats, acceptance_per_position
from outrider.edge_client.transport.breaker import BreakerState, CircuitBreaker
from outrider.edge_client.transport.deadline import RoundDeadline


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_deadline_is_at_least_400_ms() -> None:
    deadline = RoundDeadline()
    assert deadline.seconds == 0.4
    for _ in range(20):
        deadline.observe(0.05)
    assert deadline.seconds == 0.4


def test_the_deadline_is_twice_the_95th_percentile_of_recent_rounds() -> None:
    deadline = RoundDeadline()
    for i in range(100):
        deadline.observe(0.3 if i % 10 else 0.9)
    assert deadline.seconds == pytest.approx(1.8)
    for _ in range(64):  # the window has forgotten the slow ones
        deadline.observe(0.3)
    assert deadline.seconds == pytest.approx(0.6)


def test_before_the_first_round_the_deadline_goes_by_what_is_expected_of_the_link() -> None:
    deadline = RoundDeadline()
    deadline.expect(0.6)  # a satellite's round trip
    assert deadline.seconds == pytest.approx(1.2)
    deadline.observe(0.1)
    assert deadline.seconds == 0.4


def test_the_users_own_deadline_replaces_the_rule() -> None:
    deadline = RoundDeadline(0.05)
    deadline.observe(10.0)
    assert deadline.seconds == 0.05


def test_an_answer_is_waited_for_so_that_a_token_of_ones_own_is_out_by_the_deadline() -> None:
    deadline = RoundDeadline()
    deadline.observe_out(0.003)
    assert deadline.patience_s(0.02) == pytest.approx(0.4 - 0.02 - 0.003)
    assert deadline.patience_s(5.0) == pytest.approx(0.35)  # a draft that was far longer than any before
    for _ in range(200):
        deadline.observe_out(0.001)
    assert deadline.patience_s(0.0) == pytest.approx(0.4 - 0.001)


def test_the_breaker_opens_on_a_failure_half_opens_on_a_probe_and_closes_on_an_answer() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.record_connected()
    assert breaker.state is BreakerState.CLOSED
    breaker.record_failure()
    assert breaker.state is BreakerState.OPEN
    breaker.record_connected()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record_failure()
    assert breaker.state is BreakerState.OPEN and breaker.num_opened == 1
    breaker.record_answer()
    assert breaker.is_closed


def test_probes_start_an_interval_apart_and_the_first_at_once() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, attempt_interval_s=0.2)
    assert breaker.attempt_due_in_s == 0.0
    breaker.record_attempt()
    clock.now_s += 0.15
    assert breaker.attempt_due_in_s == pytest.approx(0.05)
    clock.now_s += 0.15
    assert breaker.attempt_due_in_s == 0.0


def test_acceptance_per_position_counts_only_rounds_that_drafted_so_far() -> None:
    rounds = [RoundRecord(1, 3, 2), RoundRecord(2, 1, 1), RoundRecord(3, 3, 0)]
    assert acceptance_per_position(rounds) == [0.6667, 0.5, 0.0]


def test_a_summary_of_nothing_has_no_figures_and_no_division_by_zero() -> None:
    summary = SessionStats().summary(())
    assert summary["num_rounds"] == 0 and summary["acceptance_rate"] is None and summary["ttft_ms"] is None


def test_times_to_first_token_and_per_token() -> None:
    stats = SessionStats(start_ns=1_000_000, token_times_ns=[11_000_000, 13_000_000, 19_000_000])
    summary = stats.summary((Origin.TARGET, Origin.FALLBACK, Origin.EDGE_ONLY))
    assert (summary["ttft_ms"], summary["tpot_ms"], summary["total_ms"]) == (10.0, 4.0, 18.0)
    assert summary["tokens_per_s"] == 250.0
    assert (summary["num_fallback_tokens"], summary["num_edge_only_tokens"]) == (1, 1)
