"""Turns spans of text that a rule finds into tokens of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from outrider.edge_client.gate.text_rule import BlockText
from outrider.edge_client.gate.words import Span

Find = Callable[[str, int], Iterable[Span]]
"""(text, start): stretches of it; those that end at or before `start` may be left out."""


class SpanRule:
    """Marks every token that overlaps with a span that `find` returns in context and block so far."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def hard_tokens(self, block: BlockText) -> set[int]:
        """Returns the indices of those tokens."""
        start = len(block.context)
        spans = self._find(block.context + block.text, start)
        found = [(a - start, b - start) for a, b in spans if b > start]
        if not found:
            return set()
        ranges = enumerate(token_ranges(block.pieces))
        return {index for index, (a, b) in ranges if any(a < end and begin < b for begin, end in found)}


def token_ranges(pieces: Iterable[str]) -> list[Span]:
    """Returns each token's range of characters in the block. A token with only the first bytes of a character
    has the range of the token that completes it, or none yet."""
    pieces = list(pieces)
    ends = list(accumulate(map(len, pieces)))
    ranges: list[Span] = []
    following = (0, 0)
    for piece, end in zip(reversed(pieces), reversed(ends), strict=True):
        if piece:
            following = (end - len(piece), end)
        ranges.append(following)
    return ranges[::-1]
