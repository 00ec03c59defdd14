"""Drafts for one session: keeps the draft's sequence equal to the session's, measures drafting, and stretches
it for experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.grammar.state import GrammarLimitError, has, state_of
from outrider.common.sampling.history import BadWords
from outrider.common.sampling.penalties import left_of
from outrider.common.sequences import common_prefix
from outrider.common.tree import ROOT
from outrider.common.types import Draft, SamplingParams, Signals, TokenIds
from outrider.edge_client.drafting.base import (
    DraftModel,
    KeepsRunnerUps,
    NodeRule,
    Prepares,
    ProposesAlong,
    ProposesTrees,
    Remembers,
    ShouldStop,
    Stop,
    UsesValues,
    WritesAlone,
    first_tokens,
)
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft


class Drafter:
    """Drafts for one session. `min_draft_s` stretches each run of the draft model, a token of a chain or several nodes
    of a tree, to simulate a larger draft; results carry a label then."""

    def __init__(
        self,
        model: DraftModel,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        num_support: int = 0,
        min_draft_s: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.model = model
        self.has_read = False  # the prompt: a text may end without a draft
        self._clock = clock
        self._sequence = model.sequence(
            sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support
        )
        self._min_draft_s = min_draft_s
        self._grammar = None if sampling.grammar is None else state_of(sampling.grammar)
        self._bad_words = BadWords(sampling.bad_words)
        self._num_prompt_tokens = num_prompt_tokens
        self._along: TokenIds = ()  # in the place of the prompt's last tokens, and after it
        self._assumed: TokenIds = ()  # what the sequence was told that may yet turn out wrong: its end

    def propose(
        self,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        should_stop: ShouldStop | None = None,
        assumed: TokenIds = (),
    ) -> tuple[Draft, float]:
        """Returns a draft after `token_ids` and the tokens `assumed` to follow them, and the time it took in
        ms.

        The draft is shorter than asked where `should_stop` ends it, the draft's context is nearly full or the grammar
        takes too much after some of its tokens; it is empty at the context limit, where the strategy has no proposal
        and where the grammar takes too much before any token.
        """
        start_s = self._clock.now()
        self._commit(token_ids, assumed)
        draft = self._sequence.propose(num_draft_tokens, self._stretched(should_stop, start_s))
        if self._grammar is not None:  # of what is copied, and not sampled
            num_obeying = self.num_obeying((*token_ids, *assumed), draft.token_ids)
            draft = first_tokens(draft, num_obeying, draft.doubted)
        num_runs = draft.num_runs if isinstance(draft, TreeDraft) else len(draft.token_ids)
        self._sleep_until(start_s + self._min_draft_s * num_runs)
        return draft, (self._clock.now() - start_s) * 1e3

    def write_alone(
        self, token_ids: Sequence[int], num_draft_tokens: int, should_stop: ShouldStop | None = None
    ) -> tuple[Draft, float]:
        """Returns what `propose` does, of tokens that no target will judge."""
        sequence = self._sequence
        if not isinstance(sequence, WritesAlone):
            return self.propose(token_ids, num_draft_tokens, should_stop)
        start_s = self._clock.now()
        self._commit(token_ids, ())
        draft = sequence.write_alone(num_draft_tokens, self._stretched(should_stop, start_s))
        self._sleep_until(start_s + self._min_draft_s * len(draft.token_ids))
        return draft, (self._clock.now() - start_s) * 1e3

    def use_values(self, values: NodeValues) -> None:
        """Estimates chances of a chain's tokens by `values`, where the sequence does."""
        if isinstance(self._sequence, UsesValues):
            self._sequence.use_values(values)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Keeps a text that has ended for later ones, where the sequence does."""
        if isinstance(self._sequence, Remembers):
            self._sequence.remember(token_ids, self._num_prompt_tokens)

    @property
    def can_propose_trees(self) -> bool:
        """Returns whether `propose_tree` is possible."""
        return isinstance(self._sequence, ProposesTrees)

    def propose_tree(
        self,
        token_ids: Sequence[int],
        budget: TreeBudget,
        values: NodeValues,
        assumed: TokenIds = (),
        rule: NodeRule | None = None,
    ) -> tuple[TreeDraft, float]:
        """Returns a tree after `token_ids` and the tokens `assumed` to follow them, and the time it took in ms.

        It has fewer nodes than the budget where the draft's context is nearly full, and none where `propose`
        would have none. `rule` ends paths.
        """
        assert isinstance(self._sequence, ProposesTrees), "the draft proposes no trees"
        start_s = self._clock.now()
        self._commit(token_ids, assumed)
        draft = self._sequence.propose_tree(budget, values, rule)
        if self._grammar is not None and not draft.supports:  # what is drawn stays: see `DrawnTreeBuilder`
            draft = self._obeying_nodes(draft, (*token_ids, *assumed))
        self._sleep_until(start_s + self._min_draft_s * draft.num_runs)
        return draft, (self._clock.now() - start_s) * 1e3

    def num_obeying(self, token_ids: Sequence[int], after: TokenIds) -> int:
        """Returns how many of the tokens `after` others obey the session's grammar, if it has one, as far as it
        is known in a round's time."""
        if self._grammar is None:
            return len(after)
        self._follow_grammar(token_ids)
        each = range(len(after))
        return next((i for i in each if not self._allows(token_ids, after[:i], after[i])), len(after))

    def check_grammar(self, token_ids: Sequence[int]) -> None:
        """Raises `GrammarLimitError` where the session's grammar takes too much after these tokens."""
        if self._grammar is not None:
            self._follow_grammar(token_ids)
            self._grammar.allowed()

    def _obeying_nodes(self, draft: TreeDraft, token_ids: Sequence[int]) -> TreeDraft:
        self._follow_grammar(token_ids)
        paths: dict[int, TokenIds] = {ROOT: ()}  # of the nodes that are kept
        for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            if parent in paths and self._allows(token_ids, paths[parent], token_id):
                paths[node] = (*paths[parent], token_id)
        return draft if len(paths) == len(draft.parents) + 1 else draft.pruned([*paths][1:])

    def _follow_grammar(self, token_ids: Sequence[int]) -> None:
        assert self._grammar is not None, "a constrained text"
        self._grammar.begin_round()
        self._grammar.follow(token_ids[self._num_prompt_tokens :])

    def _allows(self, token_ids: Sequence[int], path: TokenIds, token_id: int) -> bool:
        """Returns whether the grammar is known to allow a token, or the text ends with it as bad words leave no other:
        not where it takes too much to say."""
        assert self._grammar is not None, "a constrained text"
        try:
            if self._bad_words.longest and has(self._grammar.ends, token_id):
                text = (*token_ids[-self._bad_words.longest :], *path)
                return has(left_of(self._grammar, self._bad_words, text, path)[0], token_id)
            return self._grammar.allows(path, token_id)
        except GrammarLimitError:
            return False

    def prepare(self, num_tokens: int) -> Iterator[None]:
        """See `Prepares.prepare`; does nothing where the sequence cannot."""
        return self._sequence.prepare(num_tokens) if isinstance(self._sequence, Prepares) else iter(())

    @property
    def has_runner_ups(self) -> bool:
        """Returns whether the draft can tell them, see `keep_runner_ups`."""
        return isinstance(self._sequence, KeepsRunnerUps)

    def keep_runner_ups(self, is_wanted: bool) -> None:
        """Asks for runner-ups in all later drafts, or for none, which is faster."""
        assert isinstance(self._sequence, KeepsRunnerUps), "a draft that can tell them"
        self._sequence.keep_runner_ups(is_wanted)

    def _commit(self, token_ids: Sequence[int], assumed: TokenIds) -> None:
        sequence, self.has_read = self._sequence, True
        if self._assumed:  # as far as it came true it stays
            start = sequence.position - len(self._assumed)
            now = (*token_ids[start:], *assumed)
            sequence.truncate(start + common_prefix(self._assumed, now))
        sequence.commit(token_ids[sequence.position :])
        if assumed:
            sequence.commit(assumed[sequence.position - len(token_ids) :])
        self._assumed = assumed

    def _stretched(self, should_stop: ShouldStop | None, start_s: float) -> ShouldStop | None:
        """Returns `should_stop` delayed to the time at which a stretched token would be ready."""
        if should_stop is None or not self._min_draft_s:
            return should_stop

        def stretched(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            self._sleep_until(start_s + self._min_draft_s * num_drafted)
            return should_stop(token_id, signals, num_drafted)

        return stretched

    def _sleep_until(self, time_s: float) -> None:
        self._clock.sleep(time_s - self._clock.now())

    def roll_back(self, position: int) -> None:
        """Keeps the first `position` tokens."""
        sequence = self._sequence
        num_dropped = sequence.position - position
        if num_dropped > 0:
            sequence.truncate(position)
            self._assumed = self._assumed[: max(0, len(self._assumed) - num_dropped)]

    @property
    def is_full(self) -> bool:
        """Returns whether the sequence has reached the draft's context limit, so that no draft is possible
        any more."""
        return self._sequence.position >= self.model.max_context

    @property
    def can_propose_along(self) -> bool:
        """Returns whether `warm_up` may propose tokens in the place of the prompt's own."""
        return isinstance(self._sequence, ProposesAlong)

    def warm_up(self, prompt_ids: Sequence[int], num_along: int = 0) -> None:
        """Feeds the prompt while the verifier does the same, and proposes the token after it, and, where it can, those
        in the place of the prompt's last `num_along`, fewer than there are."""
        sequence, start, self.has_read = self._sequence, len(prompt_ids) - num_along, True
        if num_along and isinstance(sequence, ProposesAlong):
            sequence.commit(prompt_ids[sequence.position : start])
            self._along = sequence.propose_along(prompt_ids[start:])
        sequence.commit(prompt_ids[sequence.position :])
        if not self._along:
            self._along = tuple(sequence.propose(1).token_ids)

    def would_open_with(self, first_token: int) -> bool:
        """Returns whether `warm_up` proposed the token that the verifier's opening brought: an acceptance that
        is known before any round."""
        return self._along[-1:] == (first_token,)

    def agreed_with(self, prompt_choices: Sequence[int]) -> tuple[int, int]:
        """Returns in how many of the prompt's last places `warm_up` proposed the target's choice, of which there may be
        fewer, and in how many it proposed another token."""
        pairs = list(zip(reversed(self._along[:-1]), reversed(prompt_choices), strict=False))
        num_agreed = sum(own == theirs for own, theirs in pairs)
        return num_agreed, len(pairs) - num_agreed

    def time_token(self) -> float:
        """Returns the seconds that one drafted token takes, measured on one that is dropped, after
        `warm_up`."""
        start_s = self._clock.now()
        self._sequence.propose(1)
        return max(self._min_draft_s, self._clock.now() - start_s)

    def close(self) -> None:
        """Frees the sequence."""
        self._sequence.close()
