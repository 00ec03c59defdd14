"""What modes take : what the cost model says of them, as it is learned and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.round_costs import EarlierCosts, StepTimes
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.time_ratio import TimeRatio
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.session.factory import is_local

ROUND = RoundRecord(
    1, 6, 5, draft_ms=6.0, edge_ms=0.0, rtt_ms=50.0, net_ms=20.0, forward_ms=30.0, verifier_ms=30.0
)


def begun(earlier: EarlierCosts | None = None) -> Conditions:
    conditions = Conditions()
    conditions.costs.start_from(earlier or EarlierCosts())
    conditions.observe_opening(0.02, 0.03, 0.001, StepTimes(0.029, 0.0002))
    return conditions


def test_answers_that_arrive_together_are_as_long_as_those_that_do_not() -> None:
    """A lost packet of 200 ms, after which the answers of ten periods of 20 ms come at once."""
    bunched, even = TimeRatio(1.0, 8.0), TimeRatio(1.0, 8.0)
    for _ in range(20):
        for number in range(10):
            bunched.observe(0.2 if number == 0 else 0.0, 0.02)
            even.observe(0.02, 0.02)
    assert bunched.value == pytest.approx(even.value, rel=0.1) and even.value == pytest.approx(1.0)


def test_nothing_is_learned_where_nothing_was_expected() -> None:
    ratio = TimeRatio(1.03, 8.0)
    ratio.observe(0.01, 0.0)
    assert ratio.value == 1.03


def test_a_mode_that_does_not_run_returns_to_what_is_expected_of_it() -> None:
    ratio = TimeRatio(1.0, 8.0)
    for _ in range(40):
        ratio.observe(0.03, 0.01)
    assert ratio.value > 2.5 and ratio.has_observed
    for _ in range(300):
        ratio.observe_other()
    assert ratio.value == pytest.approx(1.0, abs=0.02)


def test_what_synchronous_rounds_take_beside_their_parts_is_learned() -> None:
    conditions = begun()
    for _ in range(40):
        conditions.observe(replace(ROUND, since_ms=84.0))  # of 56 that draft, link and verifier account for
    ratios = conditions.time_ratios
    assert ratios[ExecutionMode.SPECULATIVE] == pytest.approx(1.5, rel=0.1)
    assert ratios[ExecutionMode.PIPELINED] == 1 + SETTINGS.pipelined_excess_share
    assert set(conditions.learned_time_ratios) == {ExecutionMode.SPECULATIVE}


def test_a_stall_and_what_was_not_measured_are_no_time_of_a_mode() -> None:
    conditions = begun()
    for _ in range(20):
        conditions.observe(replace(ROUND, since_ms=None))
    assert not conditions.learned_time_ratios
    conditions.observe(replace(ROUND, since_ms=60_000.0))
    most = 1 + (SETTINGS.longest_gap_rounds - 1) / (SETTINGS.time_ratio_weight_rounds + 1)
    assert 1.0 < conditions.time_ratios[ExecutionMode.SPECULATIVE] <= most + 0.05


def test_the_next_text_begins_with_what_modes_took_in_the_last() -> None:
    prior, first = AcceptancePrior(), begun()
    for number in range(30):
        is_ahead = number % 2 == 0
        since_ms = 2 * (30.0 if is_ahead else 56.0)
        first.observe(replace(ROUND, window=2, pipelined_hit=is_ahead or None, since_ms=since_ms))
    prior.learn_time_ratios(first.learned_time_ratios)
    later = begun()
    later.start_from_time_ratios(prior.time_ratios)
    found = later.time_ratios
    assert found[ExecutionMode.PIPELINED] == first.time_ratios[ExecutionMode.PIPELINED] > 1.5
    assert found[ExecutionMode.SPECULATIVE] == 1.0


def test_expectations_are_those_of_the_modes_and_not_of_a_change_between_them() -> None:
    """Of rounds that would be left at once a token was said to take little more than the stream's."""
    choice = ModePolicy(CHOOSABLE_MODES)
    choice.conditions.observe_opening(0.2, 0.007, 0.001, StepTimes(0.0068, 0.0002))
    for _ in range(30):
        choice.observe_probe(is_accepted=False, draft_s=0.001)
    assert choice.choose(400) is ExecutionMode.CLOUD_ONLY
    expected = choice.expected_ms
    assert expected[ExecutionMode.CLOUD_ONLY] == pytest.approx(7.0, rel=0.02)
    assert expected[ExecutionMode.SPECULATIVE] > 100


@pytest.mark.parametrize("num_streamed", [3, 4, 5, 6])
def test_rounds_that_are_observed_four_at_a_time_are_decided_about(num_streamed: int) -> None:
    """The number observed may have any rest by four when that begins."""
    choice = ModePolicy(CHOOSABLE_MODES)
    choice.conditions.observe_opening(0.0005, 0.03, 0.01, StepTimes(0.029, 0.0002))
    near = replace(ROUND, draft_ms=60.0, net_ms=0.5, rtt_ms=30.5)
    for _ in range(num_streamed):
        choice.observe_stream(0.03)
    for num_accepted in (5, 0):
        for _ in range(20):
            for _ in range(SETTINGS.rounds_a_plan):
                choice.observe(replace(near, num_accepted_tokens=num_accepted))
            choice.choose(1000)
        assert (choice.current is ExecutionMode.CLOUD_ONLY) == (num_accepted == 0)


