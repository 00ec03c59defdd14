"""A request on its way through the engine: `Job` while it waits, `Work` while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.cloud_verifier.engine.session import Session
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.common.types import (
    GenerateRequest,
    OpenRequest,
    SessionRequest,
    SessionResponse,
    Support,
    TokenIds,
    TokenLogprobs,
    VerifyRequest,
)

CATCH_UP_TOKENS = 64  # text a round may have to feed besides its draft and still be an ordinary one

Reply = Callable[[SessionResponse], object]
"""Takes one answer; called within a step, on whatever thread that runs; must not block."""


@dataclass(slots=True, eq=False)
class Job:
    session_id: bytes
    request: SessionRequest
    reply: Reply
    arrival_ns: int  # time.perf_counter_ns
    tenant: str = DEFAULT_TENANT
    has_entered: bool = False  # counted into the backlog when it arrived


def num_tokens_of_round(committed_tokens: Sequence[int], draft_tokens: Sequence[int]) -> int:
    """Those of a round's text and draft, and the one before them."""
    return len(committed_tokens) + len(draft_tokens) + 1


def num_tokens_of(request: SessionRequest) -> int:
    """Tokens that a request brings to be fed, as it looks from outside its session."""
    match request:
        case VerifyRequest():
            return num_tokens_of_round(request.committed_tokens, request.draft_tokens)
        case OpenRequest():
            return len(request.token_ids)
        case GenerateRequest():
            return len(request.committed_tokens) + 1
        case _:
            return 0


@dataclass(slots=True, eq=False)
class Work:
    """A job that needs forwards: what of the text is not in KV yet, then the draft."""

    session: Session
    job: Job
    request: OpenRequest | VerifyRequest | GenerateRequest
    total_tokens: int = 0  # tokens to feed when it started, for Progress
    start_ns: int = 0  # of its first forward
    forward_ns: int = 0
    num_generated: int = 0
    confirmed: tuple[TokenLogprobs, ...] | None = None  # of a first draft token that was the bonus before it
    draft_tokens: TokenIds = ()  # to verify: without such a first one
    draft_probs: tuple[float, ...] = ()  # q of each draft token, or empty
    supports: tuple[Support, ...] = ()  # the draft's distribution at each draft token, or empty
    draft_ns: int = 0  # what drafting this step took here (co-located)
    base_position: int = 0
    replaced_tokens: TokenIds = ()  # what followed the base before this round, should it be refused

    @property
    def num_pending(self) -> int:
        """Tokens still to feed: the text past KV, then the draft."""
        return self.session.chain.position - self.session.kv_length + len(self.draft_tokens)

    @property
    def num_confirmed(self) -> int:
        """Draft tokens that stand without being fed: the text has them already."""
        return 0 if self.confirmed is None else 1

    @property
    def num_logit_rows(self) -> int:
        return len(self.draft_tokens) + 1

    @property
    def tenant(self) -> str:
        return self.session.tenant

    @property
    def is_catching_up(self) -> bool:
        """More than an ordinary step to feed: a long opening, a rebuild, a recomputation."""
        return self.num_pending > self.num_logit_rows + CATCH_UP_TOKENS

    @property
    def is_prefill(self) -> bool:
        """May be fed in chunks beside the rounds that others wait for."""
        return isinstance(self.request, OpenRequest) or self.is_catching_up

    def is_expired(self, now_ns: int) -> bool:
        """A round not begun by its deadline: nobody waits for it any more. Nothing else expires."""
        return (
            isinstance(self.request, VerifyRequest)
            and 0 < self.request.deadline_ms * 1_000_000 <= now_ns - self.job.arrival_ns
            and self.start_ns == 0
            and not self.is_catching_up
        )

    def pending_tokens(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` to feed."""
        text = self.session.chain.token_ids[self.session.kv_length :]
        return [*text, *self.draft_tokens][:num_tokens]

    def undo(self) -> None:
        """The text as it was before this round, which was refused: a failed round changes nothing."""
        if self.num_generated == 0 and not isinstance(self.request, OpenRequest):
            self.session.chain.truncate(self.base_position)
            self.session.chain.extend(self.replaced_tokens)
