"""Where a sequence is in its grammar, and which tokens may follow."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import OutriderError
from outrider.common.grammar.memory import Held, NoGrammarRoomError, TenantMemory
from outrider.common.sequences import common_prefix
from outrider.common.types import Grammar, TokenIds

Words: TypeAlias = NDArray[np.int32]
"""A row of bits [ceil(num_tokens / 32)], low bit first: set for the ids that are allowed."""

# Of threads and processes that compile: what others wait for goes first. A third of a busy process's share; with 10 it
# was a tenth, and beside eight of them on two cores a start took longer than anybody waits.
COMPILING_NICENESS = 5
_MAX_KEPT = 256  # masks of paths: four times the largest tree
# Beyond a round's budget, for each token of the output that is read at once, as after a reopening: five times what one
# of a JSON schema takes.
_READ_TOKEN_S = 20e-6
_TOKENS_A_LOOK = 64  # that are read between two looks at the clock
_USED_UP = "too many states"  # llguidance's words for a lexer that has reached its limit
# States of a lexer. Where memory is counted a grammar begins with the fewest, which 199 of the benchmark's 200 schemas
# never use up; strings with a long `maxLength` use most.
_LEXER_STATES = 500, 3_000, 20_000
# What a state of a lexer takes, measured with 20,000 of them: .5 to 1.2 kB with a few lexemes, 3 kB with 300, whose
# compiled grammar has 300 kB: a hundredth of that is added. With more lexemes llguidance's fuel is used up before.
_LEXER_STATE_BYTES, _MAX_LEXEMES_BYTES = 1300, 2000
# What a matcher takes besides, measured: up to 180 bytes for each byte of its text, and where each of these has many
# Earley items, 73 MB for each second that reading them takes; a faster processor makes more.
_TEXT_BYTES, _ITEMS_BYTES_A_S = 180, 100e6
_STATE_BYTES = 1 << 18  # of one that has read nothing: 10 kB, with a mask of 10,000 items 460 kB
_COUNTED_BYTES = 1 << 16  # a change by less is not counted

_Found = TypeVar("_Found")


class GrammarLimitError(OutriderError):
    """A grammar takes too much time or memory at this place of the text."""


class _LexerUsedUpError(GrammarLimitError):
    """The lexer has no states left. Copies of a matcher share one, so others may have used them."""


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """Holds what a grammar may take: those of strangers have bounds."""

    budget_s: float = math.inf  # of processor time, for the masks of one round or one draft
    memory: TenantMemory | None = None  # counts what it holds


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """Holds what a grammar took where it was compiled before."""

    num_bytes: int = 0
    compile_s: float = 0.0  # of processor time


UNBOUNDED, UNKNOWN_COST = GrammarBounds(), GrammarCost()


@dataclass(frozen=True, slots=True)
class _Lexer:
    """Is a compiled matcher, before any token, with the lexer that its copies share."""

    matcher: Any
    num_states: int  # that it may come to have
    held: Held | None  # counts its memory until the last state that uses it is gone


class CompiledGrammar:
    """Holds a grammar over one vocabulary; sequences share it. Thread-safe."""

    def __init__(
        self,
        make_matcher: Callable[[int], Any],
        num_tokens: int,
        eos_token_ids: TokenIds,
        num_bytes_of: Callable[[int], int],
        bounds: GrammarBounds = UNBOUNDED,
        cost: GrammarCost = UNKNOWN_COST,
    ) -> None:
        """`make_matcher` compiles llguidance's matcher before any token, whose lexer may have so many states;
        `num_bytes_of` returns the length of a token's text. Raises `NoGrammarRoomError`."""
        self._make_matcher = make_matcher
        self.num_tokens, self.eos_token_ids, self.num_bytes_of = num_tokens, eos_token_ids, num_bytes_of
        self.bounds, self._cost = bounds, cost
        self.ends = _bits(eos_token_ids, num_tokens)  # end-of-text alone is allowed
        self._lock = threading.Lock()
        is_counted = bounds.memory is not None and self._is_quick
        num_states = _LEXER_STATES[0] if is_counted else _LEXER_STATES[-1]
        held = None if bounds.memory is None else bounds.memory.hold(self._lexer_bytes(num_states))
        self._lexer = _Lexer(make_matcher(num_states), num_states, held)
        self.is_used_up = False  # the lexer is, and takes too long to replace: compile it anew
        self._states = WeakSet[GrammarState]()

    @property
    def has_states(self) -> bool:
        """Returns whether a sequence follows it."""
        return len(self._states) > 0

    def lexer(self) -> _Lexer:
        """Returns the lexer for new sequences."""
        return self._lexer

    def note(self, state: GrammarState) -> None:
        """Notes a sequence, for as long as it lives."""
        self._states.add(state)

    def renew(self, lexer: _Lexer) -> None:
        """Replaces a lexer that is used up by a larger one, or one as large, for the matchers from now on; nothing
        where it was replaced before. Raises `GrammarLimitError` where that takes more time than a round has, or there
        is no room."""
        with self._lock:
            if lexer is not self._lexer:
                return
            if not self._is_quick:
                self.is_used_up = True
                took = f"and {self._cost.compile_s * 1e3:.0f} ms to compile again"
                raise GrammarLimitError(f"the grammar takes too much here: {_USED_UP}, {took}: simplify it")
            larger = [num for num in _LEXER_STATES if num > lexer.num_states]
            num_states, held = min(larger, default=_LEXER_STATES[-1]), None
            if self.bounds.memory is not None:
                held = self.bounds.memory.hold_let_in(0)
                _resize(held, self._lexer_bytes(num_states))
            self._lexer = _Lexer(self._make_matcher(num_states), num_states, held)

    @property
    def _is_quick(self) -> bool:
        return self._cost.compile_s <= self.bounds.budget_s

    def _lexer_bytes(self, num_states: int) -> int:
        """Returns what a lexer holds at most, with the grammar that is compiled into it."""
        state_bytes = _LEXER_STATE_BYTES + min(self._cost.num_bytes // 100, _MAX_LEXEMES_BYTES)
        return self._cost.num_bytes + num_states * state_bytes


class GrammarState:
    """Follows one output, after the prompt, through a grammar.

    The mask is a function of the grammar and the tokens alone. End-of-text is allowed exactly where the grammar
    accepts. After an end of text, and after a token that the grammar does not allow (others may commit one), nothing
    but end-of-text is; so it is where the grammar has no token left.
    """

    def __init__(self, grammar: CompiledGrammar, budget_s: float | None = None) -> None:
        """`budget_s` is what may be spent between two calls of `begin_round`, in seconds of this thread's own time,
        and 20 us for each token that it reads at once; None: the grammar's own."""
        self._grammar = grammar
        grammar.note(self)
        self._lexer = grammar.lexer()
        self._matcher = self._lexer.matcher.deep_copy()
        self._output: list[int] = []
        self._num_fed = 0  # of the output, that the matcher has
        self._path: list[int] = []  # that it has after the whole output
        self._end: int | None = None  # the index of the output's token that the matcher did not take
        self._kept: dict[TokenIds, Words] = {}  # by path
        self.ends = grammar.ends
        self._not_eos = ~self.ends
        self._budget_s = grammar.bounds.budget_s if budget_s is None else budget_s
        self._spent_s = 0.0  # of the budget
        self._overspent_s = 0.0  # by earlier rounds, which drafted tokens pay for
        memory = grammar.bounds.memory
        self._held = None if memory is None else memory.hold_let_in(_STATE_BYTES)
        self._bytes_of_fed = array("q")  # of each token that the matcher has, where they are counted
        self._fed_bytes = 0  # their sum

    @property
    def num_tokens(self) -> int:
        """Returns the length of the output."""
        return len(self._output)

    @property
    def is_accepting(self) -> bool:
        """Returns whether the output, without an end of text, is one of the grammar's texts."""

        def compute() -> bool:
            self._catch_up()
            self._step_to(())
            if self._end is None:
                if self._matcher.is_accepting():
                    return True
                if not self._matcher.is_stopped():
                    self._mask()  # a lexer that is used up says no without an error
                return False
            is_eos = self._output[self._end] in self._grammar.eos_token_ids
            return is_eos and bool(self._matcher.is_accepting())

        return self._within_budget(compute)

    @property
    def is_ended(self) -> bool:
        """Returns whether the output has a token that the grammar does not allow, or ends its text."""
        self._within_budget(self._catch_up)
        return self._end is not None

    def begin_round(self) -> None:
        """Begins the budget anew, for the token after the output."""
        self._overspent_s = max(0.0, self._overspent_s + self._spent_s - self._budget_s)
        self._spent_s = 0.0

    def begin_draft(self) -> None:
        """Goes on with what drafted tokens alone need, in what the round has left. They have less time where earlier
        rounds took more than their budget, so that all rounds together take one budget each."""
        self._spent_s += self._overspent_s
        self._overspent_s = 0.0

    def follow(self, output_ids: Sequence[int]) -> None:
        """Sets the output."""
        known = self._output
        if list(output_ids[: len(known)]) != known:
            self.truncate(common_prefix(known, output_ids))
        self.extend(output_ids[len(self._output) :])

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of the output."""
        if length >= len(self._output):
            return
        self._kept.clear()
        if self._num_fed > length:
            self._roll_back(len(self._path) + self._num_fed - length)
            self._path, self._num_fed = [], length
        if self._end is not None and self._end >= length:
            self._end = None
        del self._output[length:]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        new_ids = list(token_ids)
        if not new_ids:
            return
        num = len(new_ids)
        self._kept = {path[num:]: words for path, words in self._kept.items() if list(path[:num]) == new_ids}
        num_common = common_prefix(self._path, new_ids)
        self._roll_back(len(self._path) - num_common)
        self._path, self._num_fed = [], self._num_fed + num_common
        self._output += new_ids

    def allowed(self, path: Sequence[int] = ()) -> Words:
        """Returns which ids may follow the output and a path after it. The array must not be changed.

        Raises `GrammarLimitError` where the grammar takes too much here.
        """
        key = tuple(path)
        if (words := self._kept.get(key)) is None:
            words = self._within_budget(lambda: self._allowed(key))
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = words
        return words

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Returns whether an id may follow the output and a path after it; asks for no mask unless it ends the text."""
        if token_id in self._grammar.eos_token_ids:
            return has(self.allowed(path), token_id)

        def compute() -> bool:
            self._catch_up()
            return self._end is None and self._step_to((*path, token_id))

        return self._within_budget(compute)

    def _within_budget(self, compute: Callable[[], _Found]) -> _Found:
        """Returns what `compute` does, and counts its time and memory. Raises `GrammarLimitError`, without computing
        anything where the budget is spent."""
        self._check_budget(self._spent_s)
        start_s = time.thread_time()
        found = self._by_lexers(compute, start_s)
        self._spent_s += time.thread_time() - start_s
        self._check_budget(self._spent_s)
        self._count_memory()
        return found

    def _by_lexers(self, compute: Callable[[], _Found], start_s: float) -> _Found:
        """Returns what `compute` does, again by a new lexer where that of all sequences of the grammar is used up."""
        is_new = False
        while True:
            lexer = self._lexer
            try:
                return compute()
            except _LexerUsedUpError:
                if is_new and lexer.num_states == _LEXER_STATES[-1]:
                    raise
                renew_s = time.thread_time()
                self._grammar.renew(lexer)
                self._restart()
                is_new = True
                if lexer.num_states < _LEXER_STATES[-1]:  # it grows but twice: no round pays for that
                    self._spent_s -= time.thread_time() - renew_s
                self._check_budget(self._spent_s + time.thread_time() - start_s)

    def _count_memory(self) -> None:
        if self._held is None:
            return
        num_bytes = _STATE_BYTES + self._fed_bytes + len(self._kept) * self.ends.nbytes
        num_bytes += -num_bytes % _COUNTED_BYTES
        if num_bytes != self._held.num_bytes:
            _resize(self._held, num_bytes)

    def _check_budget(self, spent_s: float) -> None:
        if spent_s > self._budget_s:
            raise GrammarLimitError(f"the grammar took {spent_s * 1e3:.0f} ms in one round: simplify it")

    def _allowed(self, path: TokenIds) -> Words:
        self._catch_up()
        if self._end is not None or not self._step_to(path) or self._matcher.is_stopped():
            self._check()
            return self.ends
        words = self._mask()
        words &= self._not_eos
        if self._matcher.is_accepting():
            words |= self.ends
        return words if words.any() else self.ends

    def _mask(self) -> Words:
        words = np.zeros_like(self.ends)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def _catch_up(self) -> None:
        """Gives the matcher the output, as far as the grammar allows it."""
        if self._end is not None or self._num_fed == len(self._output):
            return
        start_s, first = time.thread_time(), self._num_fed
        while self._end is None and self._num_fed < len(self._output):
            if self._feed(self._output[self._num_fed]):
                self._num_fed += 1
            else:
                self._end = self._num_fed
            if (num_read := self._num_fed - first) % _TOKENS_A_LOOK == 0:
                taken_s = time.thread_time() - start_s
                self._check_budget(self._spent_s + taken_s - num_read * _READ_TOKEN_S)
                self._count_memory()
        self._spent_s -= min(time.thread_time() - start_s, (self._num_fed - first) * _READ_TOKEN_S)

    def _step_to(self, path: TokenIds) -> bool:
        """Takes the matcher from one path after the output to another; returns whether the grammar allows it."""
        num_common = common_prefix(self._path, path)
        self._roll_back(len(self._path) - num_common)
        del self._path[num_common:]
        for token_id in path[num_common:]:
            if not self._feed(token_id):
                return False
            self._path.append(token_id)
        return True

    def _feed(self, token_id: int) -> bool:
        """Gives the matcher a token; returns whether the grammar allows it. A lexer that is used up takes none, without
        an error: a mask has the error, or the token."""
        is_text = token_id < self._grammar.num_tokens and token_id not in self._grammar.eos_token_ids
        start_s = 0.0 if self._held is None else time.thread_time()
        if is_text and self._matcher.try_consume_tokens([token_id]) == 1:
            if self._held is not None:
                self._note_fed(token_id, time.thread_time() - start_s)
            return True
        self._check()
        if is_text and not self._matcher.is_stopped() and has(self._mask(), token_id):
            self._restart()
            raise _LexerUsedUpError(f"the grammar takes too much here: {_USED_UP}")
        return False

    def _note_fed(self, token_id: int, taken_s: float) -> None:
        """Notes what the matcher holds for a token, by the length of its text and the time that it took."""
        num_bytes = _TEXT_BYTES * self._grammar.num_bytes_of(token_id) + int(_ITEMS_BYTES_A_S * taken_s)
        self._bytes_of_fed.append(num_bytes)
        self._fed_bytes += num_bytes

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._fed_bytes -= sum(self._bytes_of_fed[-num_tokens:])
            del self._bytes_of_fed[-num_tokens:]
            self._matcher.rollback(num_tokens)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            message = str(self._matcher.get_error()).partition("\n")[0][:200]
            self._restart()
            kind = _LexerUsedUpError if _USED_UP in message else GrammarLimitError
            raise kind(f"the grammar takes too much here: {message}")

    def _restart(self) -> None:
        """Begins with a new matcher, as one that failed stays so."""
        self._lexer = self._grammar.lexer()
        self._matcher = self._lexer.matcher.deep_copy()
        self._num_fed, self._path, self._end = 0, [], None
        self._bytes_of_fed, self._fed_bytes = array("q"), 0
        self._kept.clear()


def state_of(grammar: Grammar, budget_s: float | None = None) -> GrammarState:
    """Returns where an empty output is in a grammar, which is compiled; `budget_s` is `GrammarState`'s."""
    assert isinstance(grammar.compiled, CompiledGrammar), "the grammar was not compiled"
    return GrammarState(grammar.compiled, budget_s)


def _resize(held: Held, num_bytes: int) -> None:
    """Raises `GrammarLimitError` where there is no room."""
    try:
        held.resize(num_bytes)
    except NoGrammarRoomError as error:
        raise GrammarLimitError(str(error)) from error


def has(words: Words, token_id: int) -> bool:
    """Returns whether an id is among those that are allowed."""
    return token_id >> 5 < len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _bits(token_ids: Sequence[int], num_tokens: int) -> Words:
    words = np.zeros((num_tokens + 31) // 32, np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words.view(np.int32)
