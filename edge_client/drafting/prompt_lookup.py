"""Drafts without a model: proposes the tokens that followed the last earlier occurrence of the newest ones.

Saxena 2023, "Prompt Lookup Decoding". The longest run of tokens wins, the most recent of equally long ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.common.errors import InvalidFieldError, ModelError, UsageError
from outrider.common.models.fingerprint import num_tokens, tokenizer_fingerprint
from outrider.common.sampling.support import certain
from outrider.common.types import Draft, SamplingParams, Support, TokenIds
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM, NodeRule, ShouldStop, ended
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder, make_draw
from outrider.edge_client.drafting.export.hf_config import read_eos_token_ids
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.spec import SPEC_FILE, TOKENIZER_FILE
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Continuations, TreeBudget, TreeDraft

_MAX_OCCURRENCES = 32  # of one run of tokens that are looked at, the most recent ones


class NgramIndex:
    """Holds a sequence, and for each position the end of the previous occurrence of the 1 … `max_ngram`
    tokens before it. Adding and dropping a token cost `max_ngram` dictionary accesses; a look-up costs
    none."""

    def __init__(self, max_ngram: int) -> None:
        self.text: list[int] = []
        # One of each for n = 1 … max_ngram; ends are exclusive, 0 is nowhere. `_latest`: n tokens → where
        # they end for the last time. `_earlier`, by i: where the n tokens that end with token i ended before.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._earlier = [array("q") for _ in range(max_ngram)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            self.text.append(token_id)
            end = len(self.text)
            for n, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
                if n > end:
                    earlier.append(0)
                    continue
                ngram = tuple(self.text[end - n :])
                earlier.append(latest.get(ngram, 0))
                latest[ngram] = end

    def truncate(self, position: int) -> None:
        """Drops all tokens but the first `position`."""
        while len(self.text) > position:
            end = len(self.text)
            for n, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
                before = earlier.pop()
                if before:
                    latest[tuple(self.text[end - n :])] = before
                elif n <= end:
                    del latest[tuple(self.text[end - n :])]
            self.text.pop()

    def match(self) -> int:
        """Returns the end of the most recent earlier occurrence of the longest run that ends the sequence; 0
        where there is none."""
        return next((earlier[-1] for earlier in reversed(self._earlier) if earlier and earlier[-1]), 0)

    def followers(self, path: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Returns n, and the tokens that followed the last n tokens of the sequence and `path` together, for the
        longest n that occurred before in the sequence; 0 and none where there is none. Most recent first, at most
        `most`."""
        max_ngram = len(self._latest)
        context = (*self.text[-max_ngram:], *path)
        for n in range(min(max_ngram, len(context)), 0, -1):
            latest, earlier = self._latest[n - 1], self._earlier[n - 1]
            end = latest.get(tuple(context[-n:]), 0)
            found: list[int] = []
            while end and len(found) < most:
                if end < len(self.text):
                    found.append(self.text[end])
                end = earlier[end - 1]
            if found:
                return n, found
        return 0, []

    def check_integrity(self) -> None:
        """Asserts that the index equals one built anew."""
        fresh = NgramIndex(len(self._latest))
        fresh.extend(self.text)
        assert (fresh._latest, fresh._earlier) == (self._latest, self._earlier), "the index is not the text's"


class PromptLookupExpander:
    """Tells every token that followed earlier occurrences of the longest run, the most frequent first, of equally
    frequent ones the most recent. A gap is the logarithm of the ratio of two counts."""

    num_runs = 0

    def __init__(self, index: NgramIndex) -> None:
        self._index = index

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        """See `Expander.expand`."""
        return [self._continuations(path) for path in paths]

    def _continuations(self, path: TokenIds) -> Continuations:
        length, counts = _counted_followers(self._index, path)
        gaps = tuple(math.log(counts[0][1] / count) for _, count in counts)
        return Continuations(tuple(token_id for token_id, _ in counts), gaps, f"lookup-{length}")


class PromptLookupSupports:
    """Tells the same tokens as a distribution: the more often one followed, the likelier."""

    num_runs = 0

    def __init__(self, index: NgramIndex) -> None:
        self._index = index

    def expand(self, paths: Sequence[TokenIds]) -> list[Support | None]:
        """See `Expander.expand`."""
        return [self._support(path) for path in paths]

    def _support(self, path: TokenIds) -> Support | None:
        _, counts = _counted_followers(self._index, path)
        return Support(*map(tuple, zip(*counts, strict=True))) if counts else None


