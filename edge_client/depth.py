"""How many tokens to draft in the next round: a small protocol and a registry of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.errors import UsageError
from edge_client.stats import RoundRecord


class DepthPolicy(Protocol):
    """Pure: decides from the rounds it was shown. The session clips the answer to text and context."""

    def next_depth(self) -> int: ...

    def observe(self, record: RoundRecord) -> None: ...


class FixedDepth:
    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def next_depth(self) -> int:
        return self._num_speculative_tokens

    def observe(self, record: RoundRecord) -> None:
        pass


_POLICIES: dict[str, Callable[[int], DepthPolicy]] = {"fixed": FixedDepth}


def create_depth_policy(name: str, num_speculative_tokens: int) -> DepthPolicy:
    """Raises `UsageError` for a name that is not built."""
    if name not in _POLICIES:
        raise UsageError(f"depth policy {name}: want one of {', '.join(_POLICIES)}")
    return _POLICIES[name](num_speculative_tokens)
