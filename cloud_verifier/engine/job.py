"""A request on its way to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.cloud_verifier.engine.backlog import AdmissionTicket
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.cloud_verifier.verification.grammars import Found
from outrider.common.types import (
    GenerateRequest,
    OpenRequest,
    Progress,
    SessionRequest,
    SessionResponse,
    VerifyRequest,
)

Reply = Callable[[SessionResponse], object]
"""Takes one answer. Called within a step, on whatever thread that runs; must not block."""


# Between two reports to an edge whose opening or recomputation waits: after 5 silent seconds it sends again, and gives
# up its place in the queue.
REPORT_S = 2.0


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Says that a call is over. What it asked for ends, whether it waits or runs, except a running round: its
    verdict is stored for when the edge sends it again."""


@dataclass(slots=True, eq=False)
class Job:
    """Holds one request, its tenant, its time of arrival and the callback for its answers."""

    session_id: bytes
    request: SessionRequest | Disconnect
    reply: Reply
    arrival_ns: int  # by the engine's clock
    tenant: str = DEFAULT_TENANT
    ticket: AdmissionTicket | None = None  # of a round that the backlog admitted when it arrived
    call: object = None  # that the request came by: the same object for all requests of a call
    found: Found | None = None  # of an opening that waited for its grammar
    on_taken: Callable[[], object] | None = None  # of a request without an answer: called as `reply` is
    reported_s: float = float("-inf")  # when its edge was last told how far it is

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the request brings to be fed, by its own fields alone."""
        match self.request:
            case VerifyRequest() as request:
                return num_tokens_of_round(len(request.committed_tokens), len(request.draft_tokens))
            case OpenRequest() as request:
                return len(request.token_ids)
            case GenerateRequest() as request:
                return num_tokens_of_round(len(request.committed_tokens), 0)
            case _:
                return 0

    @property
    def round_id(self) -> int:
        """Returns the request's round, 0 where it has none."""
        return getattr(self.request, "round_id", 0)

    def report(self, done: int, total: int, now_s: float) -> None:
        """Tells its edge how many of its tokens are computed."""
        self.reported_s = now_s
        self.reply(Progress(self.round_id, done, total))

    def is_report_due(self, now_s: float) -> bool:
        """Returns whether its edge is to be told that it waits."""
        return now_s >= self.reported_s + REPORT_S


def num_tokens_of_round(num_committed_tokens: int, num_draft_tokens: int) -> int:
    """Returns how many tokens a round feeds: its own, and the last one before them."""
    return num_committed_tokens + num_draft_tokens + 1
