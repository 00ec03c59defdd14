"""What each verification method asks of the draft, and what of it crosses the wire (DESIGN §5)."""

from __future__ import annotations

from outrider.common.types import Method

DEFAULT_SUPPORT_SIZE = 16
MAX_SUPPORT_SIZE = 64  # the protocol's

_SENDS_SUPPORT = frozenset({Method.SPARSE, Method.BLOCK})
_IS_COUPLED = frozenset({Method.COUPLED, Method.TYPICAL})  # drafted with the noise both sides share


def num_support(method: Method, support_size: int = DEFAULT_SUPPORT_SIZE) -> int:
    """How many ids the draft is sampled from at each position; 0: all, with the shared noise.

    `support_size` counts where the support is sent. Where it stays on the edge it costs nothing to be large.
    """
    if method in _IS_COUPLED:
        return 0
    return support_size if method in _SENDS_SUPPORT else MAX_SUPPORT_SIZE


def sends_support(method: Method) -> bool:
    """Whether rounds carry `q_support`."""
    return method in _SENDS_SUPPORT


def sends_probs(method: Method) -> bool:
    """Whether rounds carry `q_token_probs`; with `coupled` they are telemetry alone."""
    return method not in _SENDS_SUPPORT and method is not Method.TYPICAL
