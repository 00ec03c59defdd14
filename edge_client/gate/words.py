"""Finds rare words, by counts of the words in the text that a gate was calibrated with.

The counts are of the user's own text: a draft that writes programs, letters or another language than English
has its own common words. Words are runs of letters without regard to case; identifiers are cut at `_` and
digits. Scripts without spaces between words are not supported.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

DEFAULT_RARE_PER_MILLION = 10.0
Span = tuple[int, int]  # characters of a text: from (inclusive), to (exclusive)
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Holds how often words occur in a text of `num_words` words; words rarer than one in a million may be
    left out."""

    num_words: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    def common(self, per_million: float) -> CommonWords:
        """Returns words that occur at least `per_million` times in a million words, and at least once."""
        least = per_million * self.num_words / 1e6
        return CommonWords(word for word, count in self.counts.items() if count >= least)


class CommonWords:
    """Holds a set of words and finds all others in a text."""

    def __init__(self, words: Iterable[str]) -> None:
        self._sorted = sorted(words)
        self._words = frozenset(self._sorted)

    def find_others(self, text: str, start: int) -> Iterator[Span]:
        """Yields the spans of other words that end after `start`. The last word may be incomplete, and is
        reported only where no common word begins with it. Single letters are never reported."""
        for match in _WORD.finditer(text):
            if match.end() <= start or match.end() - match.start() == 1:
                continue
            word = match[0].casefold()
            if not (word in self._words if match.end() < len(text) else self._has_beginning(word)):
                yield match.span()

    def _has_beginning(self, word: str) -> bool:
        place = bisect_left(self._sorted, word)
        return place < len(self._sorted) and self._sorted[place].startswith(word)


def count_words(texts: Iterable[str]) -> WordCounts:
    """Returns the counts of all texts together, without words rarer than one in a million."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word.casefold() for word in _WORD.findall(text))
    total = counts.total()
    return WordCounts(total, {word: n for word, n in counts.items() if n * 1_000_000 >= total})


def packed(words: WordCounts) -> dict[str, object]:
    """Returns counts in the form of a gate file: the words of one count on one line, frequent ones first."""
    by_count: dict[int, list[str]] = {}
    for word, count in words.counts.items():
        by_count.setdefault(count, []).append(word)
    lines = {count: " ".join(sorted(by_count[count])) for count in sorted(by_count, reverse=True)}
    return {"total": words.num_words, "by_count": lines}