def test_a_stream_that_was_left_is_less_of_the_present_with_every_fourth_round() -> None:
    """It ran while the verifier was busy, which it is no more."""
    conditions = begun()
    for _ in range(15):
        conditions.observe_stream(0.09)
    assert conditions.estimate()[0].target_token_s == pytest.approx(0.09)
    for _ in range(15):
        conditions.observe(ROUND)
    assert conditions.estimate()[0].target_token_s == pytest.approx(0.09), (
        "a few rounds do not make a stream faster"
    )
    for _ in range(45):
        conditions.observe(ROUND)
    assert conditions.estimate()[0].target_token_s < 0.035


def test_a_stream_may_take_less_than_a_step_of_rounds() -> None:
    """Of 29.2 ms, as its forwards find warm caches; the next text begins with what it took."""
    conditions = begun()
    for _ in range(15):
        conditions.observe_stream(0.02)
    overhead_s = conditions.costs.measured_stream_overhead_s
    assert overhead_s == pytest.approx(-0.0092)
    for learned_s, expected_s in ((overhead_s, 0.02), (-0.02, 0.0146)):
        following = begun(EarlierCosts(stream_overhead_s=learned_s))
        assert following.estimate()[0].target_token_s == pytest.approx(expected_s), "at least half of a step"


def test_times_measured_beside_other_sessions_are_not_carried_to_the_next_text() -> None:
    """They depend on the others' modes, and the verifier's stated steps include what lies between two of them."""
    alone, shared = begun(), begun()
    for conditions, num_active in ((alone, 1), (shared, 8)):
        for _ in range(10):
            conditions.observe(replace(ROUND, since_ms=90.0, num_active_sessions=num_active))
        for _ in range(10):
            conditions.observe_stream(0.04, num_active)
    assert alone.learned_time_ratios and not shared.learned_time_ratios
    assert alone.costs.learned().stream_overhead_s and shared.costs.learned().stream_overhead_s is None
    following = begun(replace(shared.costs.learned(), stream_overhead_s=0.01))
    assert following.costs.num_sharing == 1.0, "until it is told otherwise"
    following.costs.observe_opening(0.05, StepTimes(0.029, 0.0002), 8)
    assert following.estimate()[0].target_token_s == pytest.approx(0.029 + 8 * 0.0002)


def test_until_a_stream_was_measured_it_takes_beyond_a_step_what_the_verifier_states() -> None:
    for earlier, expected_s in ((EarlierCosts(), 0.031), (EarlierCosts(stream_overhead_s=0.0005), 0.0295)):
        conditions = begun(earlier)
        conditions.costs.observe_opening(0.05, StepTimes(0.0288, 0.0002, stream_gap_s=0.002))
        assert conditions.estimate()[0].target_token_s == pytest.approx(expected_s)
        for _ in range(10):
            conditions.observe_stream(0.04)
        assert conditions.estimate()[0].target_token_s == pytest.approx(0.04)


def test_a_short_stream_in_a_busy_moment_keeps_nobody_from_streaming_again() -> None:
    """Two samples of a stream took twice the time: 15 rounds later a stream is expected to take what it did before."""
    conditions = begun()
    conditions.observe(ROUND)
    before_s = conditions.estimate()[0].target_token_s
    for _ in range(2):
        conditions.observe_stream(2 * before_s)
    assert conditions.costs.measured_stream_overhead_s == SETTINGS.stream_overhead_s
    for _ in range(15):
        conditions.observe(ROUND)
    assert conditions.estimate()[0].target_token_s == pytest.approx(before_s, rel=0.02)


def test_a_stream_does_not_wait_for_steps_as_rounds_do() -> None:
    """Rounds of eight sessions that share steps of 30 ms, and come at any moment of one."""
    conditions = Conditions()
    conditions.observe_opening(0.01, 0.03, 0.001, StepTimes(0.029, 0.0002))
    for _ in range(30):
        times = {"queue_ms": 15.0, "verifier_ms": 45.0, "step_token_ms": 0.2}
        conditions.observe(replace(ROUND, batch_size=8, num_active_sessions=12, **times))
    target_s, verify_s = conditions.estimate()[0].target_token_s, conditions.estimate()[0].verify_s(6)
    assert verify_s == pytest.approx(0.045, rel=0.05)
    assert target_s == pytest.approx(0.029 + 12 * 0.0002), (
        "of four more sessions the rounds wait for the next step"
    )


@pytest.mark.parametrize(
    "is_local, rtt_s, work_s", [(True, 5e-4, 5e-4), (True, 0.06, 1e-3), (False, 5e-4, 0.0)]
)
def test_on_a_shared_machine_the_link_is_work_as_far_as_it_is_no_tunnel(
    is_local: bool, rtt_s: float, work_s: float
) -> None:
    conditions = Conditions(is_local=is_local)
    conditions.observe_opening(rtt_s, 0.003, 0.001, StepTimes(0.002, 0.0002))
    assert conditions.estimate()[1].work_s == work_s


def test_pipelined_rounds_beside_their_verifier_are_expected_to_take_the_way_of_each() -> None:
    """A draft and a verification that overlap, and messages of 0.5 ms that overlap neither."""
    conditions = Conditions(is_local=True)
    alone = replace(ROUND, draft_ms=1.0, rtt_ms=2.5, net_ms=0.5, forward_ms=2.0, verifier_ms=2.0)
    for _ in range(10):
        conditions.observe(replace(alone, since_ms=3.5))
    ahead = replace(alone, window=2, rtt_ms=4.0, pipelined_hit=True, since_ms=2.5)
    for _ in range(40):
        conditions.observe(ahead)
    assert conditions.time_ratios[ExecutionMode.PIPELINED] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("address, is_shared", [("127.0.0.1:7077", True), ("verifier.example:7077", False)])
def test_an_edge_knows_by_the_address_whether_its_verifier_shares_its_processors(
    address: str, is_shared: bool
) -> None:
    assert is_local(RunConfig(verifier=address)) == is_shared
