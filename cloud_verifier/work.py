"""A request on its way through the engine: `Job` while it waits, `Work` while it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud_verifier.session import DEFAULT_TENANT, Session
from common.types import (
    GenerateRequest,
    OpenRequest,
    SessionRequest,
    SessionResponse,
    TokenIds,
    VerifyRequest,
)

Reply = Callable[[SessionResponse], object]
"""Takes one answer; called on the engine thread, must not block."""


@dataclass(frozen=True, slots=True)
class Job:
    session_id: bytes
    request: SessionRequest
    reply: Reply
    arrival_ns: int
    tenant: str = DEFAULT_TENANT


@dataclass(slots=True)
class Work:
    """A job that needs forwards: what of the text is not in KV yet, then the draft."""

    session: Session
    job: Job
    request: OpenRequest | VerifyRequest | GenerateRequest
    total_tokens: int  # tokens to feed when it started, for Progress
    start_ns: int = 0  # of its first forward
    forward_ns: int = 0
    num_generated: int = 0
    draft_tokens: TokenIds = ()
    draft_probs: tuple[float, ...] = ()  # q of each draft token, or empty
    draft_ns: int = 0  # what drafting this step took here (co-located)
    base_position: int = 0
    replaced_tokens: TokenIds = ()  # what followed the base before this round, should it be refused

    @property
    def num_pending(self) -> int:
        """Tokens still to feed: the text past KV, then the draft."""
        return self.session.chain.position - self.session.kv_length + len(self.draft_tokens)

    @property
    def num_logit_rows(self) -> int:
        return len(self.draft_tokens) + 1

    @property
    def is_catching_up(self) -> bool:
        """More than an ordinary step to feed: an opening, a rebuild, a recomputation."""
        return self.num_pending > self.num_logit_rows + 64

    def pending_tokens(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` to feed."""
        text = self.session.chain.token_ids[self.session.kv_length :]
        return [*text, *self.draft_tokens][:num_tokens]

    def undo(self) -> None:
        """The text as it was before this round, which was refused: a failed round changes nothing."""
        if self.num_generated == 0 and not isinstance(self.request, OpenRequest):
            self.session.chain.truncate(self.base_position)
            self.session.chain.extend(self.replaced_tokens)
