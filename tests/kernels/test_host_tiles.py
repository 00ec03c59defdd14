"""Small products and turned matrices, of every size that has a loop of its own: whole numbers, so exactly."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from outrider.kernels.host.tiles import MOST_PANELS, PANEL, TILE, add_product, turn


@numba.njit  # type: ignore[untyped-decorator]
def call_turn(matrix: object, out: object) -> None:
    turn(matrix, out)


@pytest.mark.parametrize("num_rows", range(1, TILE + 1))
def test_products_of_parts_of_matrices_are_added_there_and_nowhere_else(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    for num_inputs in (1, 7, 64):
        for num_columns in range(PANEL, (MOST_PANELS + 2) * PANEL, PANEL):
            rows, matrix, sums = (
                rng.integers(-9, 10, shape).astype(np.float32)
                for shape in ((num_rows, num_inputs + 3), (num_inputs + 1, num_columns + 5), (TILE + 1, 200))
            )
            expected = sums.copy()
            expected[1 : num_rows + 1, 3 : num_columns + 3] += (
                rows[:, 2 : num_inputs + 2] @ matrix[1:, 4 : num_columns + 4]
            )
            add_product(
                rows[:, 2 : num_inputs + 2], matrix[1:, 4 : num_columns + 4], sums[1 : num_rows + 1, 3:]
            )
            np.testing.assert_array_equal(sums, expected)


def test_a_matrix_is_turned_over() -> None:
    for num_rows, num_columns in ((PANEL, PANEL), (64, 16), (16, 80)):
        matrix = np.arange(num_rows * num_columns, dtype=np.float32).reshape(num_rows, num_columns)
        out = np.empty((num_columns, num_rows), np.float32)
        call_turn(matrix, out)
        np.testing.assert_array_equal(out, matrix.T)
