"""Depth policies as pure functions of the rounds they were shown, and sessions that follow each of them."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edge.edge_fakes import TARGET, FakeDraft, FakeVerifier, make_session
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

from outrider.common.errors import UsageError
from outrider.common.types import GenerateRequest, SamplingParams, Signals, VerifyRequest
from outrider.edge_client.commands.cli import main
from outrider.edge_client.controller.acceptance import AcceptanceEstimator
from outrider.edge_client.controller.acceptance_posterior import ALPHAS, usual_prior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, fastest_round, tokens_per_s
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.depth.optimal import OptimalDepth
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES, create_depth_policy
from outrider.edge_client.controller.depth.stepped import RatioDepth, WindowDepth
from outrider.edge_client.controller.round_costs import EarlierCosts, RoundCosts, StepTimes
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundOutcome, RoundRecord, draft_length
from outrider.edge_client.drafting.base import ShouldStop, Stop
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.shared.acceptance_traces import signals_of

NEW = TARGET[2:]
BOUNDS = {"ratio": (3, 12), "window": (2, 8), "optimal": (1, 64)}


def answered(
    num_drafted: int,
    num_accepted: int,
    *,
    draft_ms: float = 1.0,  # a token
    net_ms: float = 50.0,
    verifier_ms: float = 10.0,
    confidence: float | None = None,
) -> RoundRecord:
    return RoundRecord(
        round_id=1,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        draft_ms=draft_ms * num_drafted,
        rtt_ms=net_ms + verifier_ms,
        net_ms=net_ms,
        verifier_ms=verifier_ms,
        confidences=() if confidence is None else (confidence,) * num_drafted,
    )


UNANSWERED = RoundRecord(0, 8, draft_ms=8.0, outcome=RoundOutcome.TIMED_OUT)


def depths(policy: DepthPolicy, rounds: list[RoundRecord]) -> list[int]:
    """Before the first round and after each."""
    found = [policy.next_depth()]
    for record in rounds:
        policy.observe(record)
        found.append(policy.next_depth())
    return found


# ------------------------------------------------------------------------------------ ratio, window


def test_ratio_goes_up_at_four_fifths_and_down_at_two_fifths_by_one() -> None:
    rounds = [
        answered(5, 4),
        answered(10, 8),
        answered(10, 7),
        answered(5, 2),
        answered(5, 3),
        answered(9, 0),
    ]
    assert depths(RatioDepth(), rounds) == [6, 7, 8, 8, 7, 7, 6]


def test_ratio_stays_between_three_and_twelve() -> None:
    assert depths(RatioDepth(), [answered(4, 4)] * 8)[-3:] == [12, 12, 12]
    assert depths(RatioDepth(), [answered(4, 0)] * 5)[-3:] == [3, 3, 3]


def test_window_steers_the_rate_of_the_last_ten_rounds() -> None:
    assert depths(WindowDepth(), [answered(4, 4)] * 5) == [4, 5, 6, 7, 8, 8]
    assert depths(WindowDepth(), [answered(4, 2)] * 4) == [4, 3, 2, 2, 2]
    assert depths(WindowDepth(), [answered(10, 7)] * 4) == [4, 4, 4, 4, 4], "0.7 is the target"
    assert depths(WindowDepth(), [answered(10, 8), answered(10, 8)]) == [4, 4, 4], "0.8 is near enough"
    policy = WindowDepth(2)
    assert depths(policy, [answered(2, 0)] * 10) == [2] * 11
    assert depths(policy, [answered(2, 2)] * 9) == [2] * 9 + [3], "the ninth good round makes it 0.9"


@pytest.mark.parametrize("name", DEPTH_POLICIES)
def test_rounds_without_an_answer_or_a_draft_change_no_length(name: str) -> None:
    policy = create_depth_policy(name)
    before = policy.next_depth()
    assert depths(policy, [UNANSWERED, answered(0, 0), UNANSWERED]) == [before] * 4


@pytest.mark.parametrize("name", sorted(BOUNDS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_policy_stays_in_its_range_whatever_it_sees(name: str, data: st.DataObject) -> None:
    policy = create_depth_policy(name)
    low, high = BOUNDS[name]
    times = st.floats(0, 1e4)
    for _ in range(data.draw(st.integers(0, 12))):
        num_drafted = data.draw(st.integers(0, 200))
        record = answered(
            num_drafted,
            data.draw(st.integers(0, num_drafted)),
            draft_ms=data.draw(times),
            net_ms=data.draw(st.floats(-5, 1e4)),
            verifier_ms=data.draw(times),
            confidence=data.draw(st.none() | st.floats(0, 1)),
        )
        policy.observe(record)
        assert low <= policy.next_depth() <= high
        if (should_stop := policy.stop_rule()) is not None:
            lengths = range(1, policy.next_depth() + 1)
            stops = [should_stop(0, signals_of(data.draw(st.floats(0, 1))), n) for n in lengths]
            assert set(stops) <= {Stop.NO, Stop.AFTER}


# ------------------------------------------------------------------------------------------ optimal


def feed(policy: DepthPolicy, alpha: float, num_rounds: int, **parts: float) -> None:
    """Rounds of which, taken together, a share alpha of the tokens judged stands."""
    carry = 0.0
    for _ in range(num_rounds):
        length = policy.next_depth()
        run, reached = 0, carry + 1.0
        while run < length and (reached := reached * alpha) > 0.5:
            run += 1
        carry = 0.1 * (run % 3)
        policy.observe(answered(length, run, **parts))


def test_optimal_starts_at_its_start_and_drafts_further_the_longer_the_trip() -> None:
    found = []
    for net_ms in (1.0, 20.0, 200.0, 600.0):
        policy = OptimalDepth()
        assert policy.next_depth() == 6 and policy.stop_rule() is None
        feed(policy, 0.9, 30, net_ms=net_ms)
        found.append(policy.next_depth())
    assert found == sorted(found) and found[0] < found[-1]


def test_optimal_drafts_one_token_where_none_stands_and_64_where_all_do() -> None:
    never, always = OptimalDepth(), OptimalDepth()
    for _ in range(30):
        never.observe(answered(never.next_depth(), 0, draft_ms=12.0))
        always.observe(answered(always.next_depth(), always.next_depth(), draft_ms=0.1))
    assert (never.next_depth(), always.next_depth()) == (1, 64)


def test_optimal_believes_a_step_of_the_link_after_four_rounds_and_an_outlier_never() -> None:
    costs = RoundCosts()
    for net_ms in (20.0,) * 7 + (900.0,) + (20.0,) * 3:
        costs.observe(answered(4, 2, net_ms=net_ms))
        assert costs.estimate()[1].rtt_s == pytest.approx(0.020)
    seen = []
    for _ in range(7):
        costs.observe(answered(4, 2, net_ms=200.0))
        seen.append(round(costs.estimate()[1].rtt_s * 1e3))
    assert seen == [20, 20, 200, 200, 200, 200, 200], "the outlier was one of the four"


def test_costs_tell_a_verifiers_fixed_time_from_what_each_token_adds() -> None:
    costs = RoundCosts()
    costs.observe(answered(5, 2, verifier_ms=12.0, draft_ms=3.0))
    models, _ = costs.estimate()
    assert models.draft_token_s == pytest.approx(0.00294), "0.3 ms are a call's own, until lengths differed"
    assert models.verify_s(5) == pytest.approx(0.012), "what was seen is what is expected"
    assert models.verify_token_s == pytest.approx(0.0006), "three tenths, until lengths differed"
    for n in (1, 8, 3, 20, 8, 5, 12):
        slow_ms = 40.0 if n == 3 else 0.0
        costs.observe(answered(n, 1, verifier_ms=30.0 + 0.5 * n + slow_ms, draft_ms=3.0))
    models, _ = costs.estimate()
    assert models.draft_token_s == pytest.approx(0.003)
    assert models.verify_token_s == pytest.approx(0.0005, rel=0.1), "one slow step is not believed"
    assert models.verify_fixed_s == pytest.approx(0.0305, rel=0.05)


def share_of_small_steps() -> float:
    """Returns in how many of 300 runs of noisy rounds, beside a right statement of the verifier, its step of one token
    is taken for less than two thirds of what it is."""
    rng, num_small = np.random.default_rng(0), 0
    for _ in range(300):
        costs = RoundCosts()
        costs.observe_rtt(0.001)
        costs.observe_draft(0.0005, 1)
        costs.observe_opening(0.05, StepTimes(0.005, 0.0003))
        for num_drafted in rng.integers(5, 9, 15).tolist():
            verifier_ms = (5.0 + 0.3 * (num_drafted + 1)) * rng.lognormal(0.0, 0.2)
            costs.observe(answered(num_drafted, 3, verifier_ms=verifier_ms))
        step_s = costs.estimate()[0].target_token_s - SETTINGS.stream_overhead_s
        num_small += step_s < 0.0053 * 2 / 3
    return num_small / 300


def test_noisy_rounds_make_no_small_step_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed down from seven tokens by a slope of their own, a step of 5 ms was taken for one of 0.9."""
    assert share_of_small_steps() < 0.02
    lighter = replace(SETTINGS, stated_weight_tokens=SETTINGS.token_share_weight_tokens)
    monkeypatch.setattr("outrider.edge_client.controller.round_costs.SETTINGS", lighter)
    assert share_of_small_steps() > 0.1, "the rounds are not noisy enough to show anything"


