"""Limits how many requests generate at once and how many wait; turns are given in order of arrival."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.edge_client.daemon.openai.errors import busy, invalid, stopping

_MEMORY = 0.2  # weight of the newest request in the mean
_FIRST_GUESS_S = 2.0
_MAX_RETRY_S = 60


class Admission:
    """Gives turns to requests. Only the event loop's thread may use it; bounds may change while requests
    run."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.is_stopping = False
        self.num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_s = _FIRST_GUESS_S
        self._busy, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        """Returns how many requests wait for a turn."""
        return len(self._waiting)

    def check_room(self, number: int) -> None:
        """Raises `ApiError` 429 where a request of `number` texts finds no room to run or wait, 503 when stopping."""
        if self.is_stopping:
            raise stopping()
        most = self.max_running + self.max_waiting
        if number > most:
            raise invalid("n", f"times the prompts is {number} texts; this daemon takes {most} at a time")
        num_turns = max(0, self.max_running - self.num_running)  # where bounds fell, more than may may run
        if number > num_turns + self.max_waiting - self.num_waiting:
            message = f"{self.num_running} texts are generated and {self.num_waiting} wait, of at most {most}"
            raise busy(message, self.retry_after_s)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Raises `ApiError` 429 when too many wait, 503 when stopping."""
        await self._acquire()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            yield
        finally:
            self._mean_s += _MEMORY * (loop.time() - start_s - self._mean_s)
            self._release()

    def set_bounds(self, max_running: int, max_waiting: int) -> None:
        """Changes the bounds; requests that wait and now fit get their turn."""
        self.max_running, self.max_waiting = max_running, max_waiting
        self._admit()

    def stop(self) -> None:
        """Admits nobody any more; those who wait get `ApiError` 503."""
        self.is_stopping = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(stopping())
        self._waiting.clear()

    async def busy(self) -> None:
        """Returns once a request generates."""
        await self._busy.wait()

    async def idle(self) -> None:
        """Returns once no request generates."""
        await self._idle.wait()

    def check_integrity(self) -> None:
        """Asserts that counts, waiting requests and the idle event agree."""
        assert 0 <= self.num_running, "more turns ended than began"
        assert self._idle.is_set() == (self.num_running == 0), "idle and running disagree"
        assert self._busy.is_set() != self._idle.is_set(), "busy and idle agree"
        assert not self._waiting or self.num_running >= self.max_running, "a turn is free and somebody waits"

    @property
    def retry_after_s(self) -> int:
        """Returns the expected wait for a turn in seconds, from the mean time of recent requests."""
        wait_s = self._mean_s * (self.num_waiting + 1) / self.max_running
        return min(_MAX_RETRY_S, max(1, math.ceil(wait_s)))

    async def _acquire(self) -> None:
        if self.is_stopping:
            raise stopping()
        if self.num_running < self.max_running and not self._waiting:
            self._start()
            return
        if len(self._waiting) >= self.max_waiting:
            message = f"{self.num_running} requests run and {self.num_waiting} wait, as many as may"
            raise busy(message, self.retry_after_s)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release()  # the turn came in the same moment: pass it on
            elif future in self._waiting:
                self._waiting.remove(future)
            raise

    def _start(self) -> None:
        self.num_running += 1
        self._idle.clear()
        self._busy.set()

    def _release(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._busy.clear()
            self._idle.set()
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.num_running < self.max_running:
            future = self._waiting.popleft()
            if not future.done():
                self._start()
                future.set_result(None)
