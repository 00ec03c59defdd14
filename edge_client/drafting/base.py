"""Defines a draft: shared weights (`DraftModel`) and the state of one sequence (`DraftSequence`).

The two are separate so that several requests share one set of weights. Between rounds a sequence holds the
committed tokens; proposed tokens are speculation, kept only as reusable KV.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from outrider.common.types import Draft, SamplingParams, Signals, TokenIds
from outrider.edge_client.drafting.trees import Continuations, Expander, TreeBudget, TreeDraft

if TYPE_CHECKING:  # it imports numpy, and `--help` does not
    from outrider.edge_client.drafting.node_values import NodeValues

DEFAULT_MAX_NGRAM = 4  # prompt-lookup looks for runs of at most so many tokens


class Stop(enum.Enum):
    """Answers, after a token was sampled, whether the draft ends.

    BEFORE drops the token, so it may depend on nothing but the tokens before it and signals that are
    functions of the distribution (entropy, margin, variance): a draft that leaves out tokens by their own
    value is no sample of the draft model, and methods that use its probabilities would be wrong. A rule that
    looks at the token itself answers AFTER.
    """

    NO = "no"
    AFTER = "after"  # it is the draft's last
    BEFORE = "before"  # the draft ends with the token before it


ShouldStop = Callable[[int, Signals | None, int], Stop]
"""Asked after each sampled token: (its id, its signals, tokens sampled so far, it included). None: the draft
tells no signals."""

NodeRule = Callable[[TokenIds, Signals], Stop]
"""Asked about each node of a tree, after the node before it: (the tokens of its path, the signals of the last).
AFTER: no node follows it. BEFORE: it is left out; depends on nothing but the tokens before it and signals that are
functions of the distribution, so that it is said of all nodes after one path or of none."""


class DraftSequence(Protocol):
    """Drafts one sequence. Not thread-safe; sequences of one model may run in parallel."""

    @property
    def position(self) -> int:
        """Returns the number of committed tokens, prompt included."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids. KV of proposed tokens that agree is kept, the rest is rolled back.

        Cheap: ids without KV are fed by the next `propose`. Ids may exceed the draft's context; the sequence
        then proposes nothing. Raises `InvalidFieldError` for ids >= `num_tokens`.
        """

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens (0 <= position <= length)."""

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples up to `num_draft_tokens` tokens after the committed ones, which stay unchanged.

        `should_stop` ends the draft early: it then has the first of the tokens that it would have had, or
        none.

        Returns fewer tokens near the context limit and none at it, and none where the strategy has no
        proposal; the verifier then samples the next token. At least one token must be committed.
        """

    def close(self) -> None:
        """Frees the KV. A closed sequence must not be used again; closing twice is allowed."""

    def check_integrity(self) -> None:
        """Asserts that KV and committed tokens agree (tests)."""


@runtime_checkable
class KeepsRunnerUps(Protocol):
    """Records what a sequence would have drafted instead of each token."""

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        """Fills `Draft.runner_ups` from now on, or no longer, which is faster. Allowed only where drafts are sampled
        without a support."""


@runtime_checkable
class ProposesTrees(Protocol):
    """Drafts several continuations at once."""

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """Returns the most valuable nodes that were found after the committed tokens, which stay unchanged, as a
        tree: depth-first, the likeliest child first. `values` estimates the chance of a node. `rule` ends paths; the
        draft then has signals.

        A sequence with supports draws the children of each node from its support without replacement, in their order,
        and returns one support for each node with children.

        A later `commit` along any of its paths keeps that path's KV. Returns fewer nodes near the context limit,
        and none where the strategy has no proposal.
        """


@runtime_checkable
class ProposesUnions(ProposesTrees, Protocol):
    """Drafts trees of what it finds likely and of what others tell."""

    def propose_union(
        self, budget: TreeBudget, values: NodeValues, copies: Sequence[Expander[Continuations]]
    ) -> TreeDraft:
        """Returns a tree as `propose_tree` does, with nodes that `copies` told, which cost no run."""


Guess = Callable[[TokenIds, int], TokenIds]
"""Takes the tokens drafted after the text so far and how many more may be wanted; returns what may follow, possibly
nothing."""


@runtime_checkable
class TakesGuesses(Protocol):
    """Computes the tokens of a chain together with what may follow them."""

    def guess_by(self, guess: Guess) -> None:
        """Asks `guess`, in each run for a chain, what may follow: the run computes that too, and what it would have
        drafted there is drafted without another run. Has no effect where a run gives one row."""


@runtime_checkable
class Prepares(Protocol):
    """Does part of a token's work before its turn."""

    def prepare(self, num_tokens: int) -> Iterator[None]:
        """Makes what drafts of the next `num_tokens` positions need beside the model. Yields before each piece of
        work, so that the caller can stop."""


