"""Tells what followed the longest run of tokens that occurred before, by how often it did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from outrider.common.types import Support, TokenIds
from outrider.edge_client.drafting.copying.contexts import SEPARATOR, Contexts, TokenText, longest_match
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Continuations

_Places = list[tuple[Contexts, list[int]]]

# What is learned about together: runs of at most so many tokens, by the name of their range.
_RANGES = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"))
_LONG = "17+"


class CopyExpander:
    """Tells, for one tree, every token that followed the longest run, the most frequent first, of equally frequent ones
    the most recent. A gap is the logarithm of the ratio of two counts.

    A path that one of the tokens told leads to needs no search: its places are the next ones. Neither does one whose
    run must be too short: with each token it grows by one at most.
    """

    num_runs = 0

    def __init__(
        self,
        text: TokenText,
        searched: Sequence[Contexts],
        name: str,
        most: int,
        min_match: int = 1,
        num_tokens: int = SEPARATOR,
    ) -> None:
        """At most `most` places of each of the `searched` are looked at, and none for a run of less than `min_match`
        tokens; `name` begins the sources' names. Ids that are not below `num_tokens`, of a damaged file, are left
        out."""
        self._text, self._searched, self._name, self._most = text, searched, name, most
        self._min_match, self._num_tokens = min_match, num_tokens
        self._nothing = Continuations((), (), f"{name}-{_range(0)}")
        # By path. Without places the length is a bound of that of the longest run.
        self._found: dict[TokenIds, tuple[int, _Places]] = {}

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        """See `Expander.expand`."""
        return [self.tell(path) for path in paths]

    def tell(self, path: TokenIds) -> Continuations:
        """Returns what followed the text and a path."""
        length, counts = self.count(path)
        if not counts:
            return self._nothing
        gaps = tuple(math.log(counts[0][1] / count) for _, count in counts)
        return Continuations(
            tuple(token_id for token_id, _ in counts), gaps, f"{self._name}-{_range(length)}"
        )

    def count(self, path: TokenIds) -> tuple[int, list[tuple[int, int]]]:
        """Returns the length of the longest run, and the tokens that followed it with their counts; without any the
        length means nothing."""
        length, places = self._find(path)
        if not places:
            return length, []
        followers = (contexts.follower(end, path) for contexts, ends in places for end in ends)
        known = (each for each in followers if each is not None and each < self._num_tokens)
        return length, Counter(known).most_common(MAX_CONTINUATIONS)

    def _find(self, path: TokenIds) -> tuple[int, _Places]:
        found = self._follow(path)
        if found is None:
            before = self._found.get(path[:-1]) if path else None
            if before is not None and before[0] + 1 < self._min_match:
                found = before[0] + 1, []
            else:
                context = self._text.context_after(path)
                found = longest_match(self._searched, context, self._most, self._min_match)
        self._found[path] = found
        return found

    def _follow(self, path: TokenIds) -> tuple[int, _Places] | None:
        """Returns the next places of those that were found before the path's last token, where it followed there."""
        if path[:-1] not in self._found or not path:
            return None
        before, token_id = path[:-1], path[-1]
        length, places = self._found[before]
        next_places = [
            (contexts, [end + 1 for end in ends if contexts.follower(end, before) == token_id])
            for contexts, ends in places
        ]
        kept = [(contexts, ends) for contexts, ends in next_places if ends]
        return (length + 1, kept) if kept else None


class CopySupports:
    """Tells the same tokens as a distribution: the more often one followed, the likelier."""

    num_runs = 0

    def __init__(self, expander: CopyExpander) -> None:
        self._expander = expander

    def expand(self, paths: Sequence[TokenIds]) -> list[Support | None]:
        """See `Expander.expand`."""
        return [self._support(path) for path in paths]

    def _support(self, path: TokenIds) -> Support | None:
        _, counts = self._expander.count(path)
        return Support(*map(tuple, zip(*counts, strict=True))) if counts else None


def _range(length: int) -> str:
    return next((name for most, name in _RANGES if length <= most), _LONG)