def observed_ms(costs: RoundCosts, verifier_ms: float, window: int, num_rounds: int = 20) -> float:
    """Shows rounds, whose slope is half a millisecond a token, and returns what a verification of 5 tokens is then
    expected to take."""
    for number in range(num_rounds):
        record = answered(4 + number % 5, 3, verifier_ms=verifier_ms + 0.5 * (number % 5))
        costs.observe(replace(record, window=window))
    return costs.estimate()[0].verify_s(4) * 1e3


def test_a_verification_that_a_draft_overlaps_does_not_tell_what_one_alone_takes() -> None:
    """As on shared processors, where pipelined rounds were verified in 24.6 ms and others in 16.0."""
    measured, stated, unknown = RoundCosts(), RoundCosts(), RoundCosts()
    assert observed_ms(measured, 16.0, window=1) == pytest.approx(16.0)
    assert observed_ms(measured, 24.6, window=3) == pytest.approx(16.0), "measured one at a time"
    stated.observe_opening(0.05, StepTimes(0.0135, 0.0005))
    assert observed_ms(stated, 24.6, window=3) == pytest.approx(16.0), "stated"
    assert observed_ms(stated, 17.0, window=1) == pytest.approx(17.0), "what was measured is nearer"
    assert observed_ms(unknown, 24.6, window=3) == pytest.approx(24.6), "all that is known"
    assert observed_ms(unknown, 16.0, window=1, num_rounds=5) == pytest.approx(16.0)
    assert observed_ms(measured, 9.0, window=3) == pytest.approx(9.0), "the verifier became faster"


