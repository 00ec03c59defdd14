"""A job while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cloud_verifier.backends.base import ForwardItem, KVSequence
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.session import Session
from outrider.cloud_verifier.verification.methods.base import Outcome
from outrider.cloud_verifier.verification.rows import ProcessedRows
from outrider.common.sequences import common_prefix
from outrider.common.tree import Tree
from outrider.common.types import (
    CorrectionKind,
    GenerateRequest,
    OpenRequest,
    Support,
    TokenIds,
    TokenLogprobs,
    VerifyRequest,
)

CATCH_UP_TOKENS = 64  # a round may have to feed so many besides its draft and still be an ordinary one


@dataclass(frozen=True, slots=True)
class KnownStates:
    """Holds the states (`ForwardItem.states`) that a draft computed of the tokens after the first `length` of `kv`."""

    kv: KVSequence
    length: int
    rows: Any


@dataclass(slots=True, eq=False)
class Work:
    """A job that needs forwards: the tokens of its sequence that have no KV yet, then the draft."""

    session: Session
    job: Job
    request: OpenRequest | VerifyRequest | GenerateRequest
    total_tokens: int = 0  # tokens to feed when it started, for Progress
    start_ns: int = 0  # of its first forward
    forward_ns: int = 0
    num_generated: int = 0
    answered_ns: int | None = None  # of a generation: from its arrival to its last step's answer
    # Of an opening: rows before the last token's, for `Opened.prompt_choices`; as many as the last forward can give.
    num_prompt_rows: int = 0
    prompt_rows: ProcessedRows | None = None  # these, once they are computed
    confirmed: tuple[TokenLogprobs, ...] | None = None  # of a first draft token that was the bonus before it
    draft_tokens: TokenIds = ()  # to verify: without such a first one, and what does not follow it
    draft_probs: tuple[float, ...] = ()  # q of each draft token, or empty
    supports: tuple[Support, ...] = ()  # the draft's distribution at each row before a draft token, or empty
    tree: Tree | None = None  # that the draft tokens are, where they are no chain
    known_states: KnownStates | None = None  # where its draft source computed them
    sent_nodes: Sequence[int] = ()  # of a tree: their indices in the request
    confirmed_node: TokenIds = ()  # of a tree: the index of such a first one
    wants_choices: bool = False  # its draft source reads them
    # The target's tokens after the last draft's base and after each of its tokens; none where a grammar cut the draft.
    choices: TokenIds = ()
    draft_ns: int = 0  # what drafting this step took here (co-located), for all that drafted
    draft_s: float = 0.0  # what drafting for this work alone took since its tenant was charged
    prepare_s: float = 0.0  # as much of preparing its rows, before they are read
    failure: Exception | None = None  # raised where it is finished, which ends its session
    base_position: int = 0
    replaced_tokens: TokenIds = ()  # what followed the base before this round, should it be refused

    @property
    def num_pending(self) -> int:
        """Returns how many tokens are still to be fed: those without KV, then the draft."""
        return self.session.chain.position - self.session.kv_length + len(self.draft_tokens)

    @property
    def num_confirmed(self) -> int:
        """Returns how many draft tokens are accepted without being fed: the sequence has them already."""
        return 0 if self.confirmed is None else 1

    @property
    def num_logit_rows(self) -> int:
        """Returns how many rows of logits its answer needs: one after each draft token and the base."""
        return len(self.draft_tokens) + 1

    @property
    def num_rows(self) -> int:
        """Returns how many rows of logits its last forward gives."""
        return self.num_prompt_rows + self.num_logit_rows

    @property
    def num_positions(self) -> int:
        """Returns how many tokens have KV."""
        return self.session.kv_length

    @property
    def tenant(self) -> str:
        """Returns the session's tenant."""
        return self.session.tenant

    @property
    def is_catching_up(self) -> bool:
        """Returns whether it feeds more than an ordinary step: a long opening, a rebuild, a recomputation."""
        return self.num_pending > self.num_logit_rows + CATCH_UP_TOKENS

    @property
    def is_prefill(self) -> bool:
        """Returns whether it may be fed in chunks beside the rounds that others wait for."""
        return isinstance(self.request, OpenRequest) or self.is_catching_up

    def report(self, now_s: float) -> None:
        """Tells its edge how far it is."""
        self.job.report(self.total_tokens - self.num_pending, self.total_tokens, now_s)

    def is_expired(self, now_ns: int) -> bool:
        """Returns whether it is a round not begun by its deadline. Nothing else expires."""
        return (
            isinstance(self.request, VerifyRequest)
            and 0 < self.request.deadline_ms * 1_000_000 <= now_ns - self.job.arrival_ns
            and self.start_ns == 0
            and not self.is_catching_up
        )

    def accepted_tokens(self, outcome: Outcome) -> TokenIds:
        """Returns the draft tokens that are accepted."""
        if self.tree is None:
            return self.draft_tokens[: outcome.accepted_len]
        return tuple(self.draft_tokens[node] for node in outcome.accepted_nodes)

    def judged_tokens(self, outcome: Outcome) -> tuple[int, int]:
        """Returns how many tokens of the draft, or of a tree's likeliest path, were accepted and rejected: at most one
        is rejected, since what is drafted after it is not judged."""
        num_accepted, length = outcome.accepted_len, len(self.draft_tokens)
        if self.tree is not None:
            length = self.tree.num_main_nodes
            num_accepted = common_prefix(outcome.accepted_nodes, range(length))
        is_over = outcome.correction_kind is CorrectionKind.NONE and num_accepted == outcome.accepted_len
        return num_accepted, int(num_accepted < length and not is_over)

    def sent_accepted_nodes(self, outcome: Outcome) -> TokenIds:
        """Returns the indices in the request of a tree's accepted tokens; none of a chain."""
        return (*self.confirmed_node, *(self.sent_nodes[node] for node in outcome.accepted_nodes))

    def pending_tokens(self, num_tokens: int) -> list[int]:
        """Returns the next `num_tokens` to feed."""
        without_kv = self.session.chain.token_ids[self.session.kv_length :]
        return [*without_kv, *self.draft_tokens][:num_tokens]

    def forward_item(self, num_tokens: int, *, is_final: bool) -> ForwardItem:
        """Returns the next `num_tokens` as part of a forward; with `is_final` they are the last ones."""
        if is_final:
            self.num_prompt_rows = min(self.num_prompt_rows, num_tokens - self.num_logit_rows)
        kv, known = self.session.kv, self.known_states if is_final else None
        assert kv is not None, "active work has KV"
        if known is not None and (known.kv is not kv or known.length != kv.length):
            known = None
        return ForwardItem(
            kv,
            self.pending_tokens(num_tokens),
            self.num_rows if is_final else 0,
            self.tree.parents if self.tree and is_final else (),
            None if known is None else known.rows,
        )

    def undo(self) -> None:
        """Restores the sequence that was before this round: a failed round changes nothing."""
        if self.num_generated == 0 and not isinstance(self.request, OpenRequest):
            self.session.chain.truncate(self.base_position)
            self.session.chain.extend(self.replaced_tokens)
