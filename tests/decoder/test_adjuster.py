"""The draft length by the mean of the last ten acceptance rates."""

from __future__ import annotations

import pytest

import outrider
from outrider import AdaptiveDepthAdjuster
from outrider.decoder.depth import AdjustedDepth
from outrider.edge_client.core.stats import RoundOutcome, RoundRecord


def test_it_moves_by_one_where_the_mean_leaves_a_tenth_around_the_target() -> None:
    adjuster = AdaptiveDepthAdjuster()
    assert (adjuster.target_rate, adjuster.min_depth, adjuster.max_depth, adjuster.depth) == (0.7, 2, 8, 2)
    assert [adjuster.update(rate) for rate in (1.0, 0.9, 0.9, 0.0, 0.7)] == [3, 4, 5, 5, 5]


def test_it_stays_within_its_range_and_forgets_what_is_older_than_ten() -> None:
    adjuster = AdaptiveDepthAdjuster(0.5, 1, 3)
    assert [adjuster.update(1.0) for _ in range(10)] == [2, *[3] * 9]
    # With nine old ones and one new the mean is .9, with four .6, then .5; with seven new ones it is .3.
    assert [adjuster.update(0.0) for _ in range(8)] == [3, 3, 3, 3, 3, 3, 2, 1]


def test_rounds_that_drafted_nothing_or_got_no_answer_say_nothing() -> None:
    adjuster = AdaptiveDepthAdjuster(depth=4)
    policy = AdjustedDepth(adjuster)
    policy.observe(RoundRecord(1, 0))
    policy.observe(RoundRecord(2, 4, 4, outcome=RoundOutcome.TIMED_OUT))
    assert policy.next_depth() == 4 and policy.stop_rule() is None
    policy.observe(RoundRecord(3, 4, 4))
    assert policy.next_depth() == adjuster.depth == 5


@pytest.mark.parametrize("arguments", [(1.5, 2, 8), (0.7, 0, 8), (0.7, 3, 2)])
def test_what_is_no_range_is_refused(arguments: tuple[float, int, int]) -> None:
    with pytest.raises(outrider.ConfigError, match="want"):
        AdaptiveDepthAdjuster(*arguments)
    with pytest.raises(outrider.ConfigError, match="acceptance_rate is 3"):
        AdaptiveDepthAdjuster().update(3.0)
