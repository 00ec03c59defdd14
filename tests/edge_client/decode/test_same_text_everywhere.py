"""Cloud-only's text from every depth policy, pipelined or not, in every mode that drafts, under every fault.

The real engine in virtual time (`engine_link`). What rounds took is told by `Weather`, not by a clock: a link
that steps between 1 and 600 ms, so that policies and the choice of the mode go through all they can do, and
the same in every run.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge.engine_link import Chances, EngineLink
from support.matrices import one_of
from test_pipelined_rounds import PROMPT, decode, make_backend, reference, runs

from outrider.common.types import FinishReason, Method, SamplingParams, StopParams
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES, create_depth_policy
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES
from outrider.edge_client.controller.window import RoundWindow, create_window
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.shared.decoding import HungError, watched

FAULTS = {
    "none": Chances(),
    "lost answers": Chances(lose_answer=0.15),
    "lost connections": Chances(lose_connection=0.15),
    "duplicates": Chances(duplicate=0.5),
    "older rounds again": Chances(late_older=0.4),
    "late answers": Chances(delay_answer=0.2),
    "answers out of order": Chances(ripe=0.6, swap_answers=0.6),
    "refusals": Chances(refuse=0.2),
    "lost KV": Chances(lose_kv=0.2),
    "lost sessions": Chances(lose_session=0.05),
    "outages": Chances(outage=0.1),
    "all": Chances(0.4, 0.04, 0.04, 0.08, 0.08, 0.04, 0.04, 0.01, 0.04, 0.1, 0.02),
}
GUESSES, AUTO = "on, with guesses", "mode auto"  # the latter chooses all of it, and guesses
HANDLINGS = (*map(str, Pipelining), GUESSES, AUTO)  # of rounds, in mode speculative; or
RTTS_S, FORWARDS_S, DRAFTS_S = (0.001, 0.02, 0.06, 0.2, 0.6), (0.005, 0.03, 0.07), (0.0002, 0.002, 0.012)


class Weather:
    """What everything takes, drawn; the link steps now and then, trips jitter."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seen: tuple[RoundRecord, RoundRecord] | None = None
        self.forward_s, self.draft_s = self._random.choice(FORWARDS_S), self._random.choice(DRAFTS_S)
        self._rtt_s = self._random.choice(RTTS_S)

    def trip_s(self) -> float:
        if self._random.random() < 0.08:
            self._rtt_s = self._random.choice(RTTS_S)
        return self._rtt_s * self._random.uniform(0.7, 1.8)

    def of(self, record: RoundRecord) -> RoundRecord:
        """The record with these times, the same for everybody who is shown it."""
        if self._seen is None or self._seen[0] is not record:
            trip_ms, verifier_ms = 1e3 * self.trip_s(), 1e3 * self.forward_s * self._random.uniform(1, 1.2)
            told = replace(
                record,
                draft_ms=1e3 * self.draft_s * record.num_draft_tokens,
                rtt_ms=trip_ms + verifier_ms,
                net_ms=trip_ms,
                queue_ms=0.0,
                forward_ms=1e3 * self.forward_s,
                verifier_ms=verifier_ms,
            )
            self._seen = record, told
        return self._seen[1]


class ToldPolicy:
    """A depth policy that is shown the weather's times."""

    def __init__(self, name: str, weather: Weather) -> None:
        self._policy, self._weather = create_depth_policy(name), weather

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, record: RoundRecord) -> None:
        self._policy.observe(self._weather.of(record))


def told_window(handling: str, policy: str, weather: Weather, ways: Counter[str]) -> RoundWindow:
    """As the product makes it, but for the clock. `ways` counts what was chosen."""
    is_auto, may_branch = handling == AUTO, handling in (GUESSES, AUTO)
    pipelining = Pipelining.AUTO if is_auto else Pipelining.ON if may_branch else Pipelining(handling)
    window = create_window(pipelining, None, policy, has_stream_too=is_auto, may_branch=may_branch)
    observe, choose, choice = window.observe, window.choose, window.policy

    def choose_and_count(num_remaining: int) -> None:
        choose(num_remaining)
        ways[choice.current if choice is not None else ExecutionMode.SPECULATIVE] += 1

    window.observe = lambda record: observe(weather.of(record))  # type: ignore[method-assign]
    window.choose = choose_and_count  # type: ignore[method-assign]
    if choice is None:
        return window
    see_stream, see_shadow = choice.observe_stream, choice.observe_probe

    def see_tokens(token_s: float, *metrics: float) -> None:
        see_stream(weather.forward_s)
        choice.observe_rtt(weather.trip_s())

    def see_draft(is_accepted: bool, draft_s: float | None) -> None:
        see_shadow(is_accepted, None if draft_s is None else weather.draft_s)

    choice.conditions.observe_opening(weather.trip_s(), weather.forward_s, weather.draft_s)
    choice.observe_stream, choice.observe_probe = see_tokens, see_draft  # type: ignore[method-assign]
    return window


