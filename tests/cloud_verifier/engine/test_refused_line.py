"""Rounds that were refused keep their place: first come, first served, and about one refusal for each round."""

from __future__ import annotations

import random
from collections import Counter

from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.backlog import Backlog, Refusal
from outrider.cloud_verifier.engine.line import _LATE_S, MAX_PLACES, RefusedLine
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.parts.edges import RequestLog
from outrider.experiments.simulator.run import play


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def key(number: int, tenant: str = "a") -> tuple[str, bytes]:
    return tenant, bytes([number])


def test_a_place_is_kept_until_its_round_is_let_in_and_those_before_it_leave() -> None:
    line = RefusedLine(Clock())
    for number, num_tokens in enumerate((5, 7, 9)):
        line.join(key(number), num_tokens, retry_ms=100)
    line.join(key(0), 5, retry_ms=100)  # refused again: no second place
    assert [line.before(key(number))[0] for number in range(4)] == [0, 5, 12, 21]
    line.leave(key(0))
    assert [line.before(key(number))[0] for number in range(1, 4)] == [0, 7, 16]
    for number in (2, 1):
        line.leave(key(number))
    assert line.before(key(4)) == (0, 0) and not line._own_joined and not line._own_left


def test_a_session_that_does_not_come_again_loses_its_place() -> None:
    clock = Clock()
    line = RefusedLine(clock)
    line.join(key(0), 50, retry_ms=100)
    clock.now_s += 0.1 + _LATE_S - 0.01
    assert line.before(key(1)) == (50, 50)
    clock.now_s += 0.02
    assert line.before(key(1)) == (0, 0)


def test_tenants_are_counted_apart_and_places_are_bounded() -> None:
    line = RefusedLine(Clock())
    line.join(key(0, "loud"), 50, retry_ms=100)
    line.join(key(1, "quiet"), 5, retry_ms=100)
    assert line.before(key(2, "quiet")) == (55, 5) and line.before(key(1, "quiet")) == (50, 0)
    for number in range(2 * MAX_PLACES):
        line.join(("loud", number.to_bytes(4, "big")), 1, retry_ms=100)
    assert line.before(key(3, "quiet"))[0] == 55 + MAX_PLACES - 2


def test_a_new_round_does_not_pass_those_refused_before_it_and_its_hint_is_later() -> None:
    clock = Clock()
    backlog = Backlog(QueueLimits(max_queue_ms=100.0), 512, 32, clock)
    for num_tokens in (5, 100):
        backlog.observe(num_tokens, 0.03 + 0.0005 * num_tokens)
    number, hints = 0, []
    while len(hints) < 20:
        number += 1
        admitted = backlog.enter_round("a", 5, session_id=bytes([number]))
        if isinstance(admitted, Refusal):
            hints.append(admitted.retry_after_ms)
    assert hints == sorted(hints) and hints[-1] > hints[0] + 60, "20 rounds of 5 tokens, 0.65 ms a token"
    backlog.take_arrived()
    backlog.hold({"a": 195}, {})  # one of them was answered
    assert isinstance(backlog.enter_round("a", 5, session_id=b"new"), Refusal)
    assert not isinstance(backlog.enter_round("a", 5, session_id=bytes([number - 19])), Refusal)
    backlog.hold({}, {})
    assert not isinstance(backlog.enter_round("a", 5, session_id=b"new"), Refusal), "nobody waits"
    backlog.take_arrived()
    backlog.hold({"a": 100}, {})
    assert not isinstance(backlog.enter_round("a", 5, session_id=b"other"), Refusal), (
        "half is for whoever comes"
    )
    backlog.hold({"a": 120}, {})
    assert isinstance(backlog.enter_round("a", 5, session_id=b"newer"), Refusal), "19 of those refused do"
    for each in range(number - 18, number + 1):
        backlog.leave_line("a", bytes([each]))
    assert not isinstance(backlog.enter_round("a", 5, session_id=b"newest"), Refusal), (
        "their clients are gone"
    )


def test_ten_times_the_sessions_are_served_evenly_and_soon_with_few_refusals() -> None:
    """In virtual time, with the product's own edges: 20 sessions give the peak of 125 rounds a second."""
    warmup_s, seconds, logs = 18.0, 8.0, list[RequestLog]()
    system = {
        "times": "none",
        "seconds": warmup_s + seconds,
        "edges": [
            {
                "count": 200,
                "draft": {"token_ms": 2.0},
                "acceptance": 0.8,
                "link": "lan",
                "prompt_tokens": 32,
                "output_tokens": 100_000,
                "start_within_s": 2.0,
                "edge": {
                    "on_timeout": "wait",
                    "ignore_eos": True,
                    "max_new_tokens": 100_000,
                    "mode": "speculative",
                    "pipeline": "off",
                    "num_speculative_tokens": 4,
                },
            }
        ],
        "verifiers": [{"times": {"step_ms": 30.0, "token_ms": 1.0, "receive_ms": 0.4, "send_ms": 0.4}}],
    }
    played = play(load_system(system), on_request=logs.append)
    assert not Counter(log.error for log in logs if log.error), "none gave up"
    served = [sum(warmup_s <= at_s for at_s, _ in log.commits) for log in logs]
    assert len(served) == 200 and min(served) >= max(served) - 2 and min(served) >= 3
    assert sum(served) / seconds >= 0.9 * 125
    num_rounds = played.verifiers[0].num_rounds
    assert sum(played.verifiers[0].num_refused.values()) < 5 * num_rounds, "13 without places"


def test_those_who_were_refused_and_stay_away_cost_little_of_the_capacity() -> None:
    """Every round is of a session of its own, at 1.3 times what the steps can take; nobody comes again."""
    clock, chance = Clock(), random.Random(1)
    backlog = Backlog(QueueLimits(max_queue_ms=100.0), 512, 32, clock)
    waiting, next_s, num_done = 0, clock.now_s, 0
    while clock.now_s < 120.0:
        backlog.take_arrived()
        num_tokens, waiting = 5 * waiting, 0
        backlog.hold({"a": num_tokens} if num_tokens else {}, {})
        step_s = 0.009 + 0.0006 * num_tokens
        while next_s <= clock.now_s + step_s:
            admitted = backlog.enter_round("a", 5, session_id=chance.randbytes(16))
            waiting += not isinstance(admitted, Refusal)
            next_s += chance.expovariate(370)
        clock.now_s += step_s
        num_done += num_tokens // 5
        backlog.hold({}, {})
        backlog.observe(max(5, num_tokens), step_s)
    assert num_done / 20 >= 0.8 * 280, "the steps take 280 a second where the queue is full"
