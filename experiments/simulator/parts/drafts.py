"""Drafts by acceptance traces: at each position as many tokens are right as the trace says, and take their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from outrider.common.errors import UsageError
from outrider.common.tree import nodes_along
from outrider.common.types import Draft, RunnerUp, SamplingParams, Signals, Support, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, Stop, ended
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    TextTrace,
    find_traces,
    signals_of,
)
from outrider.experiments.simulator.parts import text
from outrider.experiments.simulator.parts.ranks import (
    STRIDE,
    DrawnRanks,
    Ranks,
    RecordedRanks,
    TracedPaths,
    Words,
)
from outrider.experiments.simulator.parts.times import DraftTimes

NUM_GIVEN_TEXTS, NUM_GIVEN_POSITIONS = 64, 256  # of traces drawn from given acceptance


class TracedText:
    """Holds one text's trace as lists: `runs[t]` tokens are accepted of a draft made after t + 1 new tokens.

    It repeats where a text is longer than the trace.
    """

    def __init__(self, trace: TextTrace, has_runner_ups: bool = False, ranks: Ranks | None = None) -> None:
        """`has_runner_ups`: the draft names runner-ups, where the trace recorded them. `ranks`: of its trees; None:
        the recorded ones, where there are some."""
        self.ranks = RecordedRanks(trace) if ranks is None and trace.ranks is not None else ranks
        self.runs: list[int] = trace.runs.tolist()
        self._lengths: list[int] | None = None if trace.lengths is None else trace.lengths.tolist()
        self._seconds: list[tuple[float, bool]] | None = None  # by position: gap, and whether it is right
        if has_runner_ups and trace.gaps is not None and trace.seconds is not None:
            self._seconds = list(zip(trace.gaps.tolist(), trace.seconds.tolist(), strict=True))
        self._confidences = trace.confidences
        self.prompt: list[bool] = [] if trace.prompt is None else trace.prompt.tolist()
        self._signals: dict[int, tuple[Signals, ...]] = {}

    def signals(self, index: int) -> tuple[Signals, ...]:
        """Returns the signals of MAX_DEPTH tokens drafted there; none where the trace has no confidences."""
        found = self._signals.get(index)
        if found is None:
            found = self._signals[index] = tuple(map(signals_of, self._confidences[index].tolist()))
        return found

    def drafted_length(self, index: int, num_draft_tokens: int) -> int:
        """Returns how many tokens a draft made there has, of `num_draft_tokens` asked for."""
        return num_draft_tokens if self._lengths is None else min(num_draft_tokens, self._lengths[index])

    @property
    def has_runner_ups(self) -> bool:
        """Returns whether the draft names runner-ups."""
        return self._seconds is not None

    def runner_ups(self, index: int, position: int, num_drafted: int, num_right: int) -> tuple[RunnerUp, ...]:
        """Returns the runner-ups of a draft made at `index`, after `position` tokens. Those of tokens that are
        not judged are wrong, with the gaps of another place."""
        assert self._seconds is not None
        found = []
        for number in range(num_drafted):
            place = index + number if number <= num_right else index + STRIDE * (number + 1)
            gap, is_second = self._seconds[place % len(self._seconds)]
            is_right = number == num_right and is_second
            at = (position + number) & text.MASK
            found.append(RunnerUp(text.TEXT[at] if is_right else text.OTHERS[0], gap))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class KnownText:
    """Holds what the target writes after a prompt, greedily, and how far drafts of it are accepted."""

    prompt_ids: TokenIds
    new_ids: TokenIds
    trace: TracedText

    def drafted(self, position: int, num_drafted: int, num_right: int) -> TokenIds:
        """Returns a draft as `outrider.experiments.simulator.parts.text.drafted` does."""
        start = position - len(self.prompt_ids)
        token_ids = list(self.new_ids[start : start + num_drafted])
        token_ids += [0] * (num_drafted - len(token_ids))  # past its end nobody reads
        if num_right < num_drafted:
            right = token_ids[num_right]
            token_ids[num_right] = right - 1 if right else 1  # in every vocabulary
        return tuple(token_ids)

    def others(self, position: int, num_ids: int) -> TokenIds:
        """Returns ids that the text does not have there, of every vocabulary."""
        (right,) = self.drafted(position, 1, 1)
        return tuple(token_id for token_id in range(num_ids + 1) if token_id != right)[:num_ids]


def load_acceptance(acceptance: object, where: str, seed: int) -> list[TracedText]:
    """Returns texts of a recorded set's name ("embedded T=0.8"), of one chance for every token, or of one a
    position.

    Raises `UsageError` naming `where`.
    """
    if isinstance(acceptance, str):
        try:
            return [TracedText(trace) for trace in find_traces(acceptance).texts]
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
    alphas: list[Any] = list(acceptance) if isinstance(acceptance, Sequence) else [acceptance]
    if not alphas or not all(isinstance(alpha, int | float) and 0 <= alpha <= 1 for alpha in alphas):
        raise UsageError(
            f"{where}: is {acceptance!r}; give the name of recorded traces, a chance between 0 and 1, "
            "or a list of them, one a position"
        )
    return list(_draw_texts(tuple(map(float, alphas)), seed))


@lru_cache(4)  # each visit of a sweep asks for them
def _draw_texts(alphas: tuple[float, ...], seed: int) -> tuple[TracedText, ...]:
    chances = np.array([alphas[min(i, len(alphas) - 1)] for i in range(MAX_DEPTH)])
    source, source_of_ranks = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    nothing = np.zeros((NUM_GIVEN_POSITIONS, 0), np.float32)
    texts = []
    for _ in range(NUM_GIVEN_TEXTS):
        falls = source.random((NUM_GIVEN_POSITIONS, MAX_DEPTH)) >= chances
        ends = np.append(falls, np.ones((NUM_GIVEN_POSITIONS, 1), bool), axis=1)
        trace = TextTrace(ends.argmax(axis=1).astype(np.uint8), nothing)
        texts.append(TracedText(trace, ranks=DrawnRanks(falls, alphas, source_of_ranks)))
    return tuple(texts)


@dataclass(slots=True)
class TracedSequence:
    """Is a `DraftSequence` that has the length of the text, and none of its tokens, which `words` give."""

    times: DraftTimes
    sleep: Callable[[float], object]
    trace: TracedText
    num_prompt_tokens: int
    num_support: int
    words: Words = text
    position: int = 0
    num_read: int = 0  # tokens that its KV would hold
    has_runner_ups: bool = False

    def commit(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the text; proposed tokens that were accepted were read when they were proposed."""
        self.position += len(token_ids)

    def truncate(self, position: int) -> None:
        """Drops what is past `position`."""
        self.position = position
        self.num_read = min(self.num_read, position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Returns a draft after the time that drafting it takes."""
        index = self._index
        num_draft_tokens = self.trace.drafted_length(index, num_draft_tokens)
        if num_draft_tokens <= 0:
            return Draft((), ())
        num_right = min(self.trace.runs[index], num_draft_tokens)
        token_ids = self.words.drafted(self.position, num_draft_tokens, num_right)
        signals = self.trace.signals(index)[:num_draft_tokens]
        supports = tuple(_support(each, self.num_support) for each in token_ids) if self.num_support else ()
        made = Draft(token_ids, (1.0,) * num_draft_tokens, signals, supports)
        if self.has_runner_ups:
            runner_ups = self.trace.runner_ups(index, self.position, num_draft_tokens, num_right)
            made = replace(made, runner_ups=runner_ups)
        draft = self._timed(made, should_stop)
        self.num_read = self.position + min(num_right, len(draft.token_ids))
        return draft

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        """See `ProposesAlong.propose_along`; tells of prompts, where the trace does. Reading takes the time."""
        known = self.trace.prompt[-len(token_ids) :] if token_ids else []
        first = self.position + len(token_ids) - len(known)
        self.commit(token_ids)
        if not known or first < 0:
            return ()
        told = [self.words.drafted(first + i, 1, int(is_right))[0] for i, is_right in enumerate(known)]
        return *told, *self.propose(1).token_ids

    @property
    def _index(self) -> int:
        """Returns the place of the next token in the trace."""
        return max(0, self.position - self.num_prompt_tokens - 1) % len(self.trace.runs)

    def _read_s(self) -> float:
        """Returns the time of the call, and of text that its KV lacks: one token always, and more after a
        prompt."""
        num_unread = max(0, self.position - self.num_read - 1)
        return (self.times.call_ms + num_unread * self.times.read_token_ms) / 1e3

    def _timed(self, draft: Draft, should_stop: ShouldStop | None) -> Draft:
        token_s = self.times.token_ms / 1e3
        if should_stop is None:
            self.sleep(self._read_s() + len(draft.token_ids) * token_s)
            return draft

        def paced(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            self.sleep(token_s)  # what is asked may look whether something has arrived
            return should_stop(token_id, signals, num_drafted)

        self.sleep(self._read_s())
        return ended(draft, paced)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def check_integrity(self) -> None:
        """Asserts that it read no more than there is."""
        assert self.num_read <= self.position, "it read tokens that nobody wrote"


@dataclass(slots=True)
class RunnerUpSequence(TracedSequence):
    """A `TracedSequence` whose drafts name runner-ups once asked to (`KeepsRunnerUps`)."""

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        """See `KeepsRunnerUps.keep_runner_ups`."""
        self.has_runner_ups = is_wanted


@dataclass(slots=True)
class TreeSequence(TracedSequence):
    """A `TracedSequence` that proposes trees (`ProposesTrees`); its text has ranks."""

    num_runs: int = 0  # of the draft, for the tree that is made

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. There are no signals for a rule (`experiments.simulator.run`)."""
        assert rule is None, "gates do not judge simulated trees"
        self.num_runs = 0
        draft = TreeBuilder(values, budget).build([self])
        length = min(budget.max_depth, len(draft.token_ids))
        right = self.words.drafted(self.position, length, length)
        self.num_read = self.position + len(nodes_along(draft.token_ids, draft.parents, right))
        return draft

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        """See `Expander.expand`. A run takes its time by the rows in it."""
        self.sleep(self._run_s(len(paths)))
        self.num_runs += 1
        assert self.trace.ranks is not None, "only texts with ranks have trees"
        told = TracedPaths(self.trace.ranks, self.words, self._index, self.position)
        return [told.tell(path) for path in paths]

    def _run_s(self, num_rows: int) -> float:
        run_s = (self.times.token_ms + (num_rows - 1) * self.times.tree_row_ms) / 1e3
        return run_s if self.num_runs else self._read_s() + run_s


@dataclass(slots=True)
class BranchingSequence(TreeSequence, RunnerUpSequence):
    """Proposes trees, and names runner-ups once asked to."""


@lru_cache(1 << 14)
def _support(token_id: int, num_ids: int) -> Support:
    return Support((token_id, *text.OTHERS[: num_ids - 1]), (1 << 12,) + (1,) * (num_ids - 1))


def create_sequence(
    times: DraftTimes,
    sleep: Callable[[float], object],
    trace: TracedText,
    num_prompt_tokens: int,
    *,
    num_support: int = 0,
    words: Words = text,
) -> TracedSequence:
    """Returns a sequence that can what its trace was recorded for: runner-ups, trees."""
    kinds = {
        (False, False): TracedSequence,
        (False, True): RunnerUpSequence,
        (True, False): TreeSequence,
        (True, True): BranchingSequence,
    }
    kind = kinds[trace.ranks is not None, trace.has_runner_ups]
    return kind(times, sleep, trace, num_prompt_tokens, num_support, words)


class TracedDraft:
    """Is a `DraftModel` over traced texts; a sequence's sampling seed picks its text."""

    num_tokens = text.NUM_TOKENS
    max_context = 1 << 30
    eos_token_ids: tuple[int, ...] = ()
    signal_names = ("nll",)
    fingerprint = text.FINGERPRINT
    tokenizer_fingerprint = text.FINGERPRINT

    def __init__(
        self, times: DraftTimes, texts: Sequence[TracedText], sleep: Callable[[float], object]
    ) -> None:
        self.times, self._texts, self._sleep = times, texts, sleep

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> TracedSequence:
        """Returns a sequence of the seed's text."""
        trace = self._texts[sampling.seed % len(self._texts)]
        return create_sequence(
            self.times, self._sleep, trace, num_prompt_tokens or 0, num_support=num_support
        )

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SimulatedTokenizer:
    """Offers what sessions ask of an `EdgeTokenizer`."""

    fingerprint = text.FINGERPRINT
    num_tokens = text.NUM_TOKENS

    def encode(self, text: str, is_complete: bool = False) -> list[int]:
        """Raises `UsageError`: simulated edges have no text."""
        raise UsageError("simulated edges have no text: words to avoid and the like cannot be simulated")

    def token_text(self, token_id: int) -> str:
        """Returns a dot for every token."""
        return "."

    def decoder(
        self, prompt_ids: list[int] | None = None, has_special_tokens: bool = False
    ) -> Callable[[int], str]:
        """Returns `token_text`."""
        return self.token_text
