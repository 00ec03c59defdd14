"""The cost model's formulas, worked by hand, and what follows from them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.edge_client.controller.cost_model import (
    LinkCosts,
    ModelCosts,
    break_even_rtt_s,
    cloud_only_s,
    colocated_s,
    edge_only_s,
    expected_tokens,
    fastest_round,
    round_s,
    rounds_s,
    rounds_start_s,
    tokens_per_s,
)

MODELS = ModelCosts(draft_token_s=0.001, target_token_s=0.020, verify_fixed_s=0.020, verify_token_s=0.0005)
alphas = st.floats(0, 0.999)


def test_expected_tokens_is_the_geometric_sum():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert (expected_tokens(0.0, 4), expected_tokens(1.0, 4), expected_tokens(0.5, 0)) == (1, 5, 1)


def test_an_acceptance_a_position_is_a_running_product_whose_last_repeats():
    assert expected_tokens([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)


@pytest.mark.parametrize("acceptance", [1.5, -0.1, math.nan, [], [0.5, 2]])
def test_an_acceptance_that_is_none_is_refused(acceptance):
    with pytest.raises(ValueError, match="acceptance"):
        expected_tokens(acceptance, 3)


def test_a_round_is_draft_trip_verification_and_bytes():
    link = LinkCosts(rtt_s=0.05, rate_up=1000, rate_down=2000)
    sent = (40 + 4 * 8) / 1000 + 80 / 2000
    assert round_s(4, MODELS, link) == pytest.approx(4 * 0.001 + 0.05 + 0.020 + 4 * 0.0005 + sent)


def test_cloud_only_streams_at_the_slower_of_target_and_link():
    assert cloud_only_s(MODELS, LinkCosts(rtt_s=9)) == 0.020
    assert cloud_only_s(MODELS, LinkCosts(rtt_s=9, rate_down=600)) == pytest.approx(0.1)


@given(alphas, st.integers(1, 16), st.floats(1e2, 1e9))
def test_at_the_break_even_rtt_rounds_and_cloud_only_are_equally_fast(alpha, n, rate):
    link = LinkCosts(rtt_s=0, rate_up=rate, rate_down=rate)
    rtt_s = break_even_rtt_s(alpha, n, MODELS, link)
    if rtt_s > 0:
        even = LinkCosts(rtt_s=rtt_s, rate_up=rate, rate_down=rate)
        assert tokens_per_s(alpha, n, MODELS, even) * cloud_only_s(MODELS, even) == pytest.approx(1)


def test_a_longer_trip_asks_for_longer_drafts_until_none_pays():
    found = [fastest_round(0.85, MODELS, LinkCosts(rtt_s=s), 16) for s in (0.0, 0.02, 0.05, 0.5)]
    best, pays = [n for n, _ in found], [rate > 1 / MODELS.target_token_s for _, rate in found]
    assert best[0] < best[1] < best[2] and pays == [True, True, True, False]


def test_a_colocated_round_has_no_trip_and_drafts_at_its_own_speed():
    link = LinkCosts(rtt_s=9)
    here = (4 * 0.001 + 0.020 + 4 * 0.0005) / expected_tokens(0.8, 4)
    assert colocated_s(0.8, 4, MODELS, link) == pytest.approx(here)
    slow = replace(MODELS, colocated_draft_token_s=0.003)
    assert colocated_s(0.8, 4, slow, link) == pytest.approx(here + 4 * 0.002 / expected_tokens(0.8, 4))
    narrow = LinkCosts(rtt_s=9, rate_down=600)  # a message of 60 bytes takes 0.1 s
    assert colocated_s(0.8, 4, MODELS, narrow) == pytest.approx(0.1 / expected_tokens(0.8, 4))


def test_what_a_rounds_draft_costs_once_is_paid_a_round():
    link, slow = LinkCosts(rtt_s=0.05), replace(MODELS, draft_fixed_s=0.002)
    assert round_s(4, slow, link) == pytest.approx(round_s(4, MODELS, link) + 0.002)
    assert round_s(0, slow, link) == round_s(0, MODELS, link)
    assert edge_only_s(slow) == MODELS.draft_token_s


def test_a_long_text_takes_what_its_rounds_make_and_a_short_one_a_little_more():
    link, alphas = LinkCosts(rtt_s=0.05), [0.9, 0.7, 0.8]
    endless = 1 / tokens_per_s(alphas, 4, MODELS, link)
    assert rounds_s(alphas, 4, 4000, MODELS, link) / 4000 == pytest.approx(endless, rel=1e-3)
    assert rounds_s(alphas, 4, 12, MODELS, link) / 12 > 1.05 * endless
    # Two tokens: a round that drafts one, and where that falls another that drafts none.
    both = round_s(1, MODELS, link) + 0.1 * round_s(0, MODELS, link)
    assert rounds_s(alphas, 4, 2, MODELS, link) == pytest.approx(both)


@pytest.mark.parametrize("num_tokens", [16, 32, 100])
@pytest.mark.parametrize(("alpha", "n"), [(0.5, 2), (0.7, 2), (0.8, 4), (0.9, 4)])
@pytest.mark.parametrize("rtt_s", [0.001, 0.08])
def test_rounds_take_once_what_of_the_last_one_is_not_wanted(rtt_s, alpha, n, num_tokens):
    link = LinkCosts(rtt_s)
    once_s = rounds_s(alpha, n, num_tokens, MODELS, link) - num_tokens / tokens_per_s(alpha, n, MODELS, link)
    whole_s = round_s(n, MODELS, link)
    start_s = rounds_start_s(alpha, whole_s)
    assert once_s == pytest.approx(start_s, abs=0.15 * whole_s)
    assert once_s > 0.5 * start_s


def test_edge_only_takes_a_draft_token_a_token():
    assert edge_only_s(MODELS) == 0.001


def test_rounds_can_be_held_against_any_rival():
    link = LinkCosts(rtt_s=0)
    against_cloud = break_even_rtt_s(0.9, 4, MODELS, link)
    assert break_even_rtt_s(0.9, 4, MODELS, link, rival_s=0.020) == against_cloud
    rival_s = colocated_s(0.9, 4, MODELS, link)
    assert break_even_rtt_s(0.9, 4, MODELS, link, rival_s) == pytest.approx(0)
