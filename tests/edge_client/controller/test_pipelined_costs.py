"""Pipelined rounds: the formula against a pipeline played token by token."""

from __future__ import annotations

import math
import random

import pytest
from support.matrices import one_of

from outrider.edge_client.controller import pace_tables
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, fastest_round, round_s
from outrider.edge_client.controller.cost_model_pipelined import (
    branching_token_s,
    fastest_pipelined,
    num_in_flight,
    pipelined_break_even_rtt_s,
    pipelined_start_s,
    pipelined_times,
    pipelined_token_s,
)

MODELS = ModelCosts(draft_token_s=0.012, target_token_s=0.03, verify_fixed_s=0.03, verify_token_s=0.0005)
FAST_DRAFT = ModelCosts(draft_token_s=0.0002, target_token_s=0.03, verify_fixed_s=0.03)


def played_token_s(
    alphas: list[float], n: int, models: ModelCosts, rtt_s: float, num_runs: int, window: float = math.inf
) -> float:
    """Seconds a token of `num_runs` runs, event by event: one drafter, one verifier, a link of half an RTT
    each way. A run begins when a rejection is heard and the draft token under way is done."""
    luck = random.Random(5)
    now_s, num_tokens = 0.0, 0
    for _ in range(num_runs):
        drafted_s, verifier_free_s, position, heard = now_s, 0.0, 0, list[float]()
        while True:
            if len(heard) >= window:  # a place in the window is free once an earlier verdict was heard
                drafted_s = max(drafted_s, heard[len(heard) - int(window)])
            drafted_s += n * models.draft_token_s
            verifier_free_s = max(verifier_free_s, drafted_s + rtt_s / 2) + models.verify_s(n)
            heard.append(verifier_free_s + rtt_s / 2)
            stood = 0
            while stood < n and luck.random() < alphas[min(position, len(alphas) - 1)]:
                position, stood = position + 1, stood + 1
            if stood < n:
                break
        num_tokens += position + 1
        now_s = heard[-1] + _rest_s(heard, drafted_s, n, models, window)
    return now_s / num_tokens


def played_text_s(alpha: float, n: int, first_s: float, period_s: float, num_tokens: int) -> float:
    """Seconds of a text of so many tokens, the mean of 4,000: a run's first verdict takes `first_s`, each further one
    a period."""
    luck, num_texts, seconds = random.Random(7), 4000, 0.0
    for _ in range(num_texts):
        left = num_tokens
        while left > 0:
            seconds, stood = seconds + first_s, 0
            while left > 0 and luck.random() < alpha:
                left, stood = left - 1, stood + 1
                seconds += period_s * (left > 0 and stood % n == 0)
            left -= 1  # the correction
    return seconds / num_texts


def _rest_s(heard: list[float], drafted_s: float, n: int, models: ModelCosts, window: float) -> float:
    """Of the draft token under way when the last verdict is heard: rounds go on being drafted until then."""
    rejected_s, num_sent = heard[-1], len(heard)
    while drafted_s < rejected_s:
        begun_s = drafted_s
        drafted_s += n * models.draft_token_s
        num_sent += 1
        if num_sent - len(heard) >= window:
            return 0.0
        if drafted_s > rejected_s:
            return -(rejected_s - begun_s) % models.draft_token_s
    return 0.0


@pytest.mark.parametrize(
    ("alphas", "n", "rtt_s"), one_of(2, [[0.8], [0.9, 0.7, 0.5, 0.6]], [1, 3, 6], [0.01, 0.06, 0.2])
)
def test_the_formula_is_what_a_played_pipeline_takes(alphas: list[float], n: int, rtt_s: float) -> None:
    link = LinkCosts(rtt_s=rtt_s)
    for models in (MODELS, FAST_DRAFT):
        played = played_token_s(alphas, n, models, rtt_s, num_runs=4000)
        assert pipelined_token_s(alphas, n, models, link) == pytest.approx(played, rel=0.04)


def test_a_full_window_waits_for_the_trip() -> None:
    link = LinkCosts(rtt_s=0.2)
    for window in (1, 2, 4):
        played = played_token_s([0.9], 2, FAST_DRAFT, 0.2, num_runs=4000, window=window)
        told = pipelined_token_s(0.9, 2, FAST_DRAFT, link, max_in_flight=window)
        assert told == pytest.approx(played, rel=0.04)
    assert pipelined_token_s(1.0, 2, FAST_DRAFT, link, 1) == pytest.approx((0.2 + 0.03 + 0.0004) / 2)


def test_with_nothing_rejected_drafts_trips_and_verifications_overlap() -> None:
    link = LinkCosts(rtt_s=0.3)
    assert pipelined_token_s(1.0, 4, MODELS, link) == pytest.approx(4 * 0.012 / 4)
    assert pipelined_token_s(1.0, 2, MODELS, link) == pytest.approx((0.03 + 2 * 0.0005) / 2)
    assert pipelined_token_s([0.5, 1.0], 2, MODELS, link) == pytest.approx((0.03 + 2 * 0.0005) / 2)


def test_with_everything_rejected_each_token_costs_the_whole_trip() -> None:
    link = LinkCosts(rtt_s=0.3)
    rest_s = (2 * 0.012 / 0.031) * 0.012 / 2
    assert pipelined_token_s(0.0, 2, MODELS, link) == pytest.approx(round_s(2, MODELS, link) + rest_s)