def overlapped(window: int, draft_ms: float, net_ms: float, num_rounds: int = 20) -> list[RoundRecord]:
    """Returns rounds of four to eight tokens, drafted in `draft_ms` a token."""
    rounds = [answered(4 + n % 5, 3, draft_ms=draft_ms, net_ms=net_ms) for n in range(num_rounds)]
    return [replace(each, window=window) for each in rounds]


def test_drafts_and_trips_that_overlap_do_not_tell_what_they_take_alone() -> None:
    """As on two cores that edge and verifier share: 0.43 ms a token and trips of 3 ms, where 0.32 and 1.7 are alone."""
    costs, unknown = RoundCosts(), RoundCosts()
    for record in (*overlapped(1, 0.32, 1.7), *overlapped(3, 0.43, 3.0)):
        costs.observe(record)
    models, link = costs.estimate()
    assert models.draft_token_s == pytest.approx(0.00032) and link.rtt_s == pytest.approx(0.0017)
    for record in overlapped(3, 0.43, 3.0):
        unknown.observe(record)
    models, link = unknown.estimate()
    assert models.draft_token_s == pytest.approx(0.00043) and link.rtt_s == pytest.approx(0.003), (
        "all that is known"
    )
    for record in overlapped(3, 0.2, 1.0):
        costs.observe(record)
    models, link = costs.estimate()
    assert models.draft_token_s == pytest.approx(0.0002) and link.rtt_s == pytest.approx(0.001), (
        "both became faster"
    )


def test_a_link_that_became_longer_is_believed_where_every_round_overlaps() -> None:
    costs = RoundCosts()
    costs.observe_opening(0.01, StepTimes(0.0099, 0.0001))
    costs.observe_rtt(0.010)
    for record in overlapped(4, 0.32, 200.0):
        costs.observe(record)
    models, link = costs.estimate()
    assert link.rtt_s == pytest.approx(0.2 - models.verify_s(1)), (
        "an answer is late by a verification at most"
    )


@pytest.mark.parametrize(
    "is_local, opening_ms, rtt_ms",
    [(False, 1.9, 0.9), (True, 1.9, 0.5), (True, 60.0, 54.0), (True, 0.3, 0.3), (False, 60.0, 59.0)],
)
def test_an_opening_says_by_how_much_the_link_changed_since_an_earlier_text_with_rounds(
    is_local: bool, opening_ms: float, rtt_ms: float
) -> None:
    """Where trips of 0.5 ms were seen: an opening comes late by a verification of 1 ms, or on one machine by more."""
    costs = RoundCosts(is_local=is_local, earlier=EarlierCosts(rtt_s=0.0005))
    unknown = RoundCosts(is_local=is_local)
    for each in (costs, unknown):
        each.observe_opening(0.01, StepTimes(0.001, 0.0))
        each.observe_rtt(opening_ms / 1e3, is_alone=False)
    assert costs.estimate()[1].rtt_s == pytest.approx(rtt_ms / 1e3)
    if not is_local:
        assert unknown.estimate()[1].rtt_s == pytest.approx(opening_ms / 1e3), "all that is known"


