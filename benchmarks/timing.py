"""Times of things that take turns, so that whatever drifts on the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def time_s(run: Callable[[], object], num_calls: int = 1) -> float:
    """Returns the seconds that one call takes, the mean of `num_calls`."""
    start_s = time.perf_counter()
    for _ in range(num_calls):
        run()
    return (time.perf_counter() - start_s) / num_calls


def alternate(
    timed: Mapping[str, Callable[[], float]],
    num_turns: int,
    on_turn: Callable[[int], None] = lambda turn: None,
) -> dict[str, list[float]]:
    """Returns what each of `timed` gives, one after the other in every turn, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(-1, num_turns):
        if turn >= 0:
            on_turn(turn)
        for name, run in timed.items():
            value = run()
            if turn >= 0:
                seconds[name].append(value)
    return seconds


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the median of the turns' own ratios."""
    return statistics.median(u / low for u, low in zip(upper, lower, strict=True))
