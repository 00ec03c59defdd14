"""What is believed of a draft's acceptance: much of the usual, soon moved by a draft that is not."""

from __future__ import annotations

import pytest

from outrider.edge_client.controller.acceptance_posterior import ALPHAS, posterior_of


def mean(num_stood: float, num_fell: float) -> float:
    return sum(
        alpha * weight for alpha, weight in zip(ALPHAS, posterior_of(num_stood, num_fell), strict=True)
    )


def test_beliefs_are_probabilities_that_begin_near_what_drafts_usually_have() -> None:
    assert sum(posterior_of(0, 0)) == pytest.approx(1)
    assert mean(0, 0) == pytest.approx(0.8, abs=0.03)


def test_a_little_luck_moves_little() -> None:
    assert mean(4, 0) - mean(0, 0) < 0.05
    assert mean(0, 0) - mean(3, 3) < 0.1


@pytest.mark.parametrize(("num_stood", "num_fell"), [(12, 28), (76, 4), (80, 20)])
def test_many_judged_tokens_tell_whatever_was_believed(num_stood: int, num_fell: int) -> None:
    assert mean(num_stood, num_fell) == pytest.approx(num_stood / (num_stood + num_fell), abs=0.05)