def test_a_first_opening_on_one_machine_took_little_of_its_time_for_the_way() -> None:
    for opening_ms, rtt_ms in ((0.4, 0.4), (4.0, 1.0), (60.0, 54.0)):
        costs = RoundCosts(is_local=True)
        costs.observe_opening(0.01, StepTimes(0.001, 0.0))
        costs.observe_rtt(opening_ms / 1e3, is_alone=False)
        assert costs.estimate()[1].rtt_s == pytest.approx(rtt_ms / 1e3)


def test_a_drafted_token_takes_what_it_took_in_an_earlier_text_until_it_is_measured() -> None:
    costs = RoundCosts(earlier=EarlierCosts(draft_line=(0.0002, 0.001)))
    assert costs.has_draft and not RoundCosts().has_draft
    costs.observe_opening(0.01, StepTimes(0.001, 0.0))
    costs.observe_rtt(0.01)
    assert costs.estimate()[0].draft_s(4) == pytest.approx(SETTINGS.round_overhead_s + 0.0042)
    costs.observe(replace(answered(4, 3, draft_ms=1.2, net_ms=10.0), edge_ms=0.5))
    assert costs.estimate()[0].draft_s(6) == pytest.approx(0.0005 + 0.0068), "with that slope"
    for _ in range(15):
        costs.observe(replace(answered(4, 3, draft_ms=0.25, net_ms=10.0), edge_ms=0.5))
    assert costs.estimate()[0].draft_s(4) == pytest.approx(0.0005 + 0.001), "no more than measured"


def test_of_a_text_without_rounds_the_next_one_learns_what_a_stream_takes() -> None:
    earlier = EarlierCosts(0.0004, 0.0001, 0.0005, (0.0, 0.001), (0.001, 0.0001))
    costs = RoundCosts(earlier=earlier)
    costs.observe_opening(0.01, StepTimes(0.002, 0.0001))
    costs.observe_rtt(0.003)  # beside a stream
    for _ in range(30):
        costs.observe_draft(0.005, 1)
        costs.observe_target(0.0033)
    assert costs.learned() == replace(
        earlier, stream_overhead_s=pytest.approx(0.0008), stated=StepTimes(0.002, 0.0001)
    )


def test_what_the_edge_itself_takes_in_a_round_is_that_of_an_earlier_text_until_it_is_measured() -> None:
    costs = RoundCosts(earlier=EarlierCosts(round_overhead_s=0.0001))
    costs.observe_opening(0.01, StepTimes(0.001, 0.0))
    costs.observe_rtt(0.01)
    costs.observe_draft(0.0, 1)
    assert costs.estimate()[0].draft_fixed_s == pytest.approx(0.0001)
    costs.observe(replace(answered(4, 3, draft_ms=0.0, net_ms=10.0), edge_ms=0.5))
    assert costs.estimate()[0].draft_fixed_s == pytest.approx(0.0005)


def test_a_verifier_that_became_slower_is_believed_within_eight_rounds() -> None:
    costs = RoundCosts()
    for base_ms, num_rounds in ((5.0, 30), (70.0, 8)):
        for number in range(num_rounds):
            costs.observe(answered(number % 7, 1, verifier_ms=base_ms + number % 7))
    assert costs.estimate()[0].verify_s(4) == pytest.approx(0.074, rel=0.05)


def test_acceptance_by_position_goes_over_into_the_mean_where_nothing_was_tried() -> None:
    positions = AcceptanceEstimator()
    assert positions.by_position() == [pytest.approx(positions.posterior.prior_mean)] * MAX_DEPTH
    for number in range(200):  # the first always stands, the second every other time
        positions.observe_tokens(1 + number % 2, 2)
    alphas = positions.by_position()
    assert alphas[0] == pytest.approx(0.97, abs=0.02) and alphas[1] == pytest.approx(0.66, abs=0.05)
    assert all(a <= b for a, b in itertools.pairwise(alphas[1:])) and alphas[2] < 0.72
    assert alphas[-1] == pytest.approx(0.75, abs=0.02), "far behind what was tried the mean is all there is"


