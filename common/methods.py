"""Lists what each verification method needs from the draft, and which of it is sent (docs/design.md §5)."""

from __future__ import annotations

from outrider.common.types import Method

DEFAULT_SUPPORT_SIZE = 16
MAX_SUPPORT_SIZE = 64  # the protocol's

_SENDS_SUPPORT = frozenset({Method.SPARSE, Method.BLOCK})
_TAKES_TREES = frozenset({Method.COUPLED, Method.SPARSE, Method.TYPICAL, Method.THRESHOLD})
_IS_COUPLED = frozenset({Method.COUPLED, Method.TYPICAL})  # drafted with the noise both sides share


def num_support(method: Method, support_size: int = DEFAULT_SUPPORT_SIZE) -> int:
    """Returns how many ids the draft is sampled from at each position; 0 means all, with the shared noise.

    `support_size` applies where the support is sent. Where it stays on the edge, it has the largest size.
    """
    if method in _IS_COUPLED:
        return 0
    return support_size if method in _SENDS_SUPPORT else MAX_SUPPORT_SIZE


def sends_support(method: Method) -> bool:
    """Returns whether rounds contain `q_support`."""
    return method in _SENDS_SUPPORT


def takes_trees(method: Method) -> bool:
    """Returns whether a draft may be a tree."""
    return method in _TAKES_TREES


def drafts_trees(method: Method) -> bool:
    """Returns whether our own drafts are trees: `threshold` judges by a distribution that they do not have."""
    return method in _TAKES_TREES and (method in _IS_COUPLED or method in _SENDS_SUPPORT)


def sends_probs(method: Method) -> bool:
    """Returns whether rounds contain `q_token_probs`; with `coupled` they are telemetry alone."""
    return method not in _SENDS_SUPPORT and method is not Method.TYPICAL
