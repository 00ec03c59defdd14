"""All sessions of a verifier: which there are, their KV, and which of them is being computed.

Everything that begins, ends or evicts a session or its work happens here. Lives on the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.engine.idle_time import SWEEP_S, IdleClock
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.line import SessionKey
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.engine.scheduler import OTHERS_ABOUT_S
from outrider.cloud_verifier.engine.session import Session, num_sampling_ids_of
from outrider.cloud_verifier.engine.work import Work
from outrider.common.alignment import TokenChain
from outrider.common.clock import Clock
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.process.logs import LogLimiter, session_tag
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Limits,
    OpenRequest,
    RoundError,
    RoundErrorCode,
)

log = logging.getLogger(__name__)

NEXT_LOT_S, MAX_SWEPT = 0.01, 8  # of many sessions that expire together, how many go at once
INTERNAL_MESSAGE = "the verifier failed here (its log says where); open the session again"


class SessionManager:
    """Holds sessions by tenant and id, least recently used first, and owns their KV and active work.

    The tenant is part of the key: a session of one tenant does not exist for another, and the same id may
    name a session of each.
    """

    def __init__(
        self,
        backend: TargetBackend,
        observer: EngineObserver,
        limits: Limits,
        tenant_max_sessions: int,
        clock: Clock,
        has_arrived: Callable[[SessionKey], bool],
        *,
        tenant_max_sampling_ids: int = 0,
        on_forgotten: Callable[[SessionKey], object] = lambda key: None,
    ) -> None:
        """`tenant_max_sessions` of 0 is no limit but `limits.max_sessions`. `has_arrived` returns whether a request of
        a session waits to be admitted: that session is not idle. `tenant_max_sampling_ids` bounds what
        `Session.num_sampling_ids` counts; 0 is no limit. `on_forgotten` is called with each session that has ended."""
        self.max_sessions = limits.max_sessions
        self.active: dict[Session, Work] = {}  # in order of their turn
        self._tenant_max_sessions = tenant_max_sessions or limits.max_sessions
        self._tenant_max_sampling_ids = tenant_max_sampling_ids
        self._idle_ttl_s = limits.session_idle_ttl_ms / 1000.0
        self._backend = backend
        self._observer = observer
        self.idle_clock = IdleClock(clock)
        self._clock = clock
        self._has_arrived, self._on_forgotten = has_arrived, on_forgotten
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._num_of: Counter[str] = Counter()  # sessions of each tenant that has any
        self._num_sampling_ids_of: Counter[str] = Counter()  # of those that have any
        self._num_opened = 0
        self._released: deque[Session] = deque()  # with jobs that waited for the work that has ended
        self._next_sweep_s = clock.now() + SWEEP_S
        self._limiter = LogLimiter(log, clock=clock.now)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    # ------------------------------------------------------------------------------------ the store

    def get(self, tenant: str, session_id: bytes) -> Session | None:
        """Returns the session, now the most recently used one, or None."""
        session = self._sessions.get((tenant, session_id))
        if session is not None:
            self._touch(session)
        return session

    def open(self, tenant: str, opening: OpenRequest, stop_ids: frozenset[int]) -> Session:
        """Returns a new session, or the known one with its sequence replaced; KV of the common prefix stays."""
        session = self._sessions.get((tenant, opening.session_id))
        if session is None:
            session = Session(opening, TokenChain(opening.token_ids), stop_ids, self.idle_clock.now(), tenant)
            session.last_round_id, session.number = opening.round_id, self._num_opened
            self._num_opened += 1
            self._sessions[tenant, opening.session_id] = session
            self._num_of[tenant] += 1
            self._count_sampling_ids(tenant, session.num_sampling_ids)
        else:
            num_before = session.num_sampling_ids
            num_common = session.reopen(opening, stop_ids)
            self._count_sampling_ids(tenant, session.num_sampling_ids - num_before)
            # The last token is always fed, so that its logits can be read: KV length ≤ position − 1.
            self.truncate_kv(session, min(num_common, len(opening.token_ids) - 1))
        return session

    def make_room(self, tenant: str, opening: OpenRequest) -> str:
        """Makes room for a session of `tenant` with this opening, or for its new opening. Returns the limit that is in
        the way, "" for none.

        Idle sessions go, the least recently used ones: at a limit of the tenant its own, else one of the tenant that
        has most.
        """
        session = self._sessions.get((tenant, opening.session_id))
        limit = "" if session is not None else self._make_session_room(tenant)
        return limit or self._make_sampling_room(tenant, opening, session)

    def _make_session_room(self, tenant: str) -> str:
        is_own_full = self._num_of[tenant] >= self._tenant_max_sessions
        if not is_own_full and len(self._sessions) < self.max_sessions:
            return ""
        idle = [s for s in self if (s.tenant == tenant or not is_own_full) and self._is_idle(s)]
        if not idle:
            own = f"all {self._tenant_max_sessions} sessions of this tenant"
            return own if is_own_full else f"all {self.max_sessions} sessions"
        self._give_up(max(idle, key=lambda session: self._num_of[session.tenant]))  # the first of equals
        return ""

    def _make_sampling_room(self, tenant: str, opening: OpenRequest, session: Session | None) -> str:
        """Makes room for the opening's stop ids, biases and bad words; one opening always fits."""
        most, num_ids = self._tenant_max_sampling_ids, num_sampling_ids_of(opening)
        num_own = 0 if session is None else session.num_sampling_ids
        while most and num_ids and (others := self._num_sampling_ids_of[tenant] - num_own) + num_ids > most:
            own = (each for each in self if each.tenant == tenant and each is not session)
            idle = next((each for each in own if each.num_sampling_ids and self._is_idle(each)), None)
            if idle is not None:
                self._give_up(idle)
            elif others:
                return f"{others} of {most} sampling ids of this tenant (--tenant-max-sampling-ids)"
            else:
                break
        return ""

    def _give_up(self, session: Session) -> None:
        self._observer.on_evicted("session", session.opening.session_id)
        self.forget(session)

    def _count_sampling_ids(self, tenant: str, number: int) -> None:
        self._num_sampling_ids_of[tenant] += number
        if not self._num_sampling_ids_of[tenant]:
            del self._num_sampling_ids_of[tenant]

    def forget(self, session: Session) -> None:
        """Ends a session: its running work, if any, and its KV."""
        self.active.pop(session, None)
        session.running = None
        self.free(session)
        key = session.tenant, session.opening.session_id
        if self._sessions.pop(key, None) is not None:
            self._num_of[session.tenant] -= 1
            if not self._num_of[session.tenant]:
                del self._num_of[session.tenant]
            self._count_sampling_ids(session.tenant, -session.num_sampling_ids)
            self._on_forgotten(key)

    def note_used(self, keys: Iterable[SessionKey]) -> None:
        """Notes that sessions are in use of which no request was admitted; those that are not known are passed over."""
        for key in keys:
            if (session := self._sessions.get(key)) is not None:
                self._touch(session)

    @property
    def seconds_to_sweep(self) -> float:
        """Returns how long it is until idle sessions are looked for again."""
        return self._next_sweep_s - self._clock.now()

    def sweep(self) -> None:
        """Ends sessions that were idle for longer than the TTL, where it is time to look for them."""
        self.idle_clock.look()
        if self.seconds_to_sweep > 0:
            return
        now_s = self.idle_clock.now()
        expired: list[Session] = []
        for session in self:
            if session.last_used_s >= now_s - self._idle_ttl_s or len(expired) == MAX_SWEPT:
                break  # used later, and so are all that follow
            if self._is_idle(session):
                expired.append(session)
        for session in expired:
            self._observer.on_expired(session.opening.session_id, self._idle_ttl_s)
            self.forget(session)
        # Many that expire together go in small lots, between the steps of the others.
        self._next_sweep_s = self._clock.now() + (SWEEP_S if len(expired) < MAX_SWEPT else NEXT_LOT_S)

    def _is_idle(self, session: Session) -> bool:
        return not session.is_busy and not self._has_arrived((session.tenant, session.opening.session_id))

    def _touch(self, session: Session) -> None:
        session.last_used_s = self.idle_clock.now()
        self._sessions.move_to_end((session.tenant, session.opening.session_id))

    # ------------------------------------------------------------------------------------------- KV

    def publish(self, session: Session) -> None:
        """Lets later sessions of the tenant reuse this one's KV, as far as it is of its sequence."""
        if session.kv is not None:
            self._backend.publish(session.kv, session.chain.token_ids)

    def keep_kv(self, session: Session, start: int, nodes: Sequence[int]) -> None:
        """Keeps the first `start` tokens' KV, and that of the nodes of the tree that was fed after them."""
        assert session.kv is not None, "a tree was fed"
        self._backend.keep(session.kv, start, nodes)
        if session.features is not None:
            session.features.keep(start, nodes)

    def free(self, session: Session, *, is_wrong: bool = False) -> None:
        """Gives the session's KV back; its ids stay. The prefix cache keeps it for as long as it can; none of
        it where it may be wrong."""
        if session.kv is not None:
            if not is_wrong:
                self.publish(session)
            self._backend.close(session.kv, is_wrong=is_wrong)
            session.kv = None
        if session.features is not None:
            session.features.forget()

    def truncate_kv(self, session: Session, length: int) -> None:
        """Cuts the session's KV to the first `length` tokens of its sequence."""
        if session.kv is not None and session.kv.length > length:
            self._backend.truncate(session.kv, length)
        if session.features is not None:
            session.features.truncate(length)

    def make_kv_room(self) -> Work | None:
        """Gives back the KV of an idle session, the least recently used one of the tenant that holds most. Where none
        is idle, returns the work that has to give way, which keeps its KV: that of the newest session of the tenant
        that holds most. Older ones go on and end, so that sessions that are too large together do not stop each other.

        A tenant that holds most with several works gives way before another tenant's session that is in use.
        """
        held = Counter[str]()
        for session in self:
            held[session.tenant] += session.kv_length
        newest = max(self.active, key=lambda each: (held[each.tenant], each.tenant, each.number))
        victim = self._idle_with_kv(held, newest)
        if victim is None:
            return self.active[newest]
        self.evict(victim)
        return None

    def _idle_with_kv(self, held: Counter[str], newest: Session) -> Session | None:
        """Returns the idle session whose KV is given back, None where `newest` has to give way. `held` has the tokens
        of each tenant."""
        idle = [session for session in self if session.kv is not None and not session.is_busy]
        if not idle:
            return None
        victim = max(idle, key=lambda session: held[session.tenant])  # the first of equals
        has_more = held[newest.tenant] > held[victim.tenant]
        if has_more and sum(session.tenant == newest.tenant for session in self.active) > 1:
            # The least recently used of all is not expected back, or every idle one is.
            return idle[0] if idle[0].last_used_s < self.idle_clock.now() - OTHERS_ABOUT_S else None
        return victim

    def evict(self, session: Session) -> None:
        """Gives the session's KV back, which is recomputed when it is needed."""
        self._observer.on_evicted("kv", session.opening.session_id)
        self.free(session)

    # ----------------------------------------------------------------------------------------- work

    def activate(self, work: Work) -> None:
        """Makes `work` its session's one running job."""
        session = work.session
        if session.kv_length == 0:  # before it is planned: what the prefix cache holds need not be fed
            self.free(session)
            # All but what gives the rows of a prompt's places, which is fed.
            length = max(0, session.chain.position - work.num_prompt_rows)
            session.kv = self._backend.new_sequence(session.tenant, session.chain.token_ids[:length])
            num_reused = session.kv.num_reused
            self._observer.on_prefix(num_reused, session.chain.position - num_reused)
        session.running = work.job
        self.active[session] = work
        work.total_tokens = work.num_pending
        if work.is_catching_up:
            work.report(self._clock.now())

    def end_turn(self, session: Session) -> None:
        """Moves the session's work, which goes on, after all others."""
        self.active[session] = self.active.pop(session)

    def release(self, session: Session) -> None:
        """Marks the session's work as answered: its next waiting job may start."""
        del self.active[session]
        session.running = None
        self._touch(session)
        if session.waiting:
            self._released.append(session)

    def next_released(self) -> Job | None:
        """Takes the next job that waited for its session and may start now."""
        while self._released:
            session = self._released[0]
            if session.waiting and session.running is None:
                return session.waiting.popleft()
            self._released.popleft()
        return None

    def end_generation(self, session: Session) -> None:
        """Ends the session's `Generate`, if one is running; its committed tokens stay."""
        job = session.running
        if job is not None and isinstance(job.request, GenerateRequest):
            chain = session.chain
            job.reply(GeneratedTokens(job.round_id, (), (), chain.position, chain.hash, is_last=True))
            self.release(session)

    def end_opening(self, session: Session, message: str) -> None:
        """Ends the session's opening, if one is running. Its KV so far stays: opened again, it goes on there."""
        job = session.running
        if job is not None and isinstance(job.request, OpenRequest):
            job.reply(session.error(job.round_id, RoundErrorCode.CANCELLED, message))
            self.release(session)

    def refuse(self, work: Work, message: str, retry_after_ms: int) -> None:
        """Refuses `work`, which was active: the session is as it was before its round."""
        session = work.session
        if work.num_generated == 0 and not isinstance(work.request, OpenRequest):
            self.truncate_kv(session, max(0, work.base_position - 1))  # the rest is taken back
        work.undo()
        code = RoundErrorCode.REFUSED
        work.job.reply(session.error(work.request.round_id, code, message, retry_after_ms=retry_after_ms))
        self.release(session)

    @contextmanager
    def isolate(self, job: Job) -> Iterator[None]:
        """Runs what concerns one job: an exception ends the job's session, and neither another nor the step."""
        try:
            yield
        except GrammarLimitError as error:
            facts = {"session": session_tag(job.session_id), "reason": str(error)}
            self._limiter.info("grammar limit", "a session ends: its grammar is at a limit", facts)
            self.fail(job, RoundErrorCode.INVALID, str(error), FIELD)
        except Exception as error:
            kind, facts = type(job.request).__name__, {"session": session_tag(job.session_id)}
            key = f"{kind} {type(error).__name__}"
            self._limiter.error(key, f"a {kind} failed, and its session ends", facts, error)
            self.fail(job)

    def fail(
        self,
        job: Job,
        code: RoundErrorCode = RoundErrorCode.INTERNAL,
        message: str = INTERNAL_MESSAGE,
        field: str = "",
    ) -> None:
        """Answers `job` with an error and ends its session, whose KV may hold anything. Jobs that wait for the session
        are released: each gets an answer of its own."""
        session = self._sessions.get((job.tenant, job.session_id))
        running = None if session is None else session.running
        for each in (job,) if running in (None, job) else (job, running):
            each.reply(RoundError(each.round_id, code, message, field))
        if session is not None:
            self.free(session, is_wrong=True)
            self.forget(session)
            if session.waiting:
                self._released.append(session)

    def check_integrity(self) -> None:
        """Raises AssertionError where counts, sessions and active work disagree. For tests."""
        assert len(self._sessions) <= self.max_sessions
        assert self._num_of == Counter(tenant for tenant, _ in self._sessions)
        assert {session for session in self if session.running is not None} == set(self.active)
        for session in self:
            session.check_integrity()