def test_what_of_the_link_is_work_is_added_to_each_verdict_and_each_rejection() -> None:
    local, apart = LinkCosts(rtt_s=0.005, work_s=0.005), LinkCosts(rtt_s=0.005)
    assert pipelined_token_s(1.0, 4, MODELS, local) == pytest.approx((4 * 0.012 + 0.005) / 4)
    rejected_s = pipelined_token_s(0.0, 4, MODELS, apart)
    assert rejected_s < pipelined_token_s(0.0, 4, MODELS, local) <= rejected_s + 0.005
    assert pipelined_break_even_rtt_s(0.8, 4, MODELS, local, 0.03) < pipelined_break_even_rtt_s(
        0.8, 4, MODELS, apart, 0.03
    )


def test_one_alpha_for_all_is_the_same_as_one_for_each() -> None:
    link = LinkCosts(rtt_s=0.1)
    each = pipelined_token_s([0.8] * 5, 3, MODELS, link)
    assert each == pytest.approx(pipelined_token_s(0.8, 3, MODELS, link))
    for n, hit_share in ((1, 0.0), (3, 0.3), (9, 1.0)):
        times = pipelined_times(n, MODELS, link)
        each = branching_token_s([0.8] * 5, times, hit_share)
        assert each == pytest.approx(branching_token_s(0.8, times, hit_share))


@pytest.mark.parametrize("max_in_flight", [None, 2])
def test_a_table_is_the_times_of_each_rate_and_length(max_in_flight: int | None) -> None:
    link, rates = LinkCosts(rtt_s=0.1), (0.1, 0.5, 0.99)
    times = [pipelined_times(n, MODELS, link, max_in_flight) for n in (1, 4, 64)]
    table = pace_tables.branching_token_s(rates, times, 0.3)
    assert table.tolist() == [
        [pytest.approx(branching_token_s(rate, each, 0.3)) for each in times] for rate in rates
    ]


def test_a_bonus_spares_a_period_where_the_next_round_begins_with_a_rejection() -> None:
    link, n, alphas = LinkCosts(rtt_s=0.1), 2, [0.9, 0.8, 0.5, 0.0]
    first_wrong = 0.9 * 0.8 * 0.5  # after one whole round; a second one is never whole
    tokens = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.5
    times = pipelined_times(n, MODELS, link)
    spared_s = pipelined_token_s(alphas, n, MODELS, link) - branching_token_s(alphas, times)
    assert spared_s == pytest.approx(first_wrong * MODELS.verify_s(n) / tokens)


@pytest.mark.parametrize(("rtt_s", "at_most"), [(0.06, 0.85), (0.2, 0.85)])
def test_it_hides_enough_of_the_trip_to_be_worth_building(rtt_s: float, at_most: float) -> None:
    """The point of `ctl.pipelined`: forward 30 ms, draft 12 ms a token, acceptance 0.8."""
    models, link = ModelCosts(0.012, 0.03, 0.03), LinkCosts(rtt_s=rtt_s)
    _, rate = fastest_round(0.8, models, link, 64)
    n, seconds = fastest_pipelined(0.8, models, link, 64)
    assert seconds * rate <= at_most and num_in_flight(n, models, link) > 1


@pytest.mark.parametrize("n", [1, 4])
def test_at_its_break_even_rtt_it_takes_as_long_as_the_rival(n: int) -> None:
    rtt_s = pipelined_break_even_rtt_s(0.8, n, MODELS, LinkCosts(rtt_s=9.0), rival_s=0.06)
    assert rtt_s > 0
    assert pipelined_token_s(0.8, n, MODELS, LinkCosts(rtt_s=rtt_s)) == pytest.approx(0.06)
    assert pipelined_break_even_rtt_s(1.0, 4, MODELS, LinkCosts(rtt_s=0.0), rival_s=0.06) == math.inf
    assert pipelined_break_even_rtt_s(1.0, 1, MODELS, LinkCosts(rtt_s=0.0), rival_s=0.001) == -math.inf
    assert pipelined_break_even_rtt_s(0.1, 1, MODELS, LinkCosts(rtt_s=0.0), rival_s=0.03) < 0


@pytest.mark.parametrize("num_tokens", [16, 32, 100])
@pytest.mark.parametrize(("alpha", "n"), [(0.5, 2), (0.7, 2), (0.8, 4), (0.9, 4)])
@pytest.mark.parametrize("rtt_s", [0.001, 0.08])
def test_a_text_takes_its_tokens_time_and_once_a_wait_for_its_first_verdict_and_a_part_of_its_last_round(
    rtt_s: float, alpha: float, n: int, num_tokens: int
) -> None:
    link = LinkCosts(rtt_s)
    pipelined_s = num_tokens * pipelined_token_s(alpha, n, FAST_DRAFT, link)
    start_s = pipelined_start_s(alpha, pipelined_times(n, FAST_DRAFT, link))
    first_s = n * FAST_DRAFT.draft_token_s + rtt_s + FAST_DRAFT.verify_s(n)
    period_s = max(n * FAST_DRAFT.draft_token_s, FAST_DRAFT.verify_s(n))
    once_s = played_text_s(alpha, n, first_s, period_s, num_tokens) - pipelined_s
    assert once_s == pytest.approx(start_s, abs=0.15 * first_s)
    assert once_s > 0.5 * start_s
