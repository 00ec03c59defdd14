"""The engine: it owns every session, every KV block and every forward.

A step is: take what arrived, plan, one packed forward, answer. Rounds that arrive during a step form the
next one. Around it others only `submit` jobs and receive replies through the job's own callback.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, Logits, TargetBackend
from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.admission import admit, truncate_kv
from outrider.cloud_verifier.engine.backlog import Backlog, Refusal
from outrider.cloud_verifier.engine.colocated import CoLocatedDrafter
from outrider.cloud_verifier.engine.finish import finish, split_rows
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.engine.scheduler import Scheduler, Share
from outrider.cloud_verifier.engine.session import Session, SessionStore
from outrider.cloud_verifier.engine.work import Job, Work, num_tokens_of
from outrider.cloud_verifier.verification.rows import ProcessedRows
from outrider.common.types import (
    GenerateRequest,
    ModelInfo,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    VerifyRequest,
)

log = logging.getLogger(__name__)

KV_RETRY_MS = 50
SWEEP_S, LOT_S, MAX_SWEPT = 1.0, 0.01, 8  # between looks for expired sessions, and how many go at once
INTERNAL_MESSAGE = "the verifier failed here (its log says where); open the session again"


class Engine:
    """`step()` runs one turn, one at a time; a server has `EngineDriver` call it, tests do it themselves."""

    def __init__(
        self,
        backend: TargetBackend,
        model: ModelInfo,
        *,
        drafter: CoLocatedDrafter | None = None,
        max_step_tokens: int = 512,
        prefill_chunk_tokens: int = 32,
        queue_limits: QueueLimits | None = None,
        tenant_max_sessions: int = 0,
        min_forward_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` counts like `Job.arrival_ns`; `tenant_max_sessions` of 0 is no limit of its own."""
        self.backend = backend
        self.model = model
        self.drafter = drafter
        self.sessions = SessionStore(
            model.limits.max_sessions, model.limits.session_idle_ttl_ms / 1000.0, clock, tenant_max_sessions
        )
        self.backlog = Backlog(queue_limits or QueueLimits(), max_step_tokens, prefill_chunk_tokens)
        self.observer = EngineObserver()
        self.is_draining = False
        self.num_steps = 0
        self._scheduler = Scheduler(max_step_tokens, prefill_chunk_tokens)
        self._min_forward_s = min_forward_s
        self._clock = clock
        self._active: dict[Work, None] = {}  # in order of their turn
        self._inbox: deque[Job] = deque()
        self._next_sweep_s = clock() + SWEEP_S
        self.is_running = False  # somebody calls `step` whenever there is work
        self.on_job: Callable[[], None] | None = None  # called after each `submit`

    # --------------------------------------------------------------------- at any time, during a step too

    def submit(self, job: Job) -> None:
        self._inbox.append(job)
        if self.on_job is not None:
            self.on_job()

    def enter_round(
        self,
        tenant: str,
        request: VerifyRequest | GenerateRequest,
        *,
        is_taken: bool = False,
        num_own_tokens: int = 0,
    ) -> Refusal | None:
        """Counts a round into the backlog, or says why it is refused; costs the engine nothing.

        `num_own_tokens`: of the session's round before it, while that is under way.
        """
        deadline_ms = request.deadline_ms if isinstance(request, VerifyRequest) else 0
        return self.backlog.enter_round(
            tenant, num_tokens_of(request), deadline_ms, is_taken=is_taken, num_own_tokens=num_own_tokens
        )

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()

    @property
    def num_jobs(self) -> int:
        """Requests not answered yet, but for those that wait for another one of their session."""
        return len(self._inbox) + len(self._active)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def num_arrived(self) -> int:
        return len(self._inbox)

    @property
    def seconds_to_sweep(self) -> float:
        """Until idle sessions are looked for again, work or none."""
        return self._next_sweep_s - self._clock()

    # ------------------------------------------------------------------------------------------- a step

    def expected_step_s(self) -> float:
        """What the next step will take, by those before it; infinite while nothing is known."""
        num_tokens = sum(work.num_pending for work in self._active)
        num_tokens += sum(num_tokens_of(job.request) for job in self._inbox)
        return self.backlog.step_s(num_tokens) if num_tokens else 0.0

    def step(self) -> bool:
        """One turn; returns whether there was work (a forward, or making room for one)."""
        self._take_inbox()
        self._drop_expired()
        self._sweep()
        start_s = self._clock()
        active = list(self._active)
        if self.drafter is not None:
            self.drafter.draft_for(active)
        if not active:
            self.backlog.hold({}, {})
            return False
        plan = self._scheduler.plan(active, start_s)
        self.backlog.hold(plan.round_tokens, plan.prefill_tokens)
        shares = plan.shares
        if not shares:
            return False
        works = [active[share.index] for share in shares]
        try:
            logits, forward_ns = self._forward(works, shares)
            forward_end_ns = time.perf_counter_ns()
            ending = [work for work, share in zip(works, shares, strict=True) if share.is_final]
            rows = split_rows(ending, logits, self.model)
        except KVExhausted as error:
            self._make_kv_room(works, error)
            return True
        except Exception:
            log.exception("a step of %d sessions failed", len(works))
            self.observer.on_failed_step()
            for work in works:
                self._fail(work, RoundErrorCode.INTERNAL, INTERNAL_MESSAGE)
            return True
        finally:
            self.backlog.hold(plan.left_round_tokens, plan.left_prefill_tokens)
        self.num_steps += 1
        self._deliver(works, shares, rows, forward_ns)
        num_tokens = sum(share.num_tokens for share in shares)
        self.backlog.observe(num_tokens, self._clock() - start_s)
        self.observer.on_step(len(works), num_tokens, forward_ns, time.perf_counter_ns() - forward_end_ns)
        return True

    def _take_inbox(self) -> None:
        self.backlog.take_arrived()
        while self._inbox:
            job = self._inbox.popleft()
            try:
                admit(self, job)
            except Exception:
                log.exception("a %s could not be admitted", type(job.request).__name__)
                round_id = getattr(job.request, "round_id", 0)
                job.reply(RoundError(round_id, RoundErrorCode.INTERNAL, INTERNAL_MESSAGE))

    def _drop_expired(self) -> None:
        now_ns = int(self._clock() * 1e9)
        while expired := [work for work in self._active if work.is_expired(now_ns)]:
            for work in expired:  # each may let the next of its session in
                self.observer.on_refused("expired")
                message = "its deadline passed before its turn came"
                self._fail(work, RoundErrorCode.REFUSED, message, self.backlog.retry_ms())

    def _forward(self, works: list[Work], shares: list[Share]) -> tuple[Logits, int]:
        start_ns = time.perf_counter_ns()
        items = []
        for work, share in zip(works, shares, strict=True):
            work.start_ns = work.start_ns or start_ns
            rows = work.num_logit_rows if share.is_final else 0
            assert work.session.kv is not None, "active work has KV"
            items.append(ForwardItem(work.session.kv, work.pending_tokens(share.num_tokens), rows))
        logits = self.backend.forward(items)
        if self._min_forward_s:
            time.sleep(max(0.0, self._min_forward_s - (time.perf_counter_ns() - start_ns) / 1e9))
        return logits, time.perf_counter_ns() - start_ns

    def _deliver(
        self, works: list[Work], shares: list[Share], rows: Sequence[ProcessedRows], forward_ns: int
    ) -> None:
        rest = iter(rows)
        for work, share in zip(works, shares, strict=True):
            work.forward_ns += forward_ns
            if not share.is_final:
                done = work.total_tokens - work.num_pending
                work.job.reply(Progress(work.request.round_id, done, work.total_tokens))
                self._end_turn(work)
                continue
            try:
                is_done = finish(
                    work, next(rest), self.backend, self.model, self.observer, len(works), self.backlog
                )
            except Exception:
                log.exception("a round could not be finished")
                self._fail(work, RoundErrorCode.INTERNAL, INTERNAL_MESSAGE)
                continue
            if isinstance(work.request, OpenRequest):
                self.publish(work.session)  # now, not at its end: others open with the same prompt meanwhile
            if is_done or (isinstance(work.request, GenerateRequest) and work.session.waiting):
                self.release(work)
            else:
                self._end_turn(work)

    def _end_turn(self, work: Work) -> None:
        del self._active[work]
        self._active[work] = None

    # ------------------------------------------------------------------------- sessions and their KV

    def activate(self, work: Work) -> None:
        """`work` becomes its session's one job."""
        session = work.session
        if session.kv_length == 0:  # before it is planned: what the prefix cache holds need not be fed
            self.free(session)
            session.kv = self.backend.new_sequence(session.tenant, session.chain.token_ids)
            self.observer.on_prefix(session.kv.num_reused, session.chain.position - session.kv.num_reused)
        session.work = work
        work.total_tokens = work.num_pending
        self._active[work] = None
        if work.is_catching_up:
            work.job.reply(Progress(work.request.round_id, 0, work.total_tokens))

    def release(self, work: Work) -> None:
        """`work` is answered: the session's next waiting job may start."""
        session = work.session
        del self._active[work]
        session.work = None
        self.sessions.touch(session)
        while session.waiting and session.work is None:
            admit(self, session.waiting.popleft())

    def publish(self, session: Session) -> None:
        """Lets later sessions of the tenant begin with this one's KV, as far as it is of the text."""
        if session.kv is not None:
            self.backend.publish(session.kv, session.chain.token_ids)

    def free(self, session: Session, *, is_published: bool = True) -> None:
        """Gives the session's KV back; its ids stay. The prefix cache remembers it for as long as it can."""
        if session.kv is not None:
            if is_published:
                self.publish(session)
            self.backend.close(session.kv)
            session.kv = None

    def forget(self, session: Session) -> None:
        """Ends a session: its running work, if any, its KV, its place in the store."""
        if session.work is not None:
            del self._active[session.work]
            session.work = None
        self.free(session)
        self.sessions.remove(session)

    def _fail(self, work: Work, code: RoundErrorCode, message: str, retry_after_ms: int = 0) -> None:
        if code is RoundErrorCode.INTERNAL:
            self.free(work.session, is_published=False)  # nobody knows what it holds
        elif not isinstance(work.request, OpenRequest) and work.num_generated == 0:
            truncate_kv(self, work.session, max(0, work.base_position - 1))  # the rest is taken back
        work.undo()
        reply = work.session.error(work.request.round_id, code, message, retry_after_ms=retry_after_ms)
        work.job.reply(reply)
        if code is RoundErrorCode.INTERNAL:
            self.forget(work.session)
        else:
            self.release(work)

    def _make_kv_room(self, works: list[Work], error: KVExhausted) -> None:
        """Evicts the least recently used idle session; with none left, refuses the newest work."""
        candidates = self.sessions.eviction_candidates()
        if candidates:
            self.observer.on_evicted("kv", candidates[0].opening.session_id)
            self.free(candidates[0])
            return
        newest = works[-1]
        self.observer.on_refused("kv")
        self.free(newest.session)
        if len(self._active) == 1:
            self._fail(newest, RoundErrorCode.REFUSED, f"the KV pool is too small: {error}", 1000)
        else:
            self._fail(newest, RoundErrorCode.REFUSED, f"no KV blocks are free: {error}", KV_RETRY_MS)

    def _sweep(self) -> None:
        if self._clock() < self._next_sweep_s:
            return
        expired = self.sessions.take_expired(MAX_SWEPT)
        # Many that fell silent together go in small lots, between the steps of the others.
        self._next_sweep_s = self._clock() + (SWEEP_S if len(expired) < MAX_SWEPT else LOT_S)
        for session in expired:
            self.observer.on_expired(session.opening.session_id, self.sessions.idle_ttl_s)
            self.free(session)

    def check_integrity(self) -> None:
        """Tests only: every manager agrees with itself."""
        self.sessions.check_integrity()
        self.backend.check_integrity()
        if self.drafter is not None:
            self.drafter.check_integrity()
        assert len({id(work.session) for work in self._active}) == len(self._active)