def test_a_copy_that_was_right_so_far_is_trusted_more_with_each_position() -> None:
    positions = AcceptanceEstimator(is_copied=True)
    luck, prior = random.Random(3), positions.posterior.start
    lengths = [accepted_in_a_row(rate, luck) for rate in luck.choices(ALPHAS, prior, k=40_000)]
    reached = [sum(length >= k for length in lengths) for k in range(9)]
    played = [after / before for before, after in itertools.pairwise(reached)]
    assert positions.by_position()[:8] == pytest.approx(played, abs=0.02)
    assert played[0] < 0.55 and played[7] > 0.8
    for _ in range(100):  # but here a third token never stands
        positions.observe_tokens(2, 5)
    assert positions.by_position()[0] > 0.9 and positions.by_position()[2] < 0.45 < played[2] - 0.2


def test_the_places_of_copies_count_from_the_last_rejection() -> None:
    positions = AcceptanceEstimator(is_copied=True)
    begin = positions.by_position()
    assert positions.by_position(5) == begin[5:] + begin[-1:] * 5
    whole, parts = AcceptanceEstimator(is_copied=True), AcceptanceEstimator(is_copied=True)
    whole.observe_tokens(7, 9)
    for num_accepted, num_drafted in ((3, 3), (3, 3), (1, 3)):
        parts.observe_tokens(num_accepted, num_drafted)
    assert parts.by_position() == pytest.approx(whole.by_position(), abs=0.02), "three rounds are one copy"
    anew, behind = parts.by_position(), parts.by_position(3)
    parts.observe_tokens(3, 3)
    assert parts.by_position() == pytest.approx(behind, abs=0.05), "the next copy goes on"
    parts.observe(replace(answered(0, 0), has_no_proposal=True))
    assert parts.by_position()[:3] == pytest.approx(anew[:3], abs=0.05) and anew[0] < behind[0] - 0.1, (
        "or ends"
    )


def test_rounds_behind_others_that_copy_are_longer() -> None:
    """They are needed only where those before them were right, and copies are right for long or not at all."""

    def lengths(is_copied: bool) -> tuple[int, int]:
        conditions = Conditions(is_copied=is_copied)
        conditions.observe_opening(0.01, 0.02, 1e-5, StepTimes(0.004, 0.0003))
        for _ in range(5):
            conditions.acceptance.observe_tokens(0, 2)
        conditions.window = 3
        policy = OptimalDepth(conditions=conditions)
        return policy.next_depth(), policy.next_depth(4)

    first, later = lengths(is_copied=True)
    assert later >= 2 * first, (first, later)
    first, later = lengths(is_copied=False)
    assert later == first, "the rate of a draft with a model is the same everywhere"


def accepted_in_a_row(rate: float, luck: random.Random) -> int:
    return next((k for k in range(MAX_DEPTH) if luck.random() >= rate), MAX_DEPTH)


@pytest.mark.parametrize("window", [1, 3])
def test_copies_begin_longer_than_drafts_that_are_as_often_right_but_not_for_long(window: int) -> None:
    """Of a first text, over 10 ms: half of the copies are wrong at once, the others go on."""

    def first_length(is_copied: bool) -> int:
        conditions = Conditions(is_copied=is_copied)
        conditions.acceptance.posterior.start_from(usual_prior(is_copied=True))
        conditions.observe_opening(0.01, 0.02, 1e-5, StepTimes(0.004, 0.0003))
        conditions.window = window
        return OptimalDepth(conditions=conditions).next_depth()

    assert first_length(is_copied=True) >= 1.5 * first_length(is_copied=False)


def test_confidence_is_calibrated_to_what_stands() -> None:
    calibration = AcceptanceEstimator()
    assert not calibration.has_confidences
    first = calibration.by_confidence()
    assert first(0.9) > first(0.5) > first(0.0) > 0.6, "sure tokens are trusted from the start"
    for number in range(400):  # sure: 19 of 20 stand; unsure: 1 of 4
        calibration.observe_confidences((0.95,), int(number % 20 > 0))
        calibration.observe_confidences((0.2,), int(number % 4 == 0))
    curve = calibration.by_confidence()
    assert calibration.has_confidences
    assert curve(0.95) == pytest.approx(0.95, abs=0.03) and curve(0.2) == pytest.approx(0.25, abs=0.1)


def test_tokens_behind_the_first_that_fell_are_not_judged() -> None:
    some, more = AcceptanceEstimator(), AcceptanceEstimator()
    some.observe_confidences((0.5, 0.5), 1)
    more.observe_confidences((0.5, 0.5, 0.9, 0.1), 1)
    assert [some.by_confidence()(x / 10) for x in range(11)] == [
        more.by_confidence()(x / 10) for x in range(11)
    ]


