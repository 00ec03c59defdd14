"""The INT4 rounding that the kernels, the export and quantisation-aware training share."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.export.quantize import fake_quantize, quantize


def test_the_largest_weight_of_a_block_is_exact_and_others_are_half_a_step_away_at_most() -> None:
    weights = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
    blocks, rounded = weights.reshape(40, 3, 32), fake_quantize(weights).reshape(40, 3, 32)
    largest = np.abs(blocks).argmax(-1)[..., None]
    assert np.array_equal(np.take_along_axis(rounded, largest, -1), np.take_along_axis(blocks, largest, -1))
    step = np.abs(quantize(weights).scales)[..., None]
    opposite_end = 7.5 * step  # beyond it only −8 of the signed scale reaches
    inside = np.abs(blocks) <= opposite_end
    assert (np.abs(rounded - blocks) <= 0.5001 * step)[inside].all()


def test_codes_are_packed_low_half_first() -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :3] = [-8, 1, 7]
    matrix = quantize(weights)
    assert matrix.scales.tolist() == [[1.0]]
    assert matrix.packed[0, 0, :2].tolist() == [0 | 9 << 4, 15 | 8 << 4]


def test_halves_round_to_even() -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :4] = [-8, 0.5, 1.5, 2.5]
    assert fake_quantize(weights)[0, :4].tolist() == [-8, 0, 2, 2]


def test_quantising_again_changes_nothing() -> None:
    weights = fake_quantize(np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32))
    assert np.array_equal(fake_quantize(weights), weights)


def test_a_block_of_zeros_stays_zero() -> None:
    assert not fake_quantize(np.zeros((2, 32), np.float32)).any()


def test_a_last_block_that_is_not_full_is_filled_up_with_zeros() -> None:
    weights = np.random.default_rng(3).normal(size=(4, 40)).astype(np.float32)
    matrix = quantize(weights)
    assert (matrix.shape, matrix.packed.shape, matrix.scales.shape) == ((4, 40), (4, 2, 16), (4, 2))
    padded = np.pad(weights, ((0, 0), (0, 24)))
    np.testing.assert_array_equal(matrix.dequantize(), fake_quantize(padded)[:, :40])


def test_int8_keeps_the_largest_weight_of_a_block_and_rounds_the_others_to_its_grid() -> None:
    weights = np.random.default_rng(4).normal(size=(40, 96)).astype(np.float32)
    blocks, rounded = weights.reshape(40, 3, 32), fake_quantize(weights, num_bits=8).reshape(40, 3, 32)
    largest = np.abs(blocks).argmax(-1)[..., None]
    np.testing.assert_array_equal(
        np.take_along_axis(rounded, largest, -1), np.take_along_axis(blocks, largest, -1)
    )
    step = np.abs(quantize(weights, num_bits=8).scales)[..., None]
    assert (np.abs(rounded - blocks) <= step * 1.0001).all()  # half of it but at the end without a code


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        quantize(np.full((1, 32), np.nan, np.float32))
