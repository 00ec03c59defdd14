"""What a step of the engine takes by its rows, without a network: sessions that share it, a draft each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.engine.inside import InsideSession, SteppedEngine
from benchmarks.timing import alternate, time_s
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import EMBEDDED_TARGET
from outrider.common.types import VerifyRequest
from outrider.experiments.load.recording import RecordedSession

NUM_SHARING, NUM_STEPS = 8, 40


def measure_steps(
    recorded: Sequence[RecordedSession], lengths: Sequence[int], num_threads: int
) -> dict[int, float]:
    """Returns by rows the median seconds of steps in which all sessions draft so many tokens, in turns.

    The sessions have traces; each step builds on the first token of each.
    """
    torch.set_num_threads(num_threads)
    engine = SteppedEngine(load_target(EMBEDDED_TARGET, dtype="float32"))
    sessions = [InsideSession(engine, each) for each in recorded]
    requests = {length: [_open(session, length) for session in sessions] for length in lengths}

    def step_of(length: int) -> Callable[[], float]:
        def step() -> float:
            for session, request in zip(sessions, requests[length], strict=True):
                session.submit(request)
            return time_s(engine.settle)

        return step

    found = alternate({str(length): step_of(length) for length in lengths}, NUM_STEPS)
    return {(length + 1) * len(sessions): statistics.median(found[str(length)]) for length in lengths}


def _open(session: InsideSession, length: int) -> VerifyRequest:
    """Opens the session, once more if it was; returns a round of its first position."""
    opened, recorded = session.open(), session.recorded
    assert recorded.trace is not None, "the session was recorded as rounds"
    known = recorded.trace.known_text(recorded.prompt_ids)
    num_right = min(length, recorded.trace.runs[0])
    draft = known.drafted(opened.position, length, num_right) if length else ()
    return VerifyRequest(2, opened.position, opened.hash, draft_tokens=draft)
