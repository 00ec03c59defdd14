"""Finds where the newest tokens occurred before: the one index of all drafts that copy.

A context is what comes before a place of a text, read backwards from it, at most `MAX_MATCH` tokens. Sorted, the places
whose contexts begin alike are neighbours: one binary search finds the longest run of tokens that ends both there and
here, and all places that share it. Each place has a token that followed.

Tokens are kept as 32-bit little-endian integers. The bytes before a place, reversed, are then its context with
big-endian integers, so that bytes compare as tokens do.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Any, Protocol

from outrider.common.types import TokenIds

TOKEN_BYTES = 4
SEPARATOR = 2**32 - 1  # is no token, and ends each of several texts
MAX_MATCH = 32  # tokens of a context that are compared; longer runs are equally good
_BULK = 32  # new places from which sorting all at once is cheaper than finding each one's place
_AFTER_ALL = b"\xff" * (TOKEN_BYTES * MAX_MATCH + 1)  # sorts after every continuation of a context


def pack(token_ids: Sequence[int]) -> bytes:
    """Returns ids as a text keeps them."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


class Contexts(Protocol):
    """Holds the contexts of one text, or of several that are separated."""

    def match(self, context: bytes) -> int:
        """Returns how many tokens of `context` the longest equal run has; 0 where there is none."""

    def ends(self, context: bytes, length: int, most: int) -> list[int]:
        """Returns at most `most` places before which the first `length` tokens of `context` occurred: the most recent
        ones, latest first, where the text grows, else spread evenly over all."""

    def follower(self, end: int, path: TokenIds) -> int | None:
        """Returns the token at a place, of the text and `path` after it; None where a text ends there."""


class _Sorted:
    """Searches places sorted by their contexts, in a text that begins `start` bytes into its buffer."""

    def __init__(
        self, text: bytes | bytearray | mmap, order: Sequence[int], max_match: int, start: int = 0
    ) -> None:
        self._text, self._order, self._start = text, order, start
        self._max_bytes = TOKEN_BYTES * max_match

    def context(self, end: int) -> Any:
        """Returns the context of a place: bytes, or a bytearray, which compares with them."""
        stop = self._start + TOKEN_BYTES * end
        return self._text[max(self._start, stop - self._max_bytes) : stop][::-1]

    def match(self, context: bytes) -> int:
        """See `Contexts.match`."""
        context, order = context[: self._max_bytes], self._order
        place = bisect_left(order, context, key=self.context)
        near = order[max(0, place - 1) : place + 1]
        return max((_num_common(context, self.context(end)) for end in near), default=0)

    def range(self, context: bytes, length: int) -> tuple[int, int]:
        """Returns the first place of the order with the first `length` tokens of a context, and the one after the
        last."""
        beginning = context[: TOKEN_BYTES * length]
        first = bisect_left(self._order, beginning, key=self.context)
        return first, bisect_left(self._order, beginning + _AFTER_ALL, first, key=self.context)