@dataclass
class Tally:
    """Over many texts: what happened in them."""

    num_ahead: int = 0
    num_stale: int = 0
    num_guessed: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)


def write(
    policy: str, handling: str, faults: Chances, seed: int, tally: Tally, **changes: Any
) -> tuple[SessionResult, EngineLink]:
    weather = Weather(seed)
    link = EngineLink(make_backend(), faults, seed=seed)
    result = decode(
        link,
        seed=seed,
        mode=ExecutionMode.AUTO if handling == AUTO else ExecutionMode.SPECULATIVE,
        policy=ToldPolicy(policy, weather),  # type: ignore[arg-type]
        rounds=told_window(handling, policy, weather, tally.ways),
        second=0.6 if handling in (GUESSES, AUTO) else None,
        **changes,
    )
    for session in link.engine.sessions:
        session.check_integrity()
    tally.num_ahead += sum(each.pipelined_hit is True for each in result.stats.rounds)
    tally.num_stale += result.stats.num_stale_rounds
    tally.num_guessed += result.stats.num_guessed_rounds
    tally.fired += link.fired
    return result, link


def check_same_text(policy: str, handling: str, faults: Chances, tally: Tally, **run: Any) -> None:
    result, _ = write(policy, handling, faults, tally=tally, **run)
    sampling = SamplingParams(temperature=run["temperature"], seed=run["seed"])
    assert [*PROMPT, *result.token_ids] == reference(sampling, run["stop"])
    assert result.num_unverified_tokens == 0


def run_of(number: int) -> dict[str, Any]:
    """In turns a good draft of sampled text up to its length, and a poor one of greedy text up to a token."""
    is_poor = number % 2 == 1
    stop = StopParams(50, stop_token_ids=(9,) if is_poor else (), ignore_eos=not is_poor)
    accuracy, temperature = (0.6, 0.0) if is_poor else (0.95, 0.8)
    return {"accuracy": accuracy, "temperature": temperature, "seed": number, "stop": stop}


@pytest.mark.parametrize(("policy", "handling"), one_of(2, DEPTH_POLICIES, HANDLINGS))
def test_every_policy_and_mode_writes_cloud_onlys_text_under_every_fault(policy: str, handling: str) -> None:
    turn = DEPTH_POLICIES.index(policy) + HANDLINGS.index(handling)
    for number, faults in enumerate(FAULTS.values(), start=turn):
        check_same_text(policy, handling, faults, Tally(), **run_of(number))


def test_texts_like_these_meet_every_fault_with_rounds_under_way_and_take_every_way() -> None:
    ahead, chosen = Tally(), Tally()
    for seed in range(8):
        run = run_of(2 * seed) | {"accuracy": 0.8}
        check_same_text("fixed", GUESSES, FAULTS["all"], ahead, **run)
        check_same_text("fixed", AUTO, FAULTS["all"], chosen, **run)
    assert ahead.num_ahead > 15 and ahead.num_stale > 20 and ahead.num_guessed > 20
    happened = {name for name, count in (ahead.fired + chosen.fired).items() if count}
    assert happened == {field.name for field in fields(Chances)} - {"ripe"}
    assert chosen.ways.keys() == {*CHOOSABLE_MODES}


@pytest.mark.parametrize(
    ("method", "handling"), one_of(2, [m for m in Method if m is not Method.COUPLED], HANDLINGS)
)
def test_the_other_methods_end_verified_under_all_faults(method: Method, handling: str) -> None:
    tally = Tally()
    for seed, policy in enumerate(("fixed", "optimal")):
        result, _ = write(policy, handling, FAULTS["all"], seed, tally, method=method, accuracy=0.7)
        assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == 50
        assert result.num_unverified_tokens == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    run=runs(),
    policy=st.sampled_from(DEPTH_POLICIES),
    handling=st.sampled_from(HANDLINGS),
    faults=st.sampled_from(list(FAULTS.values())),
)
def test_no_combination_of_many_leaves_a_trace(
    run: dict[str, Any], policy: str, handling: str, faults: Chances
) -> None:
    for name in ("window", "depth", "second"):  # which policy and handling say
        del run[name]
    check_same_text(policy, handling, faults, Tally(), **run)


class Stuck:
    """A session that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def cancel(self) -> None:
        self.ended.set()


def test_a_session_that_hangs_fails_and_says_where_every_thread_was() -> None:
    stuck = Stuck()
    with pytest.raises(HungError, match=r"(?s)more than 0.05 s.*test_a_session_that_hangs"):
        with watched(stuck, 0.05):
            stuck.ended.wait(60)
