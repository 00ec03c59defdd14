"""The engine: a step admits what arrived, schedules, runs one packed forward and finishes what ended with it.

It owns every session, every KV block and every forward. Requests that arrive during a step form the next one.
Others only `submit` jobs and receive replies through the job's own callback.

A step launches a batch and collects it. Where a GPU computes the batch it stays in flight: the next step launches
another one, of other sessions, and then collects it, so that the device goes on while the host verifies and answers.
What a session in flight is asked waits until its batch is collected: for one session steps follow one another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.cloud_verifier.backends.base import KVExhausted, TargetBackend
from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.admission import Admission
from outrider.cloud_verifier.engine.backlog import MIN_RETRY_MS, Backlog
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.finish import Awaited, MakeRows, RoundFinisher, awaited, make_rows
from outrider.cloud_verifier.engine.gathering import HIDDEN, ActiveSessions, Gathering, SessionCounts
from outrider.cloud_verifier.engine.idle_time import IdleClock
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.line import SessionKey
from outrider.cloud_verifier.engine.observe import EngineObserver, memory_use
from outrider.cloud_verifier.engine.scheduler import ADMISSION_S, FairQueue, Plan, Scheduler
from outrider.cloud_verifier.engine.session_manager import SessionManager
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.cloud_verifier.verification.rows import ProcessedRows
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.process.logs import LogLimiter
from outrider.common.types import GenerateRequest, MemoryUse, ModelInfo, VerifyRequest

log = logging.getLogger(__name__)

POLL_S = 0.0002  # between looks whether a batch in flight is computed
LAUNCH_SHARE = 0.2  # of the newest launch in the mean time of one
# Between two looks at memory for clients: an edge that streams asks every second.
MEMORY_REPORT_INTERVAL_S = 1.0
KV_RETRY_MS, SMALL_POOL_RETRY_MS = 50, 1000


@dataclass(slots=True)
class _Batch:
    """Holds the work of one forward. `plan.shares[i]` is the share of `works[i]`."""

    plan: Plan
    works: list[Work]
    start_s: float
    rows: Sequence[ProcessedRows | Exception] = ()  # of the works that end with it, in their order
    awaited: Sequence[Awaited] = ()  # what of it another device computes; nothing: all is computed
    num_attended: int = 0  # tokens that its tokens attend to, summed over them
    forward_start_ns: int = 0
    forward_ns: int = 0
    forward_end_ns: int = 0
    end_ns: int = 0
    is_followed: bool = False  # work waited when it ended, and no other device computes it

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.plan.shares)

    def remove(self, work: Work) -> None:
        """Takes a work out that is not computed."""
        index = self.works.index(work)
        del self.works[index], self.plan.shares[index]


class Engine:
    """Computes jobs, a batch a `step()`. A server has `EngineDriver` call it, tests call it themselves."""

    def __init__(
        self,
        backend: TargetBackend,
        model: ModelInfo,
        *,
        drafter: CoLocatedDrafter | None = None,
        grammars: GrammarStore | None = None,
        max_step_tokens: int = 512,
        prefill_chunk_tokens: int = 32,
        queue_limits: QueueLimits | None = None,
        tenant_max_sessions: int = 0,
        tenant_max_sampling_ids: int = 0,
        min_forward_s: float = 0.0,
        hides_batch_size: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        make_rows: MakeRows = make_rows,
    ) -> None:
        """The engine closes `drafter` and `grammars`; without the latter no session has a grammar.
        `tenant_max_sessions` of 0 is no limit of its own, `tenant_max_sampling_ids` of 0 none at all. `clock` is what
        `Job.arrival_ns` counts by. `make_rows` reads the logits of a `backend` without staging."""
        self.backend = backend
        self.model = model
        self.drafter = drafter
        self.clock = clock
        self.observer = EngineObserver(clock=clock)
        self.backlog = Backlog(
            queue_limits or QueueLimits(),
            max_step_tokens,
            prefill_chunk_tokens,
            clock,
            # A refused session comes again before it has been idle for too long.
            max_retry_ms=max(MIN_RETRY_MS, model.limits.session_idle_ttl_ms // 2),
        )
        self._inbox = FairQueue()
        self._gathering, self._active = Gathering(), ActiveSessions()
        self.sessions = SessionManager(
            backend,
            self.observer,
            model.limits,
            tenant_max_sessions,
            clock,
            self._inbox.has_job_of,
            tenant_max_sampling_ids=tenant_max_sampling_ids,
            on_forgotten=self._forget,
        )
        self.grammars = grammars
        self.admission = Admission(
            self.sessions, self.backlog, model, self.observer, grammars, self._submit_later
        )
        self.num_steps = 0
        self._scheduler = Scheduler(max_step_tokens, prefill_chunk_tokens)
        self._finisher = RoundFinisher(self.sessions, model, self.backlog, self.observer, clock, make_rows)
        self._min_forward_s = min_forward_s
        self._hides_batch_size = hides_batch_size
        self._reported_memory: MemoryUse | None = None
        self._memory_reported_until_s = 0.0
        self._unobserved: _Batch | None = None  # the last step's
        self._last: _Batch | None = None  # the last step's, until the next one begins
        self._in_flight: _Batch | None = None
        self._deferred: dict[SessionKey, list[Job]] = {}  # of the sessions in flight, what arrived meanwhile
        self._planned: _Batch | None = None  # the last one
        self._forward_end_ns = 0  # of the last forward that was collected
        self._launch_s = 0.0  # lately, to launch a batch that stays in flight
        self._limiter = LogLimiter(log, clock=clock.now)
        self.is_running = False  # somebody calls `step` whenever there is work
        self.on_job: Callable[[], None] | None = None  # called after each `submit`
        # Calls a function where jobs are submitted: on an event loop, where one drives the engine. Any thread.
        self.call_there: Callable[[Callable[[], object]], object] = lambda function: function()

    # --------------------------------------------------------------------- at any time, during a step too

    def submit(self, job: Job) -> None:
        """Hands `job` to the next step."""
        self._inbox.put(job)
        self._gathering.arrived((job.tenant, job.session_id))
        if self.on_job is not None:
            self.on_job()

    def _submit_later(self, job: Job) -> None:
        self.call_there(lambda: self.submit(job))

    def close(self) -> None:
        """Ends the co-located draft and the compiling of grammars, if any."""
        if self.grammars is not None:
            self.grammars.close()
        if self.drafter is not None:
            self.drafter.close()

    @property
    def is_draining(self) -> bool:
        """Returns whether new sessions are refused."""
        return self.admission.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        """Sets whether new sessions are refused."""
        self.admission.is_draining = value

    @property
    def reported_memory(self) -> MemoryUse:
        """Returns the use of memory that is reported to clients: without peaks where batch sizes are hidden, since they
        depend on other tenants too."""
        if self._reported_memory is None or self.clock.now() >= self._memory_reported_until_s:
            use = memory_use(self.backend)
            self._reported_memory = replace(use, peak=0, peak_reserved=0) if self._hides_batch_size else use
            self._memory_reported_until_s = self.clock.now() + MEMORY_REPORT_INTERVAL_S
        return self._reported_memory

    @property
    def num_jobs(self) -> int:
        """Returns the unanswered requests, without those that wait for another one of their session."""
        return len(self._inbox) + len(self.sessions.active)

    @property
    def num_sessions(self) -> int:
        """Returns how many sessions are open."""
        return len(self.sessions)

    @property
    def num_arrived(self) -> int:
        """Returns the requests that no step has taken yet."""
        return len(self._inbox)

    @property
    def expected_step_s(self) -> float:
        """Returns what the next step will take, by those before it; infinite while none was measured."""
        num_tokens = sum(work.num_pending for work in self.sessions.active.values())
        num_tokens += self._inbox.num_tokens
        return self.backlog.step_s(num_tokens) if num_tokens else 0.0

    @property
    def seconds_to_gather(self) -> float:
        """Returns how long the next step waits for sessions that are expected back soon; 0: it begins now.

        Only rounds wait: a generation or a prompt would pay for what it gains nothing from.
        """
        if not self.num_jobs or self._in_flight or _has_generation(self.sessions.active.values()):
            return 0.0
        return self._gathering.wait_s(self.clock.now())

    @property
    def seconds_to_sweep(self) -> float:
        """Returns how long it is until idle sessions are looked for again, with work or without."""
        return self.sessions.seconds_to_sweep

    @property
    def idle_clock(self) -> IdleClock:
        """Returns what counts how long sessions and streams are idle."""
        return self.sessions.idle_clock

    # ------------------------------------------------------------------------------------------- a step

    def step(self) -> bool:
        """Runs one step; returns whether there was work (a forward, or making room for one).

        A batch that a GPU computes is collected by the next step, after that has launched its own.
        """
        if self._in_flight is not None:
            self._await_arrivals(self._in_flight)
        begin_s = self.clock.now()
        batch = self._launch()
        if batch is not None and batch.awaited:
            self._launch_s += LAUNCH_SHARE * (self.clock.now() - begin_s - self._launch_s)
        did_land = self._land()
        if batch is None:
            return did_land or len(self._inbox) > 0
        if batch.awaited and not _has_generation(batch.works):  # which is ready for its next step at once
            self._in_flight = batch
            self._deferred = {(work.job.tenant, work.job.session_id): [] for work in batch.works}
        else:
            self._collect(batch)
        return True

    def _launch(self) -> _Batch | None:
        """Admits what arrived and starts the next forward; returns its batch, None where there is nothing to do."""
        self.observe()
        self._observe_cycle()
        self._gathering.began()
        self._admit_arrived()
        self._refuse_expired()
        self.sessions.note_used(self.backlog.take_refused())
        self.sessions.sweep()
        batch = self._schedule()
        self._report_waiting(batch)
        if batch is not None:
            try:
                self._forward_where_kv_allows(batch)
            except Exception as error:
                self._fail(batch, error)
        return batch

    def _collect(self, batch: _Batch) -> None:
        """Waits for a batch and answers its works."""
        try:
            for each in batch.awaited:
                each.wait()
        except Exception as error:
            self._fail(batch, error)
        self._hold_left(batch)
        if batch.works:
            self._note_forward(batch)
            self._finish(batch)
        self._admit_released()

    def _note_forward(self, batch: _Batch) -> None:
        """Notes what the forward took; a device computes one batch after another."""
        start_ns = max(batch.forward_start_ns, self._forward_end_ns)
        if batch.awaited:
            batch.forward_end_ns = self._now_ns()
            batch.start_s = max(batch.start_s, self._forward_end_ns / 1e9)
        if self._min_forward_s:
            self.clock.sleep(self._min_forward_s - (self._now_ns() - start_ns) / 1e9)
            batch.forward_end_ns = self._now_ns()
        batch.forward_ns = batch.forward_end_ns - start_ns
        self._forward_end_ns = batch.forward_end_ns

    def _land(self) -> bool:
        """Collects the batch in flight, and admits what its sessions were asked meanwhile; returns whether there was
        one."""
        batch, self._in_flight = self._in_flight, None
        if batch is None:
            return False
        # What waited for these sessions before their batch was launched came first, and is admitted as they are done.
        deferred, self._deferred = self._deferred, {}
        self._collect(batch)
        for job in (job for jobs in deferred.values() for job in jobs):
            self._admit(job)
            self._admit_released()
        return True

    def _await_arrivals(self, batch: _Batch) -> None:
        """Waits until the device is about to be done with the batch in flight: until then the next one gains nothing
        from being launched, and what arrives joins it."""
        start_s = max(batch.forward_start_ns, self._forward_end_ns) / 1e9
        forward_s = self._scheduler.forward_s(batch.num_tokens, batch.num_attended)
        until_s = start_s + forward_s - self._launch_s
        while (left_s := until_s - self.clock.now()) > 0 and not all(
            each.is_computed for each in batch.awaited
        ):
            self.clock.sleep(min(left_s, POLL_S))

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """Ends the sessions of a batch whose forward raised `error`."""
        message = f"a step of {len(batch.works)} sessions failed"
        self._limiter.error(type(error).__name__, message, {}, error)
        self.observer.on_failed_step()
        for work in batch.works:
            self.sessions.fail(work.job)
        batch.works, batch.awaited = [], ()

    def observe(self) -> None:
        """Takes the times of the last step into account. The next step does so at the latest; whoever sends the
        answers of this one calls it after them, as they would wait for it."""
        batch, self._unobserved = self._unobserved, None
        if batch is None:
            return
        num_tokens = batch.num_tokens
        self._scheduler.observe(num_tokens, batch.num_attended, batch.forward_ns / 1e9)
        self.backlog.observe(num_tokens, batch.end_ns / 1e9 - batch.start_s)
        verify_ns = batch.end_ns - batch.forward_end_ns
        self.observer.on_step(len(batch.works), num_tokens, batch.forward_ns, verify_ns)

    def _observe_cycle(self) -> None:
        """Takes into account how long the last step kept others waiting: until its end, or, of several sessions and
        where work waited for that, until now, when the next one begins, as its answers were written meanwhile and
        requests were read. Of a session alone that time is the gap of its stream."""
        batch, self._last = self._last, None
        if batch is None:
            return
        end_s = batch.end_ns / 1e9
        if batch.is_followed and not self._gathering.has_waited:
            if len(batch.works) > 1:
                end_s = self.clock.now()
            elif _has_generation(batch.works):
                self.backlog.observe_stream_gap(self.clock.now() - end_s)
        cycle_s, forward_s = end_s - batch.start_s, batch.forward_ns / 1e9
        self.backlog.observe_cycle(len(batch.works), batch.num_tokens, cycle_s, forward_s)

    def _admit_arrived(self) -> None:
        """Admits jobs, tenants in turn, for as long as the rounds that are under way may wait for it."""
        self.backlog.take_arrived()
        start_s = end_s = self.clock.now()
        while end_s - start_s < ADMISSION_S and (job := self._inbox.take()) is not None:
            begin_s = end_s
            self._admit(job)
            self._admit_released()
            end_s = self.clock.now()
            self._inbox.charge(job.tenant, end_s - begin_s)

    def _admit_released(self) -> None:
        """Admits the jobs that waited for a session which is free now, or has ended."""
        while (job := self.sessions.next_released()) is not None:
            self._admit(job)

    def _admit(self, job: Job) -> None:
        if self._deferred and (waiting := self._deferred.get((job.tenant, job.session_id))) is not None:
            waiting.append(job)
            return
        with self.sessions.isolate(job):
            if job.on_taken is not None:
                job.on_taken()
            admitted = self.admission.admit(job)
            if isinstance(admitted, Work):
                admitted.session.pause.end(job.arrival_ns / 1e9)
                self.sessions.activate(admitted)
            elif admitted is not None:
                job.reply(admitted)

    def _refuse_expired(self) -> None:
        now_ns = self._now_ns()
        active = self.sessions.active
        while expired := [work for work in active.values() if work.is_expired(now_ns)]:
            for work in expired:  # each may let the next of its session in, which may have expired too
                self.observer.on_refused("expired")
                message = "its deadline passed before its turn came"
                with self.sessions.isolate(work.job):
                    self.sessions.refuse(work, message, self.backlog.retry_ms())
                self._admit_released()

    def _schedule(self) -> _Batch | None:
        """Returns what the next forward feeds; None where there is nothing."""
        start_s = self.clock.now()
        if self.drafter is not None:
            works, max_context = list(self.sessions.active.values()), self.model.limits.max_context
            budget_s = self._scheduler.host_budget_s
            self.drafter.draft_for(works, max_context, self.sessions.isolate, budget_s)
            self._admit_released()
        active = list(self.sessions.active.values())
        if self._in_flight is not None:
            active = [work for work in active if work not in self._in_flight.works]
        if not active:
            self.backlog.hold({}, {})
            return None
        plan = self._scheduler.plan(active, start_s)
        self.backlog.hold(plan.round_tokens, plan.prefill_tokens)
        works = [active[share.index] for share in plan.shares]
        self._planned = _Batch(plan, works, start_s) if works else None
        return self._planned

    def _report_waiting(self, batch: _Batch | None) -> None:
        """Tells the edges of openings and recomputations that this step does not feed that they wait."""
        now_s = self.clock.now()
        self.admission.report_compiling(now_s)
        if batch is None or not batch.plan.prefill_tokens:
            return
        fed = {*batch.works, *(self._in_flight.works if self._in_flight is not None else ())}
        for work in [each for each in self.sessions.active.values() if each not in fed and each.is_prefill]:
            if work.job.is_report_due(now_s):
                with self.sessions.isolate(work.job):
                    work.report(now_s)

    def _forward_where_kv_allows(self, batch: _Batch) -> None:
        """Starts the forward, without the works that have to give way: the others go on in the same step."""
        while batch.works:
            try:
                self._forward(batch)
                return
            except KVExhausted as error:
                if self._land():  # its sessions may be idle now
                    continue
                if (refused := self._make_kv_room(error)) in batch.works:
                    batch.remove(refused)

    def _forward(self, batch: _Batch) -> None:
        """Starts the packed forward, and what is computed of its rows where they are."""
        start_ns = self._now_ns()
        items, ending, batch.num_attended = [], [], 0
        for work, share in list(zip(batch.works, batch.plan.shares, strict=True)):
            work.start_ns = work.start_ns or start_ns
            try:
                items.append(work.forward_item(share.num_tokens, is_final=share.is_final))
            except Exception as error:
                self._leave_out(batch, work, error)
                continue
            if share.is_final:
                ending.append(work)
            batch.num_attended += share.num_tokens * (work.num_positions + share.num_tokens // 2)
        if not items:
            return
        prepared = self._finisher.prepare_rows(ending, self.backend.staging)
        batch.forward_start_ns = start_ns
        logits = self.backend.forward(items)
        if self.drafter is not None:
            self.drafter.note_features(batch.works, [share.num_tokens for share in batch.plan.shares])
        batch.forward_end_ns = self._now_ns()
        batch.rows = self._finisher.process_rows(prepared, logits)
        batch.awaited = awaited(logits, batch.rows)

    def _leave_out(self, batch: _Batch, work: Work, error: Exception) -> None:
        """Ends the session of a work that cannot be fed: the others of its batch go on."""
        with self.sessions.isolate(work.job):
            raise error
        batch.remove(work)

    def _hold_left(self, batch: _Batch) -> None:
        """Takes what a batch computed off the backlog, unless a later one's plan has."""
        if batch is self._planned:
            self.backlog.hold(batch.plan.left_round_tokens, batch.plan.left_prefill_tokens)

    def _finish(self, batch: _Batch) -> None:
        """Answers the works that ended, and reports progress of the others."""
        self.num_steps += 1
        rest, counts = iter(batch.rows), self._count_sessions(batch)
        for work, share in zip(batch.works, batch.plan.shares, strict=True):
            begin_s = self.clock.now()
            work.forward_ns += batch.forward_ns
            its_rows = next(rest) if share.is_final else None
            with self.sessions.isolate(work.job):
                if work.failure is not None:
                    raise work.failure
                if its_rows is None:
                    work.report(begin_s)
                if its_rows is not None and self._finisher.finish(work, its_rows, counts):
                    if isinstance(work.request, VerifyRequest) and not work.session.waiting:
                        key = work.job.tenant, work.job.session_id
                        self._gathering.left(key, work.session.pause, self.clock.now())
                    self.sessions.release(work.session)
                else:
                    self.sessions.end_turn(work.session)
            if its_rows is not None:
                self._charge(work, begin_s)
            self._admit_released()
        self._gathering.ended(batch.num_tokens, self.clock.now() - batch.start_s)
        batch.end_ns = self._now_ns()
        batch.is_followed = self.num_jobs > 0 and not batch.awaited
        self._unobserved = self._last = batch

    def _count_sessions(self, batch: _Batch) -> SessionCounts:
        """Returns what the answers of a batch report; its sessions are active from now on."""
        answered = [
            (work.job.tenant, work.job.session_id)
            for work, share in zip(batch.works, batch.plan.shares, strict=True)
            if share.is_final
        ]
        num_active = self._active.note(answered, self.clock.now())
        return HIDDEN if self._hides_batch_size else SessionCounts(len(batch.works), num_active)

    def _forget(self, key: SessionKey) -> None:
        self._gathering.arrived(key)
        self._active.forget(key)

    def _charge(self, work: Work, begin_s: float) -> None:
        """Charges the tenant for drafting, preparing rows and all since `begin_s`."""
        self._scheduler.charge(work, self.clock.now() - begin_s + work.draft_s + work.prepare_s)
        work.draft_s = work.prepare_s = 0.0

    def _make_kv_room(self, error: KVExhausted) -> Work | None:
        """Evicts an idle session, or refuses the work of an active one, which is returned."""
        newest = self.sessions.make_kv_room()
        if newest is None:
            return None
        self.observer.on_refused("kv")
        with self.sessions.isolate(newest.job):
            self.sessions.free(newest.session)
            if len(self.sessions.active) == 1:
                self.sessions.refuse(newest, f"the KV pool is too small: {error}", SMALL_POOL_RETRY_MS)
            else:
                retry_ms = max(KV_RETRY_MS, self.backlog.drain_ms())
                self.sessions.refuse(newest, f"no KV blocks are free: {error}", retry_ms)
        return newest

    def _now_ns(self) -> int:
        return int(self.clock.now() * 1e9)

    def check_integrity(self) -> None:
        """Raises AssertionError where a manager disagrees with itself. For tests."""
        self.sessions.check_integrity()
        self.backend.check_integrity()
        if self.drafter is not None:
            self.drafter.check_integrity()


def _has_generation(works: Iterable[Work]) -> bool:
    return any(isinstance(work.request, GenerateRequest) for work in works)
