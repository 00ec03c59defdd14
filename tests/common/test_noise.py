"""The noise is the protocol's: golden lanes and values, and a fast argmax that is exactly the formula."""

import json
import math
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from scipy import stats
from support.golden import assert_golden

from outrider.common.errors import ModelError
from outrider.common.noise import draws as noise
from outrider.common.noise import philox
from outrider.common.noise.draws import (
    Purpose,
    coupled_argmax,
    coupled_top,
    gumbel_at,
    gumbel_of_lanes,
    gumbel_row,
    noise_row,
    top_scores,
    uniform,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())


def brute_force(row, gumbels):
    return int((row.astype(np.float64) + gumbels).argmax())


@pytest.mark.parametrize("case", GOLDEN["noise"], ids=lambda case: f"seed{case['seed']}")
def test_lanes_are_the_golden_ones_exactly_and_noise_to_its_last_bits(case):
    where = (case["seed"], case["position"])
    ids, key = case["token_ids"], (case["purpose"], case["index"])
    row = philox.lanes_row(*where, max(ids) + 1, *key)
    assert row[ids].tolist() == case["lanes"]
    assert philox.lanes_at(*where, ids, *key).tolist() == case["lanes"]
    assert_golden(gumbel_at(*where, ids, *key), case["gumbels"])


def test_extreme_lanes_give_finite_golden_noise():
    extreme = GOLDEN["extreme_lanes"]
    gumbels = gumbel_of_lanes(np.array(extreme["lanes"], np.uint32))
    assert_golden(gumbels, extreme["gumbels"])
    assert gumbels[0] == gumbels.max() < 22.88 and gumbels[-1] == gumbels.min() > -3.14


@pytest.mark.parametrize("case", GOLDEN["uniform"], ids=lambda case: f"seed{case['seed']}")
def test_uniform_draws_are_the_golden_ones(case):
    drawn = uniform(case["seed"], case["start"], case["offset"], case["purpose"])
    assert drawn == case["uniform"] and 0 < drawn < 1
    word = philox.first_word(case["seed"], case["purpose"], case["start"], case["offset"])
    assert word == case["first_word"]


def test_noise_of_a_subset_is_that_of_the_row_whichever_way_it_is_computed():
    rng = np.random.default_rng(1)
    row = gumbel_row(2**63 + 9, 300, 152_000)
    few = rng.choice(152_000, 5, replace=False)  # seeks block by block
    many = rng.choice(152_000, 900, replace=False)  # computes the row
    for ids in (few, many, [151_999], [0, 0, 7, 8], []):
        assert gumbel_at(2**63 + 9, 300, ids).tolist() == row[np.asarray(ids, int)].tolist()


def test_noise_does_not_depend_on_the_size_of_the_vocabulary_or_on_other_draws():
    long = gumbel_row(5, 6, 1001)
    uniform(1, 2, 3, Purpose.ACCEPT)
    assert gumbel_row(5, 6, 77).tolist() == long[:77].tolist()


def test_keys_that_differ_in_one_part_give_different_noise():
    keys = [(5, 6, 8, 0, 0), (4, 6, 8, 0, 0), (5, 7, 8, 0, 0), (5, 6, 8, 1, 0), (5, 6, 8, 0, 1)]
    assert len({tuple(gumbel_row(*key)) for key in keys}) == len(keys)


def test_threads_do_not_disturb_each_other():
    expected = {seed: gumbel_row(seed, 3, 500).tolist() for seed in range(4)}
    wrong = []

    def draw(seed):
        wrong.extend(seed for _ in range(300) if gumbel_row(seed, 3, 500).tolist() != expected[seed])

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("scale", [0, 1e-6, 0.3, 3, 30, 1e4, 1e20, 1e37])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_fast_argmax_is_the_formula_on_scores_of_any_size(scale, dtype):
    rng = np.random.default_rng(int(scale) % 1000)
    for position in range(40):
        vocab_size = int(rng.integers(1, 3000))
        row = (rng.standard_normal(vocab_size) * scale).astype(dtype)
        row += dtype(rng.choice([0, 5, -1e4, 1e6]))
        row[rng.random(vocab_size) < rng.choice([0, 0.5, 0.99])] = -np.inf
        expected = brute_force(row, gumbel_row(77, position, vocab_size))
        assert coupled_argmax(row[None], 77, [position]).tolist() == [expected]


def test_the_fast_argmax_is_the_formula_on_peaks_ties_and_language_like_rows():
    rng = np.random.default_rng(3)
    ranks = -1.5 * np.log(np.arange(1, 8193))
    for position in range(60):
        like_text = rng.permutation(ranks).astype(np.float32)
        peaked = np.where(np.arange(8192) == position, 40, like_text).astype(np.float32)
        tied = np.round(like_text)
        rows = np.stack([like_text, peaked, tied])
        expected = [brute_force(row, gumbel_row(9, position, 8192)) for row in rows]
        assert coupled_argmax(rows, 9, [position] * 3).tolist() == expected


