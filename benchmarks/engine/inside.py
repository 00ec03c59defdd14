"""The engine without a network: what a batch saves, what a step costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engine.setup import Bench
from benchmarks.results_file import Found
from benchmarks.timing import alternate, median_ratio, time_s
from outrider.cloud_verifier.backends.base import ForwardItem, Logits, TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import EMBEDDED_TARGET, ServeConfig
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.types import (
    CloseRequest,
    Opened,
    Progress,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.session.session import new_session_id
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.shared.results import at_most, judged

NUM_READY, TOKENS_EACH = 8, 7
NUM_BUSY = 16


@dataclass
class _Asked:
    """Holds a session's one request under way, and its final answer."""

    reply: SessionResponse | None = None

    def take(self, reply: SessionResponse) -> None:
        if not isinstance(reply, Progress):
            self.reply = reply


class SteppedEngine:
    """Steps the engine by hand, made as a server would make it."""

    def __init__(self, backend: TargetBackend) -> None:
        # Whoever steps by hand has no deadline.
        self.engine = VerifierServer(backend, ServeConfig(max_queue_ms=60_000.0)).engine

    def submit(self, session_id: bytes, request: SessionRequest, tenant: str = "default") -> _Asked:
        asked = _Asked()
        self.engine.submit(Job(session_id, request, asked.take, time.perf_counter_ns(), tenant=tenant))
        return asked

    def settle(self) -> None:
        while self.engine.step():
            pass

    def ask(self, session_id: bytes, request: SessionRequest, tenant: str = "default") -> SessionResponse:
        asked = self.submit(session_id, request, tenant)
        self.settle()
        assert asked.reply is not None, "the engine went idle with a request unanswered"
        return asked.reply


@dataclass
class InsideSession:
    """Holds one session of it."""

    driver: SteppedEngine
    recorded: RecordedSession
    tenant: str = "default"

    def __post_init__(self) -> None:
        self.session_id = new_session_id()
        self.round_id = 1

    def open(self) -> Opened:
        opened = self.driver.ask(self.session_id, self.recorded.opening(self.session_id), self.tenant)
        assert isinstance(opened, Opened), opened
        return opened

    def submit(self, request: VerifyRequest) -> _Asked:
        self.round_id += 1
        return self.driver.submit(self.session_id, replace(request, round_id=self.round_id), self.tenant)

    def close(self) -> None:
        self.driver.ask(self.session_id, CloseRequest(), self.tenant)


# --------------------------------------------------------------------------------------------- batch8


def measure_batch8(bench: Bench) -> Found:
    """Compares one engine step of 8 rounds, verification included, with 8 bare forwards of one session
    each."""
    backend = load_target(EMBEDDED_TARGET, dtype="float32")
    driver = SteppedEngine(backend)
    sessions = [InsideSession(driver, recorded) for recorded in bench.recording.sessions[:NUM_READY]]
    requests = []
    for number, session in enumerate(sessions):
        opened = session.open()
        draft = tuple((97 * number + 31 * i) % backend.num_tokens for i in range(TOKENS_EACH - 1))
        requests.append(VerifyRequest(2, opened.position, opened.hash, draft_tokens=draft))
    pairs = list(zip(sessions, requests, strict=True))
    feeds = [_bare_sequence(backend, session.recorded) for session in sessions]

    def step() -> float:
        for session, request in pairs:
            session.submit(request)
        num_before = driver.engine.num_steps
        seconds = time_s(driver.settle)
        assert driver.engine.num_steps == num_before + 1, "the rounds were not one step"
        return seconds

    def separate() -> float:
        return sum(_forward_s(backend, sequence, length, ids) for sequence, length, ids in feeds)

    def packed() -> float:
        items = [ForwardItem(sequence, ids, TOKENS_EACH) for sequence, _, ids in feeds]
        seconds = time_s(lambda: backend.forward(items))
        for sequence, length, _ in feeds:
            backend.truncate(sequence, length)
        return seconds

    cases = {"step": step, "separate": separate, "packed": packed, "again": separate}
    seconds = alternate(cases, bench.pick(60, 8))
    aa = median_ratio(seconds["again"], seconds["separate"])
    ratio = median_ratio(seconds["step"], seconds["separate"])
    measure = judged(
        "engine.batch8",
        f"one step, 8 ready sessions x 7 tokens : 8 separate forwards (A/A {aa:.3f})",
        ratio,
        "ratio",
        at_most(0.4),
    )
    details = {f"{name}_ms": round(1e3 * statistics.median(times), 3) for name, times in seconds.items()}
    packed_ratio = round(median_ratio(seconds["packed"], seconds["separate"]), 4)
    return ([measure], {**details, "packed_forward_ratio": packed_ratio, "aa": round(aa, 4)})


