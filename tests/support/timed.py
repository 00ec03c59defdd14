"""Tests whose milliseconds hold on a quiet machine only: `make test` asserts the rest of them."""

import pytest

timed = pytest.mark.parametrize("is_timed", [False, pytest.param(True, marks=pytest.mark.slow)])