@pytest.mark.parametrize("lanes_of", ["lowest", "highest", "mixed", "equal"])
def test_the_fast_argmax_is_the_formula_on_extreme_lanes(lanes_of):
    rng = np.random.default_rng(4)
    for attempt in range(200):
        size = 400
        near = rng.integers(0, 5, size).astype(np.uint32)
        lanes = {
            "lowest": near,
            "highest": np.uint32(2**32 - 1) - near,
            "mixed": np.where(rng.random(size) < 0.5, near, np.uint32(2**32 - 1) - near).astype(np.uint32),
            "equal": np.full(size, rng.integers(0, 2**32), np.uint32),
        }[lanes_of]
        row = (rng.standard_normal(size) * rng.choice([0, 1e-7, 0.05, 2, 20])).astype(np.float32)
        if attempt % 3 == 0:
            row = np.round(row)
        with mock.patch.object(noise, "lanes_row", return_value=lanes):
            picked = coupled_argmax(row[None], 0, [0])
        assert picked.tolist() == [brute_force(row, gumbel_of_lanes(lanes))]


def in_order(sums, span, count):
    """The definition: largest first, equal ones by id, finite, at most `span` below the first."""
    order = [i for i in np.lexsort((np.arange(len(sums)), -sums)) if np.isfinite(sums[i])]
    return [i for i in order if sums[i] >= sums[order[0]] - span][:count]


@pytest.mark.parametrize("scale", [0, 0.3, 3, 30, 1e4, 1e20])
def test_the_largest_sums_and_scores_are_those_of_the_whole_row_in_order(scale):
    rng = np.random.default_rng(int(scale) % 1000)
    for position in range(30):
        row = (rng.standard_normal(int(rng.integers(1, 3000))) * scale).astype(np.float32)
        row[rng.random(row.size) < rng.choice([0, 0.5, 0.99, 1])] = -np.inf
        if position % 3 == 0:
            row = np.round(row)
        sums = row + gumbel_row(7, position, row.size)
        for span in (0.5, 8.0, np.inf):
            ids, found = coupled_top(row, noise_row(7, position, row.size), 8, span)
            assert ids.tolist() == in_order(sums, span, 8)
            assert found.tolist() == sums[ids].tolist()
            assert top_scores(row, 8, span)[0].tolist() == in_order(row.astype(np.float64), span, 8)
    with pytest.raises(ModelError, match="NaN"):
        top_scores(np.array([0, np.nan], np.float32), 2, 1.0)


def test_equal_sums_go_to_the_lowest_id():
    lanes = np.array([9, 5, 5, 5, 9], np.uint32)
    with mock.patch.object(noise, "lanes_row", return_value=lanes):
        assert coupled_argmax(np.zeros((1, 5), np.float32), 0, [0]).tolist() == [1]


def test_only_the_unmasked_id_can_be_sampled():
    scores = np.full((64, 50), -np.inf, np.float32)
    scores[:, 31] = -1e30
    assert set(coupled_argmax(scores, 1, range(64)).tolist()) == {31}


def test_infinite_rows_follow_the_formula_and_nan_is_the_models_fault():
    scores = np.array([[-np.inf, -np.inf, -np.inf], [0, np.inf, np.inf]], np.float32)
    assert coupled_argmax(scores, 1, [0, 1]).tolist() == [0, 1]
    with pytest.raises(ModelError, match="NaN"):
        coupled_argmax(np.array([[0, np.nan, 1]], np.float32), 1, [0])


def test_samples_follow_the_softmax_of_the_scores():
    scores = np.array([2.0, 1.5, 0.2, -0.5, -1.0, -2.5, -np.inf, 0.9], np.float32)
    weights = np.exp(scores.astype(np.float64))
    num_samples = 40_000
    picks = coupled_argmax(np.tile(scores, (num_samples, 1)), 2024, range(num_samples))
    counts = np.bincount(picks, minlength=8)
    assert counts[6] == 0
    is_possible = weights > 0
    expected = num_samples * weights / weights.sum()
    assert stats.chisquare(counts[is_possible], expected[is_possible]).pvalue > 0.001


def test_samples_at_one_position_over_seeds_follow_the_softmax_too():
    weights = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    scores = np.log(weights).astype(np.float32)[None]
    counts = np.bincount([int(coupled_argmax(scores, seed, [12])[0]) for seed in range(20_000)], minlength=5)
    assert stats.chisquare(counts, 20_000 * weights).pvalue > 0.001


def test_the_gumbel_distribution_has_the_right_mean_and_spread():
    drawn = np.concatenate([gumbel_row(seed, 5, 50_000) for seed in range(4)])
    assert abs(drawn.mean() - 0.5772) < 0.01
    assert abs(drawn.std() - math.pi / math.sqrt(6)) < 0.01
    assert stats.kstest(drawn, "gumbel_r").pvalue > 0.001
