"""A stream whose session a newer one carries: it ends at once, is read no more, and takes nothing with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud_verifier.config import CallLimits, QueueLimits
from outrider.cloud_verifier.engine.backlog import Backlog, Refusal
from outrider.cloud_verifier.engine.idle_time import IdleClock
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.rpc.occupancy import Occupancy
from outrider.cloud_verifier.rpc.stream import SessionStream, StreamContext, SupersededError
from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import CancelRequest, Limits

TENANT, SESSION_ID = "default", bytes(16)
LIMITS = Limits(
    max_context=100,
    max_draft_tokens=8,
    max_message_bytes=1 << 20,
    max_sessions=8,
    session_idle_ttl_ms=60_000,
)


class Calls:
    """The calls of one session, whose client reads nothing."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.backlog = Backlog(QueueLimits(max_queue_ms=0.0), 512, 32)
        self.context = StreamContext(
            backlog=self.backlog,
            submit=self.jobs.append,
            mailbox=SimpleNamespace(post=lambda *_: None),  # type: ignore[arg-type]
            observer=SimpleNamespace(on_error=lambda *_: None),  # type: ignore[arg-type]
            clock=SYSTEM_CLOCK,
            idle_clock=IdleClock(SYSTEM_CLOCK),
            max_unread_bytes=1 << 20,
            limits=LIMITS,
        )
        self.is_read = asyncio.Event()
        self.streams: list[SessionStream] = []

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Serves one call, as the service does, which blocks in its first write."""
        blocked: Any = SimpleNamespace(write=lambda _: asyncio.Event().wait(), done=lambda: False)
        with Occupancy(CallLimits()).call(TENANT) as call:
            stream = SessionStream(self.context, TENANT, SESSION_ID, call)
            self.streams.append(stream)
            stream.read(requests)
            try:
                await stream.answers.write_to(blocked)
            finally:
                stream.detach()


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def test_an_older_stream_that_waits_in_a_write_ends_at_once_and_is_read_no_more() -> None:
    async def supersede() -> list[Job]:
        calls, may_go_on = Calls(), asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            await may_go_on.wait()
            for round_id in range(1, 100):
                yield pb.SessionRequest(cancel=pb.CancelRequest(round_id=round_id)).SerializeToString()

        older = asyncio.create_task(calls.serve(requests()))
        await asyncio.sleep(0.01)
        calls.streams[0].answers.put(b"an answer")
        await asyncio.sleep(0.01)
        newer = asyncio.create_task(calls.serve(nothing()))
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(SupersededError):
            await asyncio.wait_for(older, 5.0)
        await asyncio.sleep(0.01)
        newer.cancel()
        await asyncio.gather(newer, return_exceptions=True)
        return calls.jobs

    jobs = asyncio.run(supersede())
    assert not [job for job in jobs if isinstance(job.request, CancelRequest)]


def test_the_end_of_an_older_stream_leaves_the_newer_ones_place_among_those_refused() -> None:
    async def supersede() -> tuple[int, int]:
        calls = Calls()
        backlog = calls.backlog
        older = asyncio.create_task(calls.serve(nothing()))
        await asyncio.sleep(0.01)
        newer = asyncio.create_task(calls.serve(nothing()))
        backlog.observe(5, 2.0)
        backlog.enter_round(TENANT, 50)  # of another session
        assert isinstance(backlog.enter_round(TENANT, 5, session_id=SESSION_ID), Refusal)
        await asyncio.gather(older, return_exceptions=True)
        num_kept, _ = backlog._line.before((TENANT, b"another"))
        newer.cancel()
        await asyncio.gather(newer, return_exceptions=True)
        num_left, _ = backlog._line.before((TENANT, b"another"))
        return num_kept, num_left

    assert asyncio.run(supersede()) == (5, 0)