def _counted_followers(index: NgramIndex, path: TokenIds) -> tuple[int, list[tuple[int, int]]]:
    """Returns the length of the longest run that occurred before, and the tokens that followed it with their counts,
    the most frequent first."""
    length, found = index.followers(path, _MAX_OCCURRENCES)
    counts = Counter(found).most_common(MAX_CONTINUATIONS)  # in order of appearance where they are equal
    return length, counts


class PromptLookupSequence:
    """Proposes copies of earlier tokens. Without a match it proposes nothing, and the target samples
    alone."""

    def __init__(
        self, num_tokens: int, max_ngram: int, sampling: SamplingParams, has_supports: bool = False
    ) -> None:
        self._num_tokens = num_tokens
        self._sampling = sampling
        self._has_supports = has_supports
        self._index = NgramIndex(max_ngram)

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return len(self._index.text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids. Raises `InvalidFieldError` for ids >= `num_tokens`."""
        for token_id in token_ids:
            if not 0 <= token_id < self._num_tokens:
                raise InvalidFieldError(
                    "token_ids", f"{token_id} is not below the tokenizer's {self._num_tokens} tokens"
                )
        self._index.extend(token_ids)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens."""
        assert 0 <= position <= self.position, f"cannot truncate {self.position} tokens to {position}"
        self._index.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Returns a copy as a draft. A copy that reaches the end of the sequence continues with itself, so a
        repetition is proposed as often as it fits. Each probability is 1, since the draft had no other
        choice."""
        assert self._index.text, "a draft needs at least one committed token"
        start = self._index.match()
        if not start or num_draft_tokens <= 0:
            return Draft((), ())
        copied = self._index.text[start : start + num_draft_tokens]
        period = len(copied)
        token_ids = tuple(copied[i % period] for i in range(num_draft_tokens))
        supports = tuple(map(certain, token_ids)) if self._has_supports else ()
        return ended(Draft(token_ids, (1.0,) * num_draft_tokens, supports=supports), should_stop)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. There is no rule, since a copy has no signals."""
        assert rule is None, "a rule needs signals"
        assert self._index.text, "a draft needs at least one committed token"
        if self._has_supports:
            draw = make_draw(self._sampling, self.position)
            return DrawnTreeBuilder(PromptLookupSupports(self._index), draw, values.draws, budget).build()
        return TreeBuilder([PromptLookupExpander(self._index)], values, budget).build()

    def close(self) -> None:
        """Frees the index."""
        self._index = NgramIndex(0)

    def check_integrity(self) -> None:
        """Asserts that index and sequence agree."""
        self._index.check_integrity()


class PromptLookupModel:
    """Makes sequences without weights, of any length."""

    max_context = sys.maxsize
    signal_names = ()

    def __init__(
        self,
        num_tokens: int,
        tokenizer_fingerprint: str,
        eos_token_ids: tuple[int, ...] = (),
        max_ngram: int = DEFAULT_MAX_NGRAM,
    ) -> None:
        self.num_tokens = num_tokens
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.eos_token_ids = eos_token_ids
        self._max_ngram = max_ngram

    @classmethod
    def open(cls, directory: Path, *, max_ngram: int = DEFAULT_MAX_NGRAM) -> Self:
        """Opens any directory with a tokenizer.json. Raises `ModelError` without one.

        A draft.json or the target's own configuration beside it has the end-of-text ids, which matter only to
        tokens kept unverified.
        """
        if max_ngram < 1:
            raise UsageError(f"prompt lookup compares at least one token, not {max_ngram}")
        tokenizer = directory / TOKENIZER_FILE
        return cls(
            num_tokens(tokenizer), tokenizer_fingerprint(tokenizer), _eos_token_ids(directory), max_ngram
        )

    @property
    def fingerprint(self) -> str:
        """Returns a SHA-256 over tokenizer and run length."""
        content = f"prompt-lookup {self._max_ngram} {self.tokenizer_fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> PromptLookupSequence:
        """Returns an empty sequence. Sampling parameters do not change a copy."""
        return PromptLookupSequence(self.num_tokens, self._max_ngram, sampling, has_supports=num_support > 0)

    def close(self) -> None:
        """Does nothing: there are no weights."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    spec = directory / SPEC_FILE
    if not spec.exists():
        return read_eos_token_ids(directory)
    try:
        return tuple(int(token_id) for token_id in json.loads(spec.read_text("utf-8"))["eos_token_ids"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{spec} cannot be read: {error}") from error
