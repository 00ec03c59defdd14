"""Defines the text of a drafted block, and the protocol of a rule that looks at it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from outrider.edge_client.gate.words import Span

CONTEXT_TOKENS = 32  # of the text before a block, decoded for the rules

NewDecoder = Callable[[list[int] | None], Callable[[int], str]]
"""`EdgeTokenizer.decoder`: given what came before, an id in, the text that became final with it out."""


class BlockText:
    """Decodes a drafted block as it grows. `pieces[i]` is the text that token i completes, empty while a
    character is incomplete. A word or a number may begin in the `context`."""

    def __init__(self, text_ids: Sequence[int], new_decoder: NewDecoder) -> None:
        context_ids = list(text_ids[-CONTEXT_TOKENS:])
        self.context = "".join(map(new_decoder(None), context_ids))
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self._decode = new_decoder(context_ids)

    def append(self, token_id: int) -> None:
        """Adds a drafted token."""
        self.token_ids.append(token_id)
        self.pieces.append(self._decode(token_id))

    @property
    def text(self) -> str:
        """Returns the block's text so far."""
        return "".join(self.pieces)


class TextRule(Protocol):
    """Finds tokens for the target. A rule has no state: one object serves all sessions."""

    def hard_tokens(self, block: BlockText) -> Collection[int]:
        """Returns indices of the block's tokens that only the target may write, as far as the context and the
        block so far show it. It is called after every drafted token."""


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