@runtime_checkable
class ProposesAlong(Protocol):
    """Tells of text that is known already what it would have drafted there."""

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        """Commits `token_ids` and returns the token that `propose(1)` would have brought in the place of each, and
        after the last. At least one token must be committed before. Only commits and returns nothing where it cannot
        tell: at the context limit, where each would take a run of its own, and where a token depends on all those
        before it."""


@runtime_checkable
class UsesValues(Protocol):
    """Drafts chains by the chances of its tokens."""

    def use_values(self, values: NodeValues) -> None:
        """Estimates chances by `values` from now on, which learns from verdicts."""


@runtime_checkable
class Remembers(Protocol):
    """Keeps texts that have ended for later ones."""

    def remember(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Keeps a text that has ended, prompt included."""


@runtime_checkable
class WritesAlone(Protocol):
    """Drafts in another way where no target judges."""

    def write_alone(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples tokens that are kept as they are; see `DraftSequence.propose`."""


@runtime_checkable
class ServesOwners(Protocol):
    """Is a `DraftModel` that keeps texts of several users, each apart from the others."""

    def of_owner(self, owner: str) -> DraftModel:
        """Returns the model for one user's sequences; "" is who needs no key."""


@runtime_checkable
class ReportsRuntime(Protocol):
    """Says what computes a draft."""

    @property
    def runtime(self) -> str:
        """Returns the library, the device, and what weights and KV are kept as, for people."""


class DraftModel(Protocol):
    """Holds weights that sequences share, and their identity."""

    @property
    def num_tokens(self) -> int:
        """Returns the tokenizer's size: ids at or above it do not exist and are never proposed."""

    @property
    def max_context(self) -> int:
        """Returns the longest sequence, drafted tokens included, that the draft supports."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text."""

    @property
    def fingerprint(self) -> str:
        """Returns the SHA-256 over configuration and weights, in hex."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Returns the SHA-256 of the tokenizer, in hex."""

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Returns which of nll, entropy, margin and variance its drafts carry; empty for a draft that
        copies."""

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> DraftSequence:
        """Returns a new, empty sequence. Penalties treat its first `num_prompt_tokens` ids as the prompt;
        None means all ids of the first `commit`.

        `num_support` (`outrider.common.methods.num_support`): 0 samples from the whole distribution with the
        noise that both sides share; n samples from integer weights over the n most probable ids, returned in
        `Draft.supports`.
        """

    def close(self) -> None:
        """Frees the weights once no sequence uses them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def runtime_of(draft: DraftModel | None) -> str | None:
    """Returns what computes a draft, where it says so."""
    return draft.runtime if isinstance(draft, ReportsRuntime) else None


def ended(draft: Draft, should_stop: ShouldStop | None) -> Draft:
    """Returns what a stop rule leaves of a draft whose tokens were known beforehand."""
    if should_stop is None:
        return draft
    for number, token_id in enumerate(draft.token_ids, start=1):
        signals = draft.signals[number - 1] if draft.signals else None
        stop = should_stop(token_id, signals, number)
        if stop is not Stop.NO:
            is_before = stop is Stop.BEFORE
            return first_tokens(draft, number - is_before, signals if is_before else None)
    return draft


def first_tokens(draft: Draft, num_tokens: int, doubted: Signals | None) -> Draft:
    """Returns a chain's first tokens, with what belongs to them."""
    return replace(
        draft,
        token_ids=draft.token_ids[:num_tokens],
        draft_probs=draft.draft_probs[:num_tokens],
        signals=draft.signals[:num_tokens],
        supports=draft.supports[:num_tokens],
        runner_ups=draft.runner_ups[:num_tokens],
        doubted=doubted,
    )
