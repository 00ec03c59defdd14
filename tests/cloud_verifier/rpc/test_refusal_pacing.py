"""How fast rounds are refused: at once what a session may have in flight, and no faster than hints say beyond it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from outrider.cloud_verifier.config import CallLimits
from outrider.cloud_verifier.engine.admission import MAX_WAITING
from outrider.cloud_verifier.engine.backlog import Refusal
from outrider.cloud_verifier.engine.idle_time import IdleClock
from outrider.cloud_verifier.rpc.occupancy import Occupancy
from outrider.cloud_verifier.rpc.stream import REJECTION_S, SessionStream, StreamContext, StreamRegistry
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import Limits

LIMITS = Limits(
    max_context=100,
    max_draft_tokens=8,
    max_message_bytes=1 << 20,
    max_sessions=8,
    session_idle_ttl_ms=60_000,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)


class RefusedRounds:
    """Reads a stream whose rounds are all refused, in virtual time, and notes when each was answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hint_ms: int) -> None:
        self.clock = Clock()
        self.answered_s: list[float] = []
        refusal = Refusal("queue_ms", "too long", hint_ms)
        backlog = SimpleNamespace(enter_round=lambda *_, **__: refusal)
        observer = SimpleNamespace(on_error=lambda *_: self.answered_s.append(self.clock.now_s))
        self.context = StreamContext(
            backlog=backlog,  # type: ignore[arg-type]
            submit=lambda _: None,
            mailbox=SimpleNamespace(post=lambda *_: None),  # type: ignore[arg-type]
            observer=observer,  # type: ignore[arg-type]
            clock=self.clock,
            idle_clock=IdleClock(self.clock),
            max_unread_bytes=1 << 20,
            limits=LIMITS,
            registry=StreamRegistry(),
        )
        # Of this module alone: servers of other tests, on their threads, go on sleeping.
        in_virtual_time = SimpleNamespace(**(vars(asyncio) | {"sleep": self.sleep}))
        monkeypatch.setattr("outrider.cloud_verifier.rpc.stream.asyncio", in_virtual_time)

    async def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def send(self, sent_s: list[float]) -> list[float]:
        """Returns how long each round waited for its refusal; they are sent at these times."""

        async def requests() -> AsyncIterator[bytes]:
            opening = pb.OpenRequest(session_id=bytes(16), token_ids=[1, 2], num_prompt_tokens=2)
            yield pb.SessionRequest(open=opening).SerializeToString()
            for number, at_s in enumerate(sent_s, 1):
                self.clock.now_s = max(self.clock.now_s, at_s)
                yield pb.SessionRequest(verify=pb.VerifyRequest(round_id=number)).SerializeToString()

        async def read() -> None:
            with Occupancy(CallLimits()).call("default") as call:
                stream = SessionStream(self.context, "default", bytes(16), call)
                await stream._read_all(requests())

        asyncio.run(read())
        return [answered - sent for answered, sent in zip(self.answered_s, sent_s, strict=True)]


@pytest.mark.parametrize("hint_ms", [20, 5000])
def test_a_client_that_ignores_hints_is_read_no_faster_than_they_say(
    monkeypatch: pytest.MonkeyPatch, hint_ms: int
) -> None:
    flood = RefusedRounds(monkeypatch, hint_ms)
    waits_s = flood.send([0.0] * 200)
    cost_s = min(hint_ms / 1e3, REJECTION_S)
    assert waits_s[:MAX_WAITING] == [0.0] * MAX_WAITING, "as many as may honestly be in flight"
    between_s = [after - before for before, after in itertools.pairwise(waits_s[MAX_WAITING + 1 :])]
    assert between_s == pytest.approx([cost_s] * len(between_s))


def test_a_client_that_pipelines_and_heeds_its_hints_is_always_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = RefusedRounds(monkeypatch, 5000)
    assert set(patient.send([5.0 * turn for turn in range(20) for _ in range(MAX_WAITING)])) == {0.0}
