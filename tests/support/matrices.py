"""Matrices of cases of which `make test` runs a part and `make test-slow` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def one_of(count: int, *axes: Iterable[Any]) -> list[ParameterSet]:
    """Returns all combinations of the axes' values; all but one in `count` are marked as slow.

    The others lie on diagonals: every value is among them if another axis has `count` values or more, and so is every
    pair of values of two axes if a third one has.
    """
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=[pytest.mark.slow] if sum(index for index, _ in combination) % count else [],
        )
        for combination in itertools.product(*(list(enumerate(axis)) for axis in axes))
    ]