def _num_common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Returns how many tokens two contexts have in common before they first differ."""
    num_bytes = min(len(one), len(other))
    differing = int.from_bytes(one[:num_bytes], "big") ^ int.from_bytes(other[:num_bytes], "big")
    return (num_bytes - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


class SortedContexts:
    """Holds the contexts of texts that do not grow, by an order that was made before (`sorting.py`)."""

    def __init__(
        self, text: bytes | mmap, order: Sequence[int], start: int = 0, stop: int | None = None
    ) -> None:
        """The texts, each followed by `SEPARATOR`, begin `start` bytes into the buffer and end `stop` bytes into it."""
        self._text, self._order, self._start = text, order, start
        self._stop = len(text) if stop is None else stop
        self._sorted = _Sorted(text, order, MAX_MATCH, start)
        self.context = self._sorted.context

    def match(self, context: bytes) -> int:
        """See `Contexts.match`."""
        return self._sorted.match(context)

    def ends(self, context: bytes, length: int, most: int) -> list[int]:
        """See `Contexts.ends`."""
        first, after = self._sorted.range(context, length)
        step = max(1, (after - first) // most)
        return list(self._order[first:after:step][:most])

    def follower(self, end: int, path: TokenIds) -> int | None:
        """See `Contexts.follower`."""
        place = self._start + TOKEN_BYTES * end
        if place >= self._stop:  # of a damaged file
            return None
        found = int.from_bytes(self._text[place : place + TOKEN_BYTES], "little")
        return None if found == SEPARATOR else found


class TokenText:
    """Holds a text that grows and is rolled back."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._bytes = bytearray()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        self.token_ids.extend(token_ids)
        self._bytes += pack(token_ids)

    def truncate(self, position: int) -> None:
        """Drops all tokens but the first `position`."""
        del self.token_ids[position:], self._bytes[TOKEN_BYTES * position :]

    def context_after(self, path: Sequence[int]) -> bytes:
        """Returns the context of the place after the text and `path`."""
        newest = self._bytes[-TOKEN_BYTES * MAX_MATCH :] + pack(path)
        return bytes(newest[: -TOKEN_BYTES * MAX_MATCH - 1 : -1])

    def check_integrity(self) -> None:
        """Asserts that both ways to keep the text agree."""
        assert bytes(self._bytes) == pack(self.token_ids), "the bytes are not the text's"


class GrowingContexts(TokenText):
    """Holds the contexts of such a text's places that have a token after them. Adding or dropping a token takes a
    binary search."""

    def __init__(self, max_match: int = MAX_MATCH) -> None:
        super().__init__()
        self._places: list[int] = []
        self._sorted = _Sorted(self._bytes, self._places, max_match)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        new = range(max(1, len(self.token_ids)), len(self.token_ids) + len(token_ids))
        super().extend(token_ids)
        if len(new) >= _BULK:
            self._places.extend(new)
            self._places.sort(key=self._sorted.context)
            return
        for end in new:
            insort(self._places, end, key=self._sorted.context)

    def truncate(self, position: int) -> None:
        """Drops all tokens but the first `position`."""
        dropped = range(len(self.token_ids) - 1, max(1, position) - 1, -1)
        if len(dropped) >= _BULK:
            self._places[:] = [end for end in self._places if end < position]
        else:
            context = self._sorted.context
            for end in dropped:  # of equal contexts the latest is the last
                del self._places[bisect_right(self._places, context(end), key=context) - 1]
        super().truncate(position)

    def match(self, context: bytes) -> int:
        """See `Contexts.match`."""
        return self._sorted.match(context)

    def ends(self, context: bytes, length: int, most: int) -> list[int]:
        """See `Contexts.ends`."""
        first, after = self._sorted.range(context, length)
        return sorted(self._places[first:after], reverse=True)[:most]

    def follower(self, end: int, path: TokenIds) -> int | None:
        """See `Contexts.follower`."""
        num_tokens = len(self.token_ids)
        return self.token_ids[end] if end < num_tokens else path[end - num_tokens]

    def check_integrity(self) -> None:
        """Asserts that the index equals one built anew."""
        super().check_integrity()
        ends = range(1, len(self.token_ids))
        expected = sorted(ends, key=lambda end: (bytes(self._sorted.context(end)), end))
        assert self._places == expected, "the index is not the text's"


def longest_match(
    every: Iterable[Contexts], context: bytes, most: int, min_match: int = 1
) -> tuple[int, list[tuple[Contexts, list[int]]]]:
    """Returns the length of the longest run that occurred anywhere, and its places, at most `most` of each; none for a
    run of less than `min_match` tokens."""
    lengths = [(contexts, contexts.match(context)) for contexts in every]
    longest = max((length for _, length in lengths), default=0)
    if longest < min_match:
        return longest, []
    return longest, [
        (each, each.ends(context, longest, most)) for each, length in lengths if length == longest
    ]