def test_the_stop_rule_ends_a_draft_sooner_the_less_sure_it_is() -> None:
    policy = OptimalDepth()
    for number in range(40):
        policy.observe(answered(6, 6, confidence=0.95))
        policy.observe(answered(6, number % 2, confidence=0.1))
    assert policy.next_depth() == MAX_DEPTH, "how far is told while drafting"

    def length(confidence: float) -> int:
        should_stop = policy.stop_rule()
        assert should_stop is not None
        signals = signals_of(confidence)
        lengths = range(1, MAX_DEPTH + 1)
        return next(n for n in lengths if should_stop(0, signals, n) is Stop.AFTER)

    lengths = [length(confidence) for confidence in (0.05, 0.2, 0.5, 0.95)]
    assert lengths == sorted(lengths) and lengths[0] <= 2 and lengths[-1] >= 12


@given(
    st.floats(0, 0.99) | st.lists(st.floats(0, 1), min_size=1, max_size=64),
    st.floats(1e-4, 1),
    st.floats(1e-5, 0.1),
)
def test_the_fastest_round_is_that_of_a_full_search(
    acceptance: float | list[float], rtt_s: float, draft_token_s: float
) -> None:
    models, link = ModelCosts(draft_token_s, 0.02, 0.02, 0.0005), LinkCosts(rtt_s=rtt_s)
    rates = [tokens_per_s(acceptance, n, models, link) for n in range(1, 65)]
    best, rate = fastest_round(acceptance, models, link, 64)
    assert 1 <= best <= 64
    assert math.isclose(rate, max(rates), rel_tol=1e-9) and math.isclose(rates[best - 1], rate, rel_tol=1e-9)


# ------------------------------------------------------------------------------------- in a session


class Stopping(FixedDepth):
    """Drafts 8 tokens, but none after a third."""

    def stop_rule(self) -> ShouldStop:
        return lambda token_id, signals, num_drafted: Stop.AFTER if num_drafted == 3 else Stop.NO


def test_a_session_drafts_no_further_than_the_stop_rule_lets_it() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), policy=Stopping(8))
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    assert [len(request.draft_tokens) for request in verifier.of(VerifyRequest)] == [3, 3, 2]


def test_no_policy_drafts_past_the_text_the_context_or_what_the_verifier_takes() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), policy=FixedDepth(200), max_new_tokens=30)
    list(session.generate())
    assert session.result.token_ids == NEW[:30]
    assert [len(request.draft_tokens) for request in verifier.of(VerifyRequest)] == [16, 11]


def test_co_located_the_verifier_is_asked_for_the_policys_length() -> None:
    verifier = FakeVerifier()
    list(make_session(verifier, mode=ExecutionMode.CO_LOCATED, policy=OptimalDepth(5)).generate())
    assert [request.num_speculative_tokens for request in verifier.of(GenerateRequest)] == [5]


