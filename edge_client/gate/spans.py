"""A text rule that looks for stretches of text, and what it finds told in tokens of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from outrider.edge_client.gate.rules import BlockText
from outrider.edge_client.gate.words import Span

Find = Callable[[str, int], Iterable[Span]]
"""(text, start): stretches of it; those that end at or before `start` may be left out."""


class SpanRule:
    """Every token that has a part in what `find` finds in context and block, as far as they go by now."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def doubted(self, block: BlockText) -> set[int]:
        start = len(block.context)
        spans = self._find(block.context + block.text, start)
        found = [(a - start, b - start) for a, b in spans if b > start]
        if not found:
            return set()
        ranges = enumerate(token_ranges(block.pieces))
        return {index for index, (a, b) in ranges if any(a < end and begin < b for begin, end in found)}


def token_ranges(pieces: Iterable[str]) -> list[Span]:
    """Where each token's text lies in the block's. A token that is the beginning of a character has that of
    the token that makes it whole, or none yet."""
    pieces = list(pieces)
    ends = list(accumulate(map(len, pieces)))
    ranges: list[Span] = []
    following = (0, 0)
    for piece, end in zip(reversed(pieces), reversed(ends), strict=True):
        if piece:
            following = (end - len(piece), end)
        ranges.append(following)
    return ranges[::-1]
