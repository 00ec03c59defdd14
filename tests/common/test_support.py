"""The draft's integer distribution, exact by enumeration; the chosen candidate, a sample of the residual."""

import math
import time

import numpy as np
import pytest

from outrider.common.errors import ModelError
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.noise.draws import Purpose, uniform
from outrider.common.sampling.support import (
    TOTAL_WEIGHT,
    choose_candidate,
    make_support,
    sample_support,
    support_prob,
)
from outrider.common.types import Candidate, Method, Support

WORDS = 2**64


def test_the_inverse_cdf_gives_each_id_exactly_its_share_of_the_words():
    """An id's words are one interval, so its two ends are all there is to enumerate."""
    support = Support((7, 2, 9, 4), (8000, 5000, 3000, 384))
    total, start = sum(support.weights), 0
    for token_id, weight in zip(support.token_ids, support.weights, strict=True):
        first, last = -(-start * WORDS // total), -(-(start + weight) * WORDS // total) - 1
        assert sample_support(support, first) == sample_support(support, last) == token_id
        assert abs((last - first + 1) - weight * WORDS / total) <= WORDS * 1e-15
        start += weight
    assert sample_support(support, 0) == 7 and sample_support(support, WORDS - 1) == 4


def test_every_word_of_a_coarse_grid_is_counted_by_its_weight():
    support = Support((3, 1, 2), (5, 2, 1))
    picks = [sample_support(support, (8 * i + 3) << 48) for i in range(2**13)]
    assert [picks.count(i) for i in (3, 1, 2)] == [5 * 2**10, 2 * 2**10, 2**10]


def test_weights_sum_to_about_the_total_and_follow_the_distribution():
    rng = np.random.default_rng(0)
    for num_ids in (1, 2, 16, 64):
        scores = rng.normal(scale=2.0, size=500).astype(np.float32)
        support = make_support(scores, num_ids)
        kept = np.argsort(-scores, kind="stable")[: len(support.token_ids)]
        assert support.token_ids == tuple(kept.tolist())
        if num_ids == 1:
            assert support.weights == (1,)
            continue
        assert abs(sum(support.weights) - TOTAL_WEIGHT) <= len(support.token_ids)
        best = np.argsort(-scores, kind="stable")[:num_ids]
        probs = np.exp(scores[best].astype(np.float64))
        probs /= probs.sum()
        found = [support_prob(support, int(i)) for i in best]
        assert np.allclose(found, probs, atol=1e-4) and math.isclose(sum(found), 1.0)


def test_weights_of_zero_and_masked_ids_are_left_out():
    scores = np.array([0.0, -20.0, 1.0, -math.inf, -20.0, 0.5], np.float32)
    support = make_support(scores, 6)
    assert support.token_ids == (2, 5, 0) and min(support.weights) > 0
    assert support_prob(support, 3) == support_prob(support, 1) == 0.0
    assert make_support(np.array([-math.inf, 3.0, -math.inf], np.float32), 3) == Support((1,), (1,))


@pytest.mark.parametrize("vocab_size", [5, 40, 4000])
def test_ties_go_to_the_lowest_ids(vocab_size):
    scores = np.zeros(vocab_size, np.float32)
    assert make_support(scores, 3).token_ids == (0, 1, 2)
    scores[[4, 3]] = 1.0
    assert make_support(scores, 4).token_ids == (3, 4, 0, 1)


def test_the_fast_way_finds_what_sorting_finds():
    rng = np.random.default_rng(1)
    for vocab_size in (1, 15, 16, 17, 1000, 1025, 8192, 32_000):
        for scale in (0.1, 3.0):
            scores = rng.normal(scale=scale, size=vocab_size).astype(np.float32).round(2)  # many ties
            scores[rng.random(vocab_size) < 0.5] = -math.inf
            scores[-1] = 0.0
            support = make_support(scores, 16)
            best = np.argsort(-scores, kind="stable")[:16]
            assert list(support.token_ids) == [int(i) for i in best if support_prob(support, int(i))]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error(value):
    with pytest.raises(ModelError):
        make_support(np.full(100, value, np.float32), 8)


def test_where_everything_is_masked_id_0_is_certain_as_it_is_for_the_target():
    assert make_support(np.full(100, -math.inf, np.float32), 8) == Support((0,), (1,))


@pytest.mark.slow  # in milliseconds
@pytest.mark.parametrize(("vocab_size", "limit_us"), [(8192, 500), (152_064, 3000)])
def test_a_support_costs_a_fraction_of_a_drafted_token(vocab_size, limit_us):
    rng = np.random.default_rng(2)
    scores = rng.normal(scale=2.0, size=vocab_size).astype(np.float32)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        make_support(scores, 64)
        times.append(time.perf_counter() - start)
    assert min(times) * 1e6 < limit_us


# ------------------------------------------------------------------------------------- candidates


def test_the_chosen_candidate_is_distributed_as_the_residual():
    target, support = np.array([0.5, 0.2, 0.2, 0.1]), Support((0, 1), (1, 3))
    draft = np.array([0.25, 0.75, 0.0, 0.0])
    residual = np.maximum(target - draft, 0)
    residual /= residual.sum()
    rng = np.random.default_rng(3)
    counts = np.zeros(4)
    for position in range(20_000):
        chosen, first = None, 0
        while chosen is None:
            ids = rng.choice(4, size=2, p=target)
            candidates = [Candidate(int(i), float(target[i])) for i in ids]
            chosen = choose_candidate(support, candidates, 5, position, first)
            first += 2
        counts[chosen] += 1
    expected = residual * counts.sum()
    assert counts[1] == 0
    kept = expected > 0
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 16.3  # chi-square, 3 - 1, .001


def test_a_candidate_outside_the_support_passes_and_one_drafted_too_often_never_does():
    support = Support((4, 5), (3, 1))
    assert choose_candidate(support, [Candidate(4, 0.7), Candidate(9, 0.01)], 1, 10, 0) == 9
    assert choose_candidate(support, [Candidate(4, 0.75), Candidate(4, 0.1)], 1, 10, 0) is None
    assert choose_candidate(support, [Candidate(9, 0.0)], 1, 10, 0) is None, "p was rounded to nothing"
    assert choose_candidate(support, [], 1, 10, 0) is None


def test_draws_of_later_candidates_are_others():
    support = Support((4,), (1,))
    candidate = Candidate(5, 1.0)
    half = Support((5, 4), (1, 1))
    assert choose_candidate(support, [candidate], 3, 20, 7) == 5
    for index in range(20):
        passes = uniform(3, 20, index, Purpose.RESIDUAL) < 0.5
        assert (choose_candidate(half, [candidate], 3, 20, index) == 5) is passes


# ------------------------------------------------------------------------------ what methods need


def test_each_method_says_what_it_needs_of_the_draft():
    assert {m: num_support(m, 20) for m in Method} == {
        Method.COUPLED: 0,
        Method.SPARSE: 20,
        Method.CANDIDATES: 64,
        Method.BLOCK: 20,
        Method.SHORTCUT: 64,
        Method.SCALAR_RESIDUAL: 64,
        Method.THRESHOLD: 64,
        Method.TYPICAL: 0,
    }
    assert [m for m in Method if sends_support(m)] == [Method.SPARSE, Method.BLOCK]
    assert [m for m in Method if not sends_probs(m)] == [Method.SPARSE, Method.BLOCK, Method.TYPICAL]
