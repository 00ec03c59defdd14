"""One verifier: the product's engine, stepped as its driver does, and streams as its service has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.backlog import AdmissionTicket, Refusal
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.driver import IDLE_TURN_S
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job, num_tokens_of_round
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from outrider.experiments.simulator.parts.drafts import TracedDraft, TracedText
from outrider.experiments.simulator.parts.target import SimulatedTarget
from outrider.experiments.simulator.parts.times import DraftTimes, VerifierTimes
from outrider.experiments.simulator.world.standins import VirtualClock, VirtualPool
from outrider.experiments.simulator.world.world import Waiting, World

NUM_DRAFT_THREADS = 2  # of a co-located draft: the cores of the machine whose times are the default
Deliver = Callable[[SessionResponse, type[SessionRequest] | None], None]


@dataclass(frozen=True, slots=True)
class VerifierTally:
    """Holds what one verifier did from the beginning on."""

    name: str
    busy_s: float  # in steps
    num_steps: int
    num_sessions: int  # of all steps
    num_tokens: int  # fed
    num_rounds: int
    num_refused: dict[str, int]  # by reason
    most_kv_tokens: int
    num_evicted: int  # times a session gave up its KV for others


class SimulatedVerifier:
    """Runs the product's engine in virtual time; `busy_s` is how long steps took so far."""

    def __init__(
        self,
        world: World,
        name: str,
        config: ServeConfig,
        times: VerifierTimes,
        draft_times: DraftTimes,
        texts: Sequence[TracedText],
        kv_tokens: int = 0,
    ) -> None:
        """Gives the co-located draft the same `texts` as the edges'. `kv_tokens` of 0 is no limit."""
        self.name = name
        self.receive_s, self.send_s = times.receive_ms / 1e3, times.send_ms / 1e3
        self.busy_s = 0.0
        self.target = SimulatedTarget(world, times, kv_tokens, seed=name)
        clock = VirtualClock(world)
        drafter = CoLocatedDrafter(
            TracedDraft(draft_times, texts, world.sleep),
            clock=clock,
            pool=VirtualPool(world, NUM_DRAFT_THREADS),  # type: ignore[arg-type]
        )
        self.engine = Engine(
            self.target,
            make_model_info(self.target, config, drafter),
            drafter=drafter,
            max_step_tokens=config.max_step_tokens,
            prefill_chunk_tokens=config.prefill_chunk(config.device),
            queue_limits=config.queue_limits,
            tenant_max_sessions=config.tenant_max_sessions,
            tenant_max_sampling_ids=config.tenant_max_sampling_ids,
            min_forward_s=config.min_forward_ms / 1e3,
            clock=clock,
            make_rows=self.target.make_rows,
        )
        self._world = world
        self._waiting = Waiting(world)
        self.engine.on_job = self._waiting.wake
        self.engine.is_running = True
        world.start(self._run)

    def _run(self) -> None:
        """Steps as `EngineDriver` does: one after the other while there is work, else with the next job."""
        engine, world = self.engine, self._world
        while True:
            if wait_s := engine.seconds_to_gather:
                self._waiting.wait(wait_s)
                continue
            start_s = world.now_s
            did_work = engine.step()
            engine.observe()
            self.busy_s += world.now_s - start_s
            if not (did_work and engine.num_jobs):
                idle_s = IDLE_TURN_S if engine.num_jobs else max(IDLE_TURN_S, engine.seconds_to_sweep)
                self._waiting.wait(idle_s)

    @property
    def tally(self) -> VerifierTally:
        """Returns what the verifier did so far."""
        observer = self.engine.observer
        assert not observer.errors["internal"], f"{self.name} failed: its log says where"
        refused = Counter(self.engine.backlog.num_refused)
        refused.update(observer.refusals)
        return VerifierTally(
            name=self.name,
            busy_s=self.busy_s,
            num_steps=self.target.num_forwards,
            num_sessions=observer.batch_size.total,
            num_tokens=self.target.num_query_rows,
            num_rounds=observer.num_rounds["verify"],
            num_refused=dict(refused),
            most_kv_tokens=self.target.most_used_tokens,
            num_evicted=observer.evictions["kv"],
        )

    def open_stream(self, session_id: bytes, deliver: Deliver) -> _SimulatedStream:
        """Returns a session's stream, which hands its answers to `deliver`."""
        return _SimulatedStream(self._world, self.engine, session_id, deliver)


class _SimulatedStream:
    """Does what `stream.SessionStream` does, without messages: refuses rounds before they are decoded,
    cancels what a lost call was generating."""

    def __init__(self, world: World, engine: Engine, session_id: bytes, deliver: Deliver) -> None:
        self._world = world
        self._engine, self._session_id, self._deliver = engine, session_id, deliver
        self._last_round_id: int | None = None
        self._generating: int | None = None
        self._owed_tokens: dict[int, int] = {}

    def take(self, request: SessionRequest) -> None:
        kind = type(request)
        if isinstance(request, CancelRequest):
            self._submit(request, lambda reply: None)
            return
        if isinstance(request, GenerateRequest):
            self._generating = request.round_id
        ticket: AdmissionTicket | None = None
        if isinstance(request, VerifyRequest):
            num_tokens = num_tokens_of_round(len(request.committed_tokens), len(request.draft_tokens))
            if self._last_round_id is not None and request.round_id > self._last_round_id:
                num_own_tokens = next(iter(self._owed_tokens.values()), 0)
                admitted = self._engine.backlog.enter_round(
                    DEFAULT_TENANT,
                    num_tokens,
                    request.deadline_ms,
                    num_own_tokens=num_own_tokens,
                    session_id=self._session_id,
                )
                if isinstance(admitted, Refusal):
                    message, retry_ms = admitted.message, admitted.retry_after_ms
                    code = RoundErrorCode.REFUSED
                    self._push(RoundError(request.round_id, code, message, retry_after_ms=retry_ms), kind)
                    return
                ticket = admitted
            self._owed_tokens[request.round_id] = num_tokens
        if not isinstance(request, CloseRequest):
            self._last_round_id = max(self._last_round_id or 0, request.round_id)
        self._submit(request, lambda reply: self._push(reply, kind), ticket)

    def _submit(
        self,
        request: SessionRequest,
        reply: Callable[[SessionResponse], object],
        ticket: AdmissionTicket | None = None,
    ) -> None:
        arrival_ns = int(self._world.now_s * 1e9)
        self._engine.submit(Job(self._session_id, request, reply, arrival_ns, ticket=ticket))

    def _push(self, response: SessionResponse, kind: type[SessionRequest]) -> None:
        if isinstance(response, RoundError):
            self._engine.observer.on_error(response.code, self._session_id, response.round_id, response.field)
        if isinstance(response, GeneratedTokens) and response.is_last:
            self._generating = None
        if isinstance(response, Verdict | RoundError):
            self._owed_tokens.pop(response.round_id, None)
        self._deliver(response, kind)

    def detach(self) -> None:
        self._engine.backlog.leave_line(DEFAULT_TENANT, self._session_id)
        if self._generating is not None:
            self._submit(CancelRequest(self._generating), lambda reply: None)
