"""What `make test` runs of a matrix."""

from __future__ import annotations

import itertools

from support.matrices import one_of


def test_every_value_is_in_the_part_that_make_test_runs() -> None:
    quick = [case.values for case in one_of(2, "ab", [1, 2, 3]) if not case.marks]
    assert quick == [("a", 1), ("a", 3), ("b", 2)]
    every = {case.values for case in one_of(2, "ab", [1, 2, 3])}
    assert every == set(itertools.product("ab", [1, 2, 3]))


def test_every_pair_is_in_it_where_a_third_axis_is_long_enough() -> None:
    quick = [case.values for case in one_of(2, "abc", [1, 2], "xyz") if not case.marks]
    assert {values[:2] for values in quick} == set(itertools.product("abc", [1, 2]))
