"""What is believed of a draft's acceptance: much of the usual, soon moved by a draft that is not."""

from __future__ import annotations

import pytest

from outrider.edge_client.controller.acceptance import AcceptanceEstimator
from outrider.edge_client.controller.acceptance_posterior import ALPHAS, AcceptancePosterior, posterior_of
from outrider.edge_client.core.stats import RoundRecord


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


def mean_of(posterior: AcceptancePosterior) -> float:
    return sum(alpha * weight for alpha, weight in zip(ALPHAS, posterior.probabilities, strict=True))


def test_a_rate_that_changes_is_believed_whatever_came_before() -> None:
    posterior = AcceptancePosterior()
    for number in range(300):
        posterior.observe(int(number % 5 == 0), int(number % 5 != 0))
    assert mean_of(posterior) == pytest.approx(0.2, abs=0.08)
    for _ in range(40):  # as where a text begins to repeat itself, which prompt lookup then copies
        posterior.observe(1, 0)
    assert mean_of(posterior) > 0.85
    assert sum(posterior.probabilities) == pytest.approx(1)


def test_a_round_without_a_proposal_counts_against_rounds_and_a_last_token_does_not() -> None:
    means = {}
    for has_no_proposal in (False, True):
        acceptance = AcceptanceEstimator()
        for _ in range(8):
            acceptance.observe(RoundRecord(1, 0, has_no_proposal=has_no_proposal))
        means[has_no_proposal] = mean_of(acceptance.posterior)
    assert means[False] == pytest.approx(mean(0, 0)) and means[True] < 0.6
