"""The choice of the way to work: pure, from what it is shown; and the window it asks for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from outrider.common.errors import UsageError
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.controller import pace_tables
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.round_costs import EarlierCosts, StepTimes
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import create_window
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.session.factory import make_window

ALL = CHOOSABLE_MODES


def a_round(rtt_ms: float, forward_ms: float, draft_ms: float, num_accepted: int = 5) -> RoundRecord:
    return RoundRecord(
        round_id=1,
        num_draft_tokens=6,
        num_accepted_tokens=num_accepted,
        draft_ms=6 * draft_ms,
        net_ms=rtt_ms,
        forward_ms=forward_ms,
        verifier_ms=forward_ms,
    )


def after(choice: ModePolicy, record: RoundRecord, num_rounds: int = 40) -> ExecutionMode:
    for _ in range(num_rounds):
        choice.observe(record)
        choice.choose(1000)
    return choice.current


@pytest.mark.parametrize(
    ("rtt_ms", "forward_ms", "draft_ms", "best"),
    [
        (600, 5, 0.2, ExecutionMode.CLOUD_ONLY),  # a trip is worth a hundred tokens
        (1, 70, 12, ExecutionMode.PIPELINED),  # a forward to draft in
        (20, 70, 2, ExecutionMode.PIPELINED),
        (60, 70, 12, ExecutionMode.PIPELINED),  # and a trip
    ],
)
def test_each_way_is_taken_where_it_is_the_soonest(
    rtt_ms: float, forward_ms: float, draft_ms: float, best: ExecutionMode
) -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(rtt_ms / 1e3, forward_ms / 1e3, draft_ms / 1e3)
    assert choice.choose(1000) is best, "at once, from the opening"
    if best is not ExecutionMode.CLOUD_ONLY:
        assert after(choice, a_round(rtt_ms, forward_ms, draft_ms)) is best


def test_the_first_decision_is_prepared_before_the_opening_where_earlier_texts_had_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = EarlierCosts(rtt_s=0.001, draft_line=(0.0, 0.012), stated=StepTimes(0.069, 0.00015))
    prepared, unprepared, unknown = ModePolicy(ALL), ModePolicy(ALL), ModePolicy(ALL)
    for choice in (prepared, unprepared):
        choice.conditions.costs.start_from(earlier)
    for choice in (prepared, unknown):
        choice.prepare()
    num_tables = 0
    tabulate = pace_tables.rounds_token_s

    def counted(*arguments: Any) -> Any:
        nonlocal num_tables
        num_tables += 1
        return tabulate(*arguments)

    monkeypatch.setattr(pace_tables, "rounds_token_s", counted)
    for choice, draft_s in ((prepared, None), (unprepared, None), (unknown, 0.012)):
        choice.conditions.observe_opening(0.001, 0.07, draft_s, StepTimes(0.069, 0.00015))
        assert choice.choose(1000) is ExecutionMode.PIPELINED
    assert num_tables == 2, "for both that had not prepared"


def test_where_rounds_are_short_the_first_decision_is_the_prepared_one() -> None:
    """The verifier has become so slow meanwhile that drafts pay, or so fast that they do not: two rounds show it."""
    fast, slow = StepTimes(0.001, 0.0001), StepTimes(0.015, 0.0001)
    for before, now in ((fast, slow), (slow, fast)):
        choices = [ModePolicy(ALL) for _ in range(3)]
        for choice in choices[:2]:
            choice.conditions.costs.start_from(
                EarlierCosts(rtt_s=0.002, draft_line=(0.0, 0.001), stated=before)
            )
        choices[0].prepare()
        for choice in choices:
            choice.conditions.observe_opening(0.002, 0.02, 0.001, now)
            choice.choose(1000)
        prepared, unprepared, unknown = choices
        assert prepared.current is not unprepared.current is unknown.current
        for _ in range(2):
            prepared.conditions.observe(a_round(2, 1e3 * now[0], 1))
            prepared.observe(a_round(2, 1e3 * now[0], 1))
            prepared.choose(1000)
        assert prepared.current is unprepared.current


def test_where_rounds_are_long_the_first_decision_is_by_the_opening() -> None:
    prepared, unprepared = ModePolicy(ALL), ModePolicy(ALL)
    for choice in (prepared, unprepared):
        earlier = EarlierCosts(rtt_s=0.2, draft_line=(0.0, 0.001), stated=StepTimes(0.1, 0.0001))
        choice.conditions.costs.start_from(earlier)
    prepared.prepare()
    for choice in (prepared, unprepared):
        choice.conditions.observe_opening(0.2, 0.02, 0.001, StepTimes(0.005, 0.0001))
        assert choice.choose(1000) is ExecutionMode.CLOUD_ONLY


@pytest.mark.parametrize(
    ("slower", "best"), [(1.0, ExecutionMode.PIPELINED), (2.0, ExecutionMode.SPECULATIVE)]
)
def test_rounds_that_slow_each_other_are_not_pipelined_for_long(slower: float, best: ExecutionMode) -> None:
    """As on shared processors, where a draft takes time from the verification that it overlaps."""
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.001, 0.07, 0.012, StepTimes(0.069, 0.00015))
    assert choice.choose(1000) is ExecutionMode.PIPELINED
    pipelined_ratio = 0.0
    for number in range(60):
        record = a_round(1, 70, 12, num_accepted=6 if number % 2 else 3)
        if choice.current is ExecutionMode.PIPELINED:
            is_ahead = number % 2 == 0 and number > 0
            ahead_ms, whole_ms = 72.0, 6 * 12 + 70 + 1 + choice.conditions.estimate()[0].draft_fixed_s * 1e3
            since_ms = slower * (ahead_ms if is_ahead else whole_ms)
            forward_ms = slower * 70
            record = replace(
                record,
                window=2,
                pipelined_hit=is_ahead or None,
                since_ms=since_ms,
                forward_ms=forward_ms,
                verifier_ms=forward_ms,
            )
        choice.observe(record)
        choice.choose(1000)
        pipelined_ratio = max(pipelined_ratio, choice.conditions.time_ratios[ExecutionMode.PIPELINED])
    assert choice.current is best
    assert (pipelined_ratio > 1.1) == (slower > 1), "its first rounds show it"


def test_a_prompt_says_little_of_the_targets_speed_and_the_verifiers_word_much() -> None:
    trip_s, prompt_s, draft_s = 0.06, 0.04, 0.0006  # the embedded pair over 60 ms
    deceived, told = ModePolicy(ALL), ModePolicy(ALL)
    deceived.conditions.observe_opening(trip_s, prompt_s, draft_s)
    told.conditions.observe_opening(trip_s, prompt_s, draft_s, StepTimes(0.006, 0.001))
    assert deceived.choose(1000) is not ExecutionMode.CLOUD_ONLY
    assert told.choose(1000) is ExecutionMode.CLOUD_ONLY


def test_before_anything_is_known_the_first_way_holds() -> None:
    assert ModePolicy(ALL).choose(1000) is ExecutionMode.SPECULATIVE


def test_a_draft_that_never_stands_ends_in_the_stream_and_a_good_shadow_brings_rounds_back() -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.02, 0.03, 0.0002)
    assert choice.choose(1000) is not ExecutionMode.CLOUD_ONLY
    assert after(choice, a_round(20, 30, 0.2, num_accepted=0)) is ExecutionMode.CLOUD_ONLY
    for _ in range(300):
        choice.observe_probe(True, 0.0002)
        choice.observe_stream(0.03)
        choice.choose(1000)
    assert choice.current is not ExecutionMode.CLOUD_ONLY


def test_a_link_that_becomes_shorter_is_noticed_while_streaming() -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.6, 0.03, 0.0002)
    assert choice.choose(1000) is ExecutionMode.CLOUD_ONLY
    for _ in range(40):
        choice.observe_probe(True, 0.0002)
        choice.observe_stream(0.03)
        choice.observe_rtt(0.01)
        choice.choose(1000)
    assert choice.current is ExecutionMode.SPECULATIVE or choice.current is ExecutionMode.PIPELINED


def test_near_a_tie_it_does_not_swing() -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.03, 0.03, 0.002)
    jitter = itertools.cycle((28, 30, 32, 29, 31))
    for number in range(400):
        choice.observe(a_round(next(jitter), 30, 2, num_accepted=(2, 3, 4)[number % 3]))
        choice.choose(1000)
    assert choice.num_changes <= 3


@pytest.mark.parametrize(("num_active", "num_changes"), [(1, 1), (8, 0)])
def test_a_session_beside_others_keeps_its_mode_where_another_is_a_little_faster(
    num_active: int, num_changes: int
) -> None:
    choice = ModePolicy((ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY))
    choice.conditions.observe_opening(0.004, 0.03, 0.001, StepTimes(0.029, 0.0001), num_active)
    assert choice.choose(1000) is ExecutionMode.SPECULATIVE
    for _ in range(60):  # 35 ms a token with one drafted, a stream 30
        rejected = replace(a_round(4, 30, 1, num_accepted=0), num_active_sessions=num_active, batch_size=1)
        choice.observe(rejected)
        choice.choose(1000)
    assert choice.num_changes == num_changes


@pytest.mark.parametrize(("num_active", "num_decisions"), [(1, 15), (8, 5)])
def test_beside_others_few_decisions_follow_a_change(num_active: int, num_decisions: int) -> None:
    choice = ModePolicy((ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY))
    choice.conditions.observe_opening(0.004, 0.03, 0.01, StepTimes(0.029, 0.0001), num_active)
    choice.choose(1000)
    decisions = [choice.expected_ms]  # a new one with each
    for _ in range(17):
        choice.observe_stream(0.03, num_active)
        choice.choose(1000)
        if decisions[-1] is not choice.expected_ms:
            decisions.append(choice.expected_ms)
    assert len(decisions) == num_decisions


def test_a_trip_for_a_change_is_not_spent_on_the_last_token() -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.1, 0.03, 0.0002)
    choice.choose(1000)
    before = choice.current
    for _ in range(40):
        choice.observe(a_round(100, 30, 0.2, num_accepted=0))
        choice.choose(1)
    assert choice.current is before


@pytest.mark.parametrize(
    ("num_left", "is_stream_left"), [(1000, True), (16, False)], ids=["long", "nearly at its end"]
)
def test_a_stream_is_not_left_for_rounds_that_would_hardly_have_begun(
    num_left: int, is_stream_left: bool
) -> None:
    choice = ModePolicy(ALL)
    choice.conditions.observe_opening(0.08, 0.03, 0.002)
    for _ in range(10):
        choice.observe_stream(0.03)
        for _ in range(4):
            choice.observe_probe(is_accepted=False, draft_s=0.002)
        choice.choose(1000)
    assert choice.current is ExecutionMode.CLOUD_ONLY
    for number in range(60):
        choice.observe_stream(0.03)
        choice.observe_probe(is_accepted=number % 5 > 0, draft_s=0.002)
        if choice.choose(num_left) is not ExecutionMode.CLOUD_ONLY:
            break
    assert (choice.current is not ExecutionMode.CLOUD_ONLY) is is_stream_left


def test_the_window_covers_a_trip_and_a_verification() -> None:
    window = create_window(Pipelining.ON, None, "optimal")
    assert window.size == 2, "until something is known"
    for _ in range(3):
        window.observe(a_round(60, 30, 12))
        window.choose(100)
    assert window.size == 3  # a round of 6 tokens every 72 ms, answered after 162
    for _ in range(10):
        window.observe(a_round(600, 5, 0.2))
        window.choose(100)
    assert window.size == SETTINGS.max_in_flight


def test_a_given_number_of_rounds_holds_while_it_pipelines() -> None:
    assert create_window(Pipelining.ON, 5, "fixed").size == 5
    assert create_window(Pipelining.OFF, 5, "fixed").size == 1


def test_auto_pipelining_is_off_where_there_is_nothing_to_hide_and_comes_back_with_the_link() -> None:
    window = create_window(Pipelining.AUTO, None, "optimal")
    sizes = []
    for rtt_ms in (1, 200, 1):
        for _ in range(30):
            window.observe(a_round(rtt_ms, 5, 12, num_accepted=2))
            window.choose(1000)
        sizes.append(window.size)
    assert sizes[0] == sizes[2] == 1 and sizes[1] > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mode": "edge-only", "pipeline": "on"}, "--pipeline on goes .* speculative: in mode edge-only"),
        ({"mode": "co-located", "pipeline": "on"}, "--pipeline on goes with --mode speculative"),
        (
            {"pipeline": "off", "num_rounds_in_flight": 4},
            "--num-rounds-in-flight 4 goes with --pipeline on or auto",
        ),
    ],
)
def test_pipelining_that_would_have_no_effect_is_refused_by_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_window(run_config(**flags))
    assert make_window(run_config(num_rounds_in_flight=4)).policy is not None


def test_what_is_chosen_where_it_would_change_the_text_is_rounds_one_at_a_time() -> None:
    """With the same seed another method writes other text in another mode, or with other drafts."""
    assert make_window(run_config()).policy is not None and run_config().depth_policy == "optimal"
    for flags in ({"method": "sparse"}, {"gate": "commit", "gate_nll": 1.0}):
        config = run_config(**flags)
        assert make_window(config).policy is None and make_window(config).size == 1
        assert config.depth_policy == "fixed"
    assert run_config(num_speculative_tokens=8).depth_policy == "fixed"
    assert run_config(num_speculative_tokens=8, depth_policy="optimal").depth_policy == "optimal"


def test_the_reason_of_a_mode_is_told() -> None:
    choice = ModePolicy(CHOOSABLE_MODES)
    assert choice.reason == "first" and not choice.expected_ms
    assert ModePolicy(CHOOSABLE_MODES[:1]).reason == "given"
    choice.conditions.observe_opening(0.02, 0.03, 0.3, StepTimes(0.029, 0.0002))
    assert choice.choose(100) is ExecutionMode.CLOUD_ONLY
    assert choice.reason == "fastest" and set(choice.expected_ms) == set(CHOOSABLE_MODES)
    choice.leave_stream()
    assert choice.current is ExecutionMode.SPECULATIVE
    assert choice.reason == "stream_lost" and not choice.expected_ms


def test_single_calls_are_not_pipelined() -> None:
    with pytest.raises(UsageError, match="--pipeline on needs --transport stream"):
        make_window(run_config(pipeline="on", transport="unary"))
    choice = make_window(run_config(mode="auto", transport="unary")).policy
    assert choice is not None
    choice.conditions.observe_opening(0.06, 0.07, 0.012)
    assert choice.choose(1000) is not ExecutionMode.PIPELINED