def _bare_sequence(backend: TargetBackend, recorded: RecordedSession) -> tuple[Any, int, list[int]]:
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, recorded.prompt_ids[sequence.length :], 1)])
    return sequence, sequence.length, list(recorded.output_ids[:TOKENS_EACH])


def _forward_s(backend: TargetBackend, sequence: Any, length: int, token_ids: list[int]) -> float:
    seconds = time_s(lambda: backend.forward([ForwardItem(sequence, token_ids, TOKENS_EACH)]))
    backend.truncate(sequence, length)
    return seconds


# -------------------------------------------------------------------------------------------- outside


class _TimedForwards:
    def __init__(self, backend: Any) -> None:
        self.seconds = 0.0
        self._forward = backend.forward
        backend.forward = self

    def __call__(self, items: Sequence[ForwardItem]) -> Logits:
        start_s = time.perf_counter()
        logits: Logits = self._forward(items)
        self.seconds += time.perf_counter() - start_s
        return logits


def measure_outside(bench: Bench) -> Found:
    """Times steps of 16 recorded rounds, mixed parameters: the part of `Engine.step` that is not
    `backend.forward`."""
    backend = load_target(EMBEDDED_TARGET, dtype="float32")
    driver, forwards = SteppedEngine(backend), _TimedForwards(backend)
    shares: dict[str, list[float]] = {"mixed": [], "greedy": []}
    recorded = bench.recording.sessions
    greedy = [s for s in recorded if s.sampling.temperature == 0 and s.sampling.presence_penalty == 0]
    groups = {"mixed": list(recorded), "greedy": greedy}
    for turn in range(bench.pick(6, 2)):
        for name, group in groups.items():
            sessions = [InsideSession(driver, group[i % len(group)], f"t{i}") for i in range(NUM_BUSY)]
            for session in sessions:
                session.open()
            share = _share_outside(driver, sessions, forwards)
            for session in sessions:
                session.close()
            if turn:  # the first turn warms up
                shares[name].append(share)
    value = statistics.median(shares["mixed"])
    greedy_share = statistics.median(shares["greedy"])
    measure = judged(
        "engine.outside",
        f"engine time outside the model forward, 16 sessions, mixed parameters (greedy {greedy_share:.1%})",
        100 * value,
        "%",
        at_most(15),
    )
    return ([measure], {name: [round(share, 4) for share in found] for name, found in shares.items()})


def _share_outside(driver: SteppedEngine, sessions: list[InsideSession], forwards: _TimedForwards) -> float:
    inside_s = step_s = 0.0
    for requests in zip(*(session.recorded.requests() for session in sessions), strict=True):
        asked = [s.submit(request) for s, (request, _, _) in zip(sessions, requests, strict=True)]
        before_s = forwards.seconds
        step_s += time_s(driver.settle)
        inside_s += forwards.seconds - before_s
        assert all(_is_right(each.reply, right) for each, right in zip(asked, requests, strict=True))
    return 1 - inside_s / step_s


def _is_right(reply: SessionResponse | None, expected: tuple[VerifyRequest, int, int]) -> bool:
    return isinstance(reply, Verdict) and (reply.position, reply.hash) == expected[1:]