def test_prompt_lookup_proposes_a_prefix_where_it_is_stopped() -> None:
    sequence = PromptLookupModel(100, "").sequence(SamplingParams())
    sequence.commit([1, 2, 3, 4, 1, 2])
    asked: list[tuple[int, Signals | None, int]] = []

    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        asked.append((token_id, signals, num_drafted))
        return Stop.AFTER if num_drafted == 2 else Stop.NO

    assert sequence.propose(5, should_stop).token_ids == (3, 4) == sequence.propose(5).token_ids[:2]
    assert asked == [(3, None, 1), (4, None, 2)], "a copy tells no signals"


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("depth"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_ended_draft_is_the_beginning_of_the_whole_one(draft_dir: Path, temperature: float) -> None:
    asked: list[tuple[int, Signals | None, int]] = []

    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        asked.append((token_id, signals, num_drafted))
        return Stop.AFTER if num_drafted == 3 else Stop.NO

    with OnnxDraftModel.open(draft_dir) as model:
        sequence = model.sequence(SamplingParams(temperature=temperature, seed=3))
        sequence.commit([5, 6, 7])
        sequence.propose(1)  # what is fed at once differs in the last bits
        ended, whole = sequence.propose(8, should_stop), sequence.propose(8)
        sequence.check_integrity()
        sequence.close()
    assert ended.token_ids == whole.token_ids[:3] and ended.draft_probs == whole.draft_probs[:3]
    assert ended.signals == whole.signals[:3] and len(whole.token_ids) == 8
    assert asked == list(zip(ended.token_ids, ended.signals, (1, 2, 3), strict=True))
    assert all(0 < c < 1 for c in ended.confidences), "at temperature 0 too: the draft's own probability"


# -------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def flags(draft_dir: Path) -> Iterator[list[str]]:
    with serving(make_backend(draft_dir)) as server:
        yield ["--verifier", f"127.0.0.1:{server.port}", "--draft", str(draft_dir), "--max-new-tokens", "40"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_text_is_the_same_with_every_policy(
    flags: list[str], temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags, "--temperature", temperature, "--seed", "7", "--ignore-eos", "--json"]
    flags += ["--on-timeout", "wait"]  # a busy machine's missed deadline must not change what is compared
    assert main(["run", "def f(", *flags, "--mode", "cloud-only"]) == 0
    wanted = json.loads(capsys.readouterr().out)["token_ids"]
    for name in DEPTH_POLICIES:
        assert main(["run", "def f(", *flags, "--mode", "speculative", "--depth-policy", name]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["token_ids"] == wanted, name
        lengths = report["stats"]["draft_length"]
        low, high = BOUNDS.get(name, (4, 4))
        assert min(low, 1) <= lengths["p10"] <= lengths["p50"] <= lengths["p90"] <= lengths["max"] <= high


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--depth-policy", "ratio", "--num-speculative-tokens", "2"], ["ratio starts between 3 and 12"]),
        (["--depth-policy", "window", "--num-speculative-tokens", "9"], ["window starts between 2 and 8"]),
        (["--depth-policy", "optimal", "--num-speculative-tokens", "0"], ["optimal starts between 1 and 64"]),
        (["--depth-policy", "best"], ["depth_policy", "fixed, ratio, window, optimal"]),
    ],
)
def test_a_length_that_a_policy_cannot_start_at_and_an_unknown_policy_are_refused(
    flags: list[str], arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "abc", *flags, *arguments]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error, error


def test_policies_by_name() -> None:
    assert [create_depth_policy(name).next_depth() for name in DEPTH_POLICIES] == [4, 6, 4, 6]
    assert [create_depth_policy(name, 7).next_depth() for name in DEPTH_POLICIES] == [7, 7, 7, 7]
    assert create_depth_policy("fixed", 0).next_depth() == 0
    with pytest.raises(UsageError, match="known: fixed, ratio, window, optimal"):
        create_depth_policy("best")


def test_the_summary_tells_how_far_rounds_drafted() -> None:
    rounds = [answered(n, 0) for n in (0, *range(1, 11), 30)]
    assert draft_length(rounds) == {"mean": 7.73, "p10": 2.0, "p50": 6.0, "p90": 10.0, "max": 30.0}
    assert draft_length([answered(0, 0)]) is None


# ---------------------------------------------------------------------------------- a shared verifier


def shared(num_sessions: int, num_drafted: int, token_ms: float, queue_ms: float = 0.0) -> RoundRecord:
    """A round whose forward takes 10 ms and `token_ms` for each token of sessions that all draft as many."""
    forward_ms = 10.0 + token_ms * num_sessions * (num_drafted + 1)
    record = answered(num_drafted, num_drafted // 2, draft_ms=0.1, net_ms=1.0)
    record.queue_ms, record.forward_ms, record.verifier_ms = queue_ms, forward_ms, queue_ms + forward_ms
    record.batch_size, record.step_token_ms = num_sessions, token_ms
    return record


def length_beside(num_sessions: int, token_ms: float = 0.5) -> int:
    policy = OptimalDepth(4)
    for _ in range(30):
        policy.observe(shared(num_sessions, policy.next_depth(), token_ms))
    return policy.next_depth()


def test_drafts_become_shorter_the_more_sessions_share_a_step() -> None:
    lengths = [length_beside(num_sessions) for num_sessions in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] >= 1, lengths
    assert length_beside(64, token_ms=0.001) >= lengths[0], "where tokens cost nothing nobody saves them"


def test_where_every_round_is_pipelined_drafts_become_shorter_too_and_longer_again() -> None:
    conditions = Conditions()
    conditions.observe_opening(0.001, 0.05, 0.0001, StepTimes(0.010, 0.0005))
    lengths = []
    for num_sessions in (1, 16, 1):
        for _ in range(40):
            conditions.observe(replace(shared(num_sessions, 4, token_ms=0.5), window=3))
        lengths.append(conditions.fastest_pipelined(0.8, 4)[0])
    assert lengths[1] < min(lengths[0], lengths[2]), lengths


def test_one_more_token_of_everybody_is_what_a_shared_token_costs() -> None:
    costs = RoundCosts()
    for num_drafted in (2, 4, 3):
        costs.observe(shared(8, num_drafted, token_ms=0.5, queue_ms=0.0))
    models, _ = costs.estimate()
    assert models.verify_token_s == pytest.approx(8 * 0.0005)
    assert models.verify_s(6) == pytest.approx((10 + 0.5 * 8 * 7) / 1e3)


def test_tokens_of_steps_that_a_round_waited_for_count_too() -> None:
    costs = RoundCosts()
    record = shared(8, 4, token_ms=0.5)
    record.queue_ms = record.forward_ms  # as where two halves of the sessions take turns
    record.verifier_ms *= 2
    costs.observe(record)
    assert costs.estimate()[0].verify_token_s == pytest.approx(16 * 0.0005)
    among_streams = RoundCosts()
    record.num_active_sessions = 12  # some of which stream: they are in both steps, with no drafts
    among_streams.observe(record)
    assert among_streams.estimate()[0].verify_token_s == pytest.approx(12 * 0.0005)


@pytest.mark.parametrize("batch_size, token_ms", [(0, 0.5), (1, 0.5), (8, 0.0)])
def test_a_round_alone_or_of_unknown_batch_size_costs_what_was_measured(
    batch_size: int, token_ms: float
) -> None:
    found = []
    for size, slope_ms in ((batch_size, token_ms), (1, 0.0)):
        costs = RoundCosts()
        for num_drafted in (2, 4, 8):
            record = shared(1, num_drafted, token_ms=0.5)
            record.batch_size, record.step_token_ms = size, slope_ms
            costs.observe(record)
        found.append(costs.estimate())
    assert found[0] == found[1]


def streamed(costs: RoundCosts, num_sessions: int) -> None:
    """Adds a stream of steps of 1 ms and 0.1 ms for a token of each session."""
    for _ in range(8):
        costs.observe_target(0.0015 + 0.0001 * num_sessions, num_sessions)


def opened_costs(
    num_sessions: int = 1, earlier: EarlierCosts | None = None, session_s: float = 0.0
) -> RoundCosts:
    costs = RoundCosts(earlier=earlier)
    costs.observe_rtt(0.001)
    costs.observe_draft(0.0006, 1)
    costs.observe_opening(0.02, StepTimes(0.001, 0.0001, session_s), num_sessions)
    return costs


def test_a_stream_tells_what_rounds_of_all_who_share_it_would_cost() -> None:
    alone, beside = opened_costs(), opened_costs()
    streamed(alone, 1)
    streamed(beside, 32)
    (one, link), (many, _) = alone.estimate(), beside.estimate()
    assert one.verify_token_s == pytest.approx(0.0001), "no other session's tokens are in a step"
    assert many.target_token_s == pytest.approx(0.0047) and many.verify_token_s > 20 * one.verify_token_s
    # 32 sessions of 5 tokens are 16 ms of the verifier in two steps of 1.5 ms, and the edge is away for some of it.
    round_ms = 1e3 * (many.draft_s(4) + link.rtt_s + many.verify_s(4))
    assert round_ms == pytest.approx(16.0 + 2 * 1.5, rel=0.05)


def test_a_stream_beside_others_is_not_expected_to_be_faster_than_their_steps_where_the_prompt_was() -> None:
    costs = [opened_costs(num_sessions, session_s=0.001) for num_sessions in (1, 32)]
    alone_s, beside_s = (each.estimate()[0].target_token_s for each in costs)
    assert beside_s == pytest.approx(0.001 + 32 * 0.0011), "the prompt's forward took 20 ms"
    assert alone_s < 0.003


def test_a_streams_request_waits_for_a_part_of_the_step_that_others_have() -> None:
    alone, beside = opened_costs(), opened_costs()
    streamed(alone, 1)
    streamed(beside, 32)
    assert alone.shared_wait_s == 0.0
    assert beside.shared_wait_s == pytest.approx(0.5 * 0.0047)


def test_what_every_session_adds_to_a_step_counts_once_a_token_of_streams_and_once_a_round() -> None:
    plain, costly = opened_costs(32), opened_costs(32, session_s=0.0001)
    (cheap, _), (dear, _) = plain.estimate(), costly.estimate()
    assert dear.target_token_s - cheap.target_token_s == pytest.approx(32 * 0.0001)
    assert dear.verify_s(4) - cheap.verify_s(4) == pytest.approx(32 * 0.0001)
    assert opened_costs(1, session_s=0.0001).estimate()[0].verify_s(4) == pytest.approx(0.0011 + 5 * 0.0001)


def test_the_next_text_begins_with_the_load_of_the_last_one_and_an_opening_tells_it_anew() -> None:
    last = opened_costs()
    streamed(last, 32)
    following = RoundCosts(earlier=last.learned())
    assert following.num_sharing == 32
    assert opened_costs(num_sessions=0, earlier=last.learned()).num_sharing == 1, (
        "another verifier, which hides it"
    )
    assert opened_costs(num_sessions=1, earlier=last.learned()).num_sharing == 1
    assert opened_costs(num_sessions=8).num_sharing == 8
