"""A round whose every number and every chance comes from a world of six tokens (`support.chance`).

A draft token is drawn when somebody first reads it: what nobody reads cannot matter, and is summed over
without being enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.exact.chance import Chance, Key

from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.common.noise.draws import Purpose
from outrider.common.types import MethodParams, Support

Text = tuple[int, ...]

PROMPT_LENGTH = 2  # so that a key with a number of new tokens instead of a position is noticed


@dataclass(frozen=True)
class World:
    """A target and a draft over a small vocabulary, functions of the text."""

    target: Callable[[Text], tuple[float, ...]]  # p, sums to 1
    support: Callable[[Text], Support]  # q, as the edge sends it
    drafted: Callable[[Text], Support] | None = None  # what it draws from, where that is something else


def start_and_offset(start: int, offset: int) -> Key:
    """`KeyedDraws`: (seed, start, offset, ACCEPT)."""
    return (Purpose.ACCEPT, start, offset)


@dataclass(frozen=True)
class Rules:
    """How rounds are run. The sizes are those that `make test` has time for."""

    num_tokens: int = 4
    num_draft_tokens: int = 2
    parents: tuple[int, ...] = ()  # of drafts that are trees (`support.exact.trees`)
    grow: Any = None  # `support.exact.trees.Grow`: cuts them
    is_coupled: bool = False  # the draft is drawn with the target's noise
    is_pipelined: bool = False
    method_params: MethodParams = field(default_factory=MethodParams)
    stop_ids: frozenset[int] = frozenset()
    coin_key: Callable[[int, int], Key] = start_and_offset
    is_cut: Callable[[Support, int], bool] | None = None  # a gate that ends the draft before such a token
    is_costly: Callable[[Text], bool] | None = (
        None  # a grammar cuts the draft at the first token after which it is so
    )


class BranchingUniform:
    """A number in (0, 1) that is only ever compared."""

    def __init__(self, key: Key, chance: Chance) -> None:
        self._key, self._chance = key, chance

    def __lt__(self, probability: float) -> bool:
        return self._chance.is_below(self._key, probability)

    def __ge__(self, probability: float) -> bool:
        return not self < probability


class BranchingDraws:
    """`UniformDraws` of one start."""

    def __init__(self, rules: Rules, start: int, chance: Chance) -> None:
        self._key, self._start, self._chance = rules.coin_key, start, chance

    def accepts(self, probability: float, offset: int) -> bool:
        return self._chance.is_below(self._key(self._start, offset), probability)


class LazyDraft:
    """Draft tokens that are drawn, one after the other, when they are first read."""

    def __init__(self, world: World, rules: Rules, text: Text, limit: int, chance: Chance) -> None:
        self._world, self._rules, self._text, self._chance = world, rules, text, chance
        self._limit = limit
        self._drawn: Text = ()

    def num_tokens(self) -> int:
        if self._rules.is_cut is not None:
            for index in range(self._limit):  # whether a gate cuts is known from the tokens alone
                if self._rules.is_cut(self.support(index), self.token(index)):
                    return index
        return self._limit

    def token(self, index: int) -> int:
        return self._reveal(index + 1)[index]

    def prob(self, index: int) -> float:
        support, token_id = self.support(index), self.token(index)
        return _weight_of(support, token_id) / sum(support.weights)

    def support(self, index: int) -> Support:
        return self._world.support(self.text_before(index))

    def text_before(self, row: int) -> Text:
        return (*self._text, *self._reveal(row)[:row])

    def _reveal(self, count: int) -> Text:
        while len(self._drawn) < count:
            self._drawn = (*self._drawn, self._draw(len(self._drawn)))
        return self._drawn

    def _draw(self, offset: int) -> int:
        text = (*self._text, *self._drawn)
        support = (self._world.drafted or self._world.support)(text)
        start = PROMPT_LENGTH + len(self._text)
        if self._rules.is_coupled:
            num_tokens = len(self._world.target(text))
            weights = tuple(float(_weight_of(support, token_id)) for token_id in range(num_tokens))
            return self._chance.race((Purpose.COUPLED, start + offset, 0), weights)
        return support.token_ids[self._chance.pick((Purpose.DRAFT, start, offset), support.weights)]


class Lazy(Sequence[Any]):
    """A tuple whose items are made when they are read."""

    def __init__(self, num_items: Callable[[], int], item: Callable[[int], Any]) -> None:
        self._num_items, self._item = num_items, item

    def __len__(self) -> int:
        return self._num_items()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self._item(i) for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._item(index % len(self))


class BranchingRows:
    """`TargetRows` of a world; a row is known once the draft tokens before it are drawn."""

    def __init__(self, world: World, text: Text, draft: LazyDraft, chance: Chance) -> None:
        self._world, self._draft, self._chance = world, draft, chance
        self._position = PROMPT_LENGTH + len(text)

    def log_probs(self, row: int, token_ids: Sequence[int]) -> list[float]:
        probs = self._probs(row)
        return [math.log(probs[i]) if probs[i] > 0 else -math.inf for i in token_ids]

    def entropy(self, row: int) -> float:
        return -sum(p * math.log(p) for p in self._probs(row) if p > 0)

    def target_sample(self, row: int) -> int:
        return self._chance.race((Purpose.COUPLED, self._position + row, 0), self._probs(row))

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        probs = self._probs(row)
        changed = changed or {}
        weights = tuple(math.exp(changed[i]) if i in changed else p for i, p in enumerate(probs))
        if sum(weights) == 0:
            weights = probs
        return self._chance.race((key.purpose, key.position, key.index), weights)

    def _probs(self, row: int) -> tuple[float, ...]:
        return self._world.target(self._draft.text_before(row))


def _weight_of(support: Support, token_id: int) -> int:
    if token_id not in support.token_ids:
        return 0
    return support.weights[support.token_ids.index(token_id)]
