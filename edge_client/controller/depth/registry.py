"""Depth policies by name, each imported when it is created."""

from __future__ import annotations

from collections.abc import Callable

from outrider.common.errors import UsageError
from outrider.edge_client.controller.depth.base import DepthPolicy


def _create_fixed(start: int | None) -> DepthPolicy:
    from outrider.edge_client.controller.depth.fixed import DEFAULT_DEPTH, FixedDepth

    return FixedDepth(DEFAULT_DEPTH if start is None else start)


def _create_ratio(start: int | None) -> DepthPolicy:
    from outrider.edge_client.controller.depth import ratio

    start = ratio.DEFAULT_START if start is None else start
    return ratio.RatioDepth(_checked("ratio", start, ratio.MIN_DEPTH, ratio.MAX_DEPTH))


def _create_window(start: int | None) -> DepthPolicy:
    from outrider.edge_client.controller.depth import window

    start = window.DEFAULT_START if start is None else start
    return window.WindowDepth(_checked("window", start, window.MIN_DEPTH, window.MAX_DEPTH))


def _create_optimal(start: int | None) -> DepthPolicy:
    from outrider.edge_client.controller.depth import optimal
    from outrider.edge_client.controller.settings import MAX_DEPTH

    start = optimal.DEFAULT_START if start is None else start
    return optimal.OptimalDepth(_checked("optimal", start, 1, MAX_DEPTH))


_FACTORIES: dict[str, Callable[[int | None], DepthPolicy]] = {
    "fixed": _create_fixed,
    "ratio": _create_ratio,
    "window": _create_window,
    "optimal": _create_optimal,
}
DEPTH_POLICIES = tuple(_FACTORIES)


def create_depth_policy(name: str, num_speculative_tokens: int | None = None) -> DepthPolicy:
    """Returns a new policy. `num_speculative_tokens` is the length of `fixed` and the start of the others.

    None is each policy's own start. Raises `UsageError` for an unknown name and a start outside the range.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UsageError(f"unknown depth policy {name!r}; known: {', '.join(DEPTH_POLICIES)}")
    return factory(num_speculative_tokens)


def _checked(name: str, start: int, lowest: int, highest: int) -> int:
    if not lowest <= start <= highest:
        raise UsageError(
            f"--num-speculative-tokens {start}: --depth-policy {name} starts between {lowest} and {highest}"
        )
    return start
