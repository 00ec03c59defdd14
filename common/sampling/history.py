"""The part of a sequence that the processors look at, kept up to date at the cost of what changed.

A round must not cost what its client sent with the opening, nor what its text is long: lists are made into sorted
arrays once, and counts follow the sequence.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, count

import numpy as np
from numpy.typing import NDArray

from outrider.common.alignment import TokenChain
from outrider.common.grammar.state import state_of
from outrider.common.types import SamplingParams, TokenIds


class TokenCounts:
    """Counts the ids of a sequence that grows and is cut at its end.

    Ids are held in order of their first occurrence, so that those that a cut removes are the last ones.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.empty(64, np.int64)
        self._amounts: NDArray[np.float32] = np.zeros(64, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Returns the distinct ids, as a view."""
        return self._ids[: len(self._slots)]

    @property
    def amounts(self) -> NDArray[np.float32]:
        """Returns how often each of `ids` occurs, as a view."""
        return self._amounts[: len(self._slots)]

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._slots

    def amount(self, token_id: int) -> float:
        """Returns how often an id occurs."""
        slot = self._slots.get(token_id)
        return 0.0 if slot is None else float(self._amounts[slot])

    def extend(self, token_ids: Iterable[int]) -> None:
        """Counts more tokens at the end."""
        for token_id, amount in Counter(token_ids).items():  # in order of first occurrence too
            num_ids = len(self._slots)
            slot = self._slots.setdefault(token_id, num_ids)
            if slot == num_ids:
                if num_ids == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * num_ids)
                    self._amounts = np.resize(self._amounts, 2 * num_ids)
                self._ids[slot], self._amounts[slot] = token_id, 0.0
            self._amounts[slot] += amount

    def remove(self, token_id: int) -> None:
        """Takes back the last token, which is `token_id`."""
        slot = self._slots[token_id]
        self._amounts[slot] -= 1.0
        if self._amounts[slot] == 0.0:
            assert slot == len(self._slots) - 1, "the token is not the last one"
            del self._slots[token_id]


class BadWords:
    """Finds the ids that would complete a word, by walking back from the end of a text.

    Words are held by their ids but the last, from the last of these to the first, in sorted order: those with which a
    text ends are neighbours. A look-up takes at most as many steps as the longest word has ids, each a binary search,
    and an id takes 8 bytes, a word 16 more.
    """

    def __init__(self, words: Sequence[TokenIds]) -> None:
        self.longest = max(map(len, words), default=0)
        entries = sorted((word[:-1][::-1], word[-1]) for word in words)
        self._lasts = np.array([last for _, last in entries], np.int64)
        self._ids = array("q", chain.from_iterable(start for start, _ in entries))
        self._ends = array("q", accumulate((len(start) for start, _ in entries), initial=0))

    def completing(self, text: Sequence[int], end: int) -> Iterator[NDArray[np.int64]]:
        """Yields the ids that complete a word after `text[:end]`."""
        # Words from `first` to `after` have the text's last ids, so many as were compared.
        first, after = 0, len(self._lasts)
        for depth in count():

            def next_id(word: int, depth: int = depth) -> int:
                place = self._ends[word] + depth
                return self._ids[place] if place < self._ends[word + 1] else -1

            rest = bisect_left(range(after), 0, first, after, key=next_id)
            if first < rest:
                yield self._lasts[first:rest]
            end -= 1
            if rest == after or end < 0:
                return
            first = bisect_left(range(after), text[end], rest, after, key=next_id)
            after = bisect_right(range(after), text[end], first, after, key=next_id)


class History:
    """Holds what one session's processors need besides the logits.

    `seen` counts prompt and output, `output` the output; each is filled only where a penalty reads it. `grammar` is
    where the output is in its grammar, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int] = (),
        output_ids: Iterable[int] = (),
    ) -> None:
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.bad_words = BadWords(params.bad_words)
        self.held_ids = np.array(sorted({*params.held_back}), np.int64)
        self.grammar = None if params.grammar is None else state_of(params.grammar)
        self.seen, self.output = TokenCounts(), TokenCounts()
        counts_seen = params.repetition_penalty != 1
        counts_output = bool(params.presence_penalty or params.frequency_penalty)
        self._counted = [self.seen] * counts_seen + [self.output] * counts_output
        self._hashes: list[int] = []  # of the counted tokens, as the chain has them
        self._token_ids: list[int] = []
        if counts_seen:
            self.seen.extend(prompt_ids)
        self._extend(output_ids)

    def follow(self, chain: TokenChain, num_prompt_tokens: int) -> None:
        """Brings the counts to the tokens of `chain` after its prompt, which must not change."""
        while self._hashes and not chain.agrees(num_prompt_tokens + len(self._hashes), self._hashes[-1]):
            self._hashes.pop()
            token_id = self._token_ids.pop()
            for counts in self._counted:
                counts.remove(token_id)
        if self.grammar is not None:
            self.grammar.truncate(len(self._hashes))
        if self._counted or self.grammar is not None:
            start = num_prompt_tokens + len(self._hashes)
            self._extend(chain.token_ids[start:])
            self._hashes += chain.hashes_after(start)

    def _extend(self, token_ids: Iterable[int]) -> None:
        new_ids = list(token_ids)
        self._token_ids += new_ids
        for counts in self._counted:
            counts.extend(new_ids)
        if self.grammar is not None:
            self.grammar.extend(new_ids)
