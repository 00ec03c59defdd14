"""Sessions: a text, its chained hashes, its KV, and the replies of its last rounds.

Pure state with an injected clock; nothing here computes or waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.cloud_verifier.backends.base import KVSequence
from outrider.common.alignment import TokenChain
from outrider.common.sequences import common_prefix
from outrider.common.types import (
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    TokenIds,
    TokenLogprobs,
    VerifyRequest,
)

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.work import Job, Work

MAX_STORED_REPLIES = 32
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Bonus:
    """The text's last token, which the next round's first draft token is checked against."""

    position: int  # its index
    logprobs: tuple[TokenLogprobs, ...]  # its own, where they were asked for


@dataclass(slots=True, eq=False)
class Session:
    """One sequence. `kv` is None before its first step and after an eviction; the ids outlive it."""

    opening: OpenRequest
    chain: TokenChain
    stop_ids: frozenset[int]
    last_used_s: float
    tenant: str = DEFAULT_TENANT
    kv: KVSequence | None = None
    last_round_id: int = 0
    was_pipelined: bool = False
    bonus: Bonus | None = None  # of the last round, if another was announced behind it
    choice_position: int | None = (
        None  # where the edge owes its choice among candidates, after accepted tokens
    )
    work: Work | None = None
    waiting: deque[Job] = field(default_factory=deque)
    replies: OrderedDict[int, tuple[VerifyRequest, SessionResponse]] = field(default_factory=OrderedDict)
    opening_reply: SessionResponse | None = None

    @property
    def kv_length(self) -> int:
        return self.kv.length if self.kv is not None else 0

    @property
    def prompt_ids(self) -> TokenIds:
        return self.opening.token_ids[: self.opening.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.chain.token_ids[self.opening.num_prompt_tokens :]

    @property
    def is_busy(self) -> bool:
        return self.work is not None or bool(self.waiting)

    def stored_reply(self, request: VerifyRequest) -> SessionResponse | None:
        """The answer to a round seen before, or None for a new one (docs/protocol.md, "A round").

        Same id and content: the stored reply. Same id, other content: INVALID. A lower id that is
        no longer stored: STALE.
        """
        stored = self.replies.get(request.round_id)
        if stored is not None:
            if _content(stored[0]) == _content(request):
                return stored[1]
            return self.error(
                request.round_id, RoundErrorCode.INVALID, "sent before with other content", field="round_id"
            )
        if request.round_id <= self.last_round_id:
            return self.error(
                request.round_id, RoundErrorCode.STALE, f"the session is at round {self.last_round_id}"
            )
        return None

    def store_reply(self, request: VerifyRequest, reply: SessionResponse) -> None:
        self.replies[request.round_id] = (request, reply)
        while len(self.replies) > MAX_STORED_REPLIES:
            self.replies.popitem(last=False)

    def error(
        self, round_id: int, code: RoundErrorCode, message: str, *, field: str = "", retry_after_ms: int = 0
    ) -> RoundError:
        return RoundError(
            round_id=round_id,
            code=code,
            message=message,
            field=field,
            retry_after_ms=retry_after_ms,
            position=self.chain.position,
            hash=self.chain.hash,
        )

    def check_integrity(self) -> None:
        """KV never runs ahead of the text: KV length ≤ position − 1 between steps (DESIGN §4)."""
        self.chain.check_integrity()
        if self.work is None:
            assert self.kv_length <= max(0, self.chain.position - 1), (
                f"KV holds {self.kv_length} tokens of {self.chain.position}"
            )
        assert len(self.replies) <= MAX_STORED_REPLIES


def _content(request: VerifyRequest) -> VerifyRequest:
    """What makes two requests the same round: all but how they travelled."""
    return replace(request, session_id=b"", deadline_ms=0)


class SessionStore:
    """Sessions by tenant and id, least recently used first.

    The tenant is part of the name: what one tenant asks about another's session id is answered as if
    that session did not exist, and the same id may stand for a session of each.
    """

    def __init__(
        self,
        max_sessions: int,
        idle_ttl_s: float,
        clock: Callable[[], float],
        tenant_max_sessions: int = 0,
    ) -> None:
        """`tenant_max_sessions` of 0 is no limit but `max_sessions`."""
        self.max_sessions = max_sessions
        self.tenant_max_sessions = tenant_max_sessions or max_sessions
        self.idle_ttl_s = idle_ttl_s
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, bytes], Session] = OrderedDict()
        self._num_of: Counter[str] = Counter()  # sessions of each tenant that has any

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, tenant: str, session_id: bytes) -> Session | None:
        """The session, now the most recently used one."""
        session = self._sessions.get((tenant, session_id))
        if session is not None:
            session.last_used_s = self._clock()
            self._sessions.move_to_end((tenant, session_id))
        return session

    def put(self, tenant: str, opening: OpenRequest, stop_ids: frozenset[int]) -> Session:
        """A new session, or the known one with its text replaced; KV of the common prefix stays valid."""
        session = self._sessions.get((tenant, opening.session_id))
        if session is None:
            session = Session(opening, TokenChain(opening.token_ids), stop_ids, self._clock(), tenant)
            self._sessions[tenant, opening.session_id] = session
            self._num_of[tenant] += 1
        else:
            _rebuild_chain(session.chain, opening.token_ids)
            session.opening, session.stop_ids = opening, stop_ids
            session.replies.clear()
        session.last_round_id = max(session.last_round_id, opening.round_id)
        session.was_pipelined = False
        session.bonus = None
        session.choice_position = None
        return session

    def touch(self, session: Session) -> None:
        """Something happened in it: its silence begins now."""
        self.get(session.tenant, session.opening.session_id)

    def remove(self, session: Session) -> None:
        if self._sessions.pop((session.tenant, session.opening.session_id), None) is not None:
            self._num_of[session.tenant] -= 1
            if not self._num_of[session.tenant]:
                del self._num_of[session.tenant]

    def make_room(self, tenant: str) -> Session | None:
        """Removes and returns the least recently used idle session that stands in `tenant`'s way.

        At the tenant's own limit that is one of its own; else one of the tenant that has most.
        Returns None when there is room already, or when all of them are busy (see `is_full`).
        """
        if not self.is_full(tenant):
            return None
        idle = [session for session in self._sessions.values() if not session.is_busy]
        if self._num_of[tenant] >= self.tenant_max_sessions:
            idle = [session for session in idle if session.tenant == tenant]
        if not idle:
            return None
        oldest = max(idle, key=lambda session: self._num_of[session.tenant])  # the first of equals
        self.remove(oldest)
        return oldest

    def is_full(self, tenant: str) -> bool:
        is_own_full = self._num_of[tenant] >= self.tenant_max_sessions
        return is_own_full or len(self._sessions) >= self.max_sessions

    def what_is_full(self, tenant: str) -> str:
        if self._num_of[tenant] >= self.tenant_max_sessions:
            return f"all {self.tenant_max_sessions} sessions of this tenant"
        return f"all {self.max_sessions} sessions"

    def take_expired(self, most: int) -> list[Session]:
        """Removes and returns the sessions idle for longer than the TTL, `most` of them at most."""
        deadline = self._clock() - self.idle_ttl_s
        expired: list[Session] = []
        for session in self._sessions.values():
            if session.last_used_s >= deadline or len(expired) == most:
                break  # used later, and so are all that follow
            if not session.is_busy:
                expired.append(session)
        for session in expired:
            self.remove(session)
        return expired

    def eviction_candidates(self) -> list[Session]:
        """Sessions that hold KV and do nothing, least recently used first."""
        return [s for s in self._sessions.values() if s.kv is not None and not s.is_busy]

    def check_integrity(self) -> None:
        assert len(self._sessions) <= self.max_sessions
        assert self._num_of == Counter(tenant for tenant, _ in self._sessions)
        for session in self._sessions.values():
            session.check_integrity()


def _rebuild_chain(chain: TokenChain, token_ids: TokenIds) -> None:
    common = common_prefix(chain.token_ids, token_ids)
    chain.truncate(common)
    chain.extend(token_ids[common:])
