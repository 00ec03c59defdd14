"""Limits how many requests generate at once and how many wait; turns are given in order of arrival."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from outrider.edge_client.daemon.openai.errors import busy, invalid, stopping

_MEMORY = 0.2  # weight of the newest request in the mean
_FIRST_GUESS_S = 2.0
_MAX_RETRY_S = 60


@dataclass(slots=True)
class Room:
    """Holds what the texts of one request were promised: so many of them have not asked for their turn yet."""

    num_kept: int
    has_begun: bool = False  # one of them had its turn


class Admission:
    """Gives turns to the texts of requests. Only the event loop's thread may use it; bounds may change while requests
    run."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.is_stopping = False
        self.num_running = 0
        self._num_kept = 0  # in all rooms
        self._waiting: deque[tuple[asyncio.Future[None], Room]] = deque()
        self._mean_s = _FIRST_GUESS_S
        self._busy, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        """Returns how many texts wait for a turn, or will."""
        return len(self._waiting) + self._num_kept

    @contextmanager
    def room(self, number: int) -> Iterator[Room]:
        """Keeps room for the `number` texts of a request, until each had its turn or the request ends. Raises
        `ApiError` 429 where there is not so much, 503 when stopping."""
        self._check_room(number)
        room = Room(number)
        self._num_kept += number
        try:
            yield room
        finally:
            self._num_kept -= room.num_kept
            room.num_kept = 0

    @asynccontextmanager
    async def turn(self, room: Room) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Raises `ApiError` 503 when stopping, unless the request has begun."""
        await self._acquire(room)
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
        """Admits no request any more; those who wait get `ApiError` 503, but for the texts of one that has begun."""
        self.is_stopping = True
        for future, room in self._waiting:
            if not room.has_begun and not future.done():
                future.set_exception(stopping())
        self._waiting = deque(each for each in self._waiting if each[1].has_begun)

    async def busy(self) -> None:
        """Returns once a request generates."""
        await self._busy.wait()

    async def idle(self) -> None:
        """Returns once no request generates."""
        await self._idle.wait()

    def check_integrity(self) -> None:
        """Asserts that counts, waiting requests and the idle event agree."""
        assert 0 <= self.num_running, "more turns ended than began"
        assert 0 <= self._num_kept, "more turns were asked for than room was kept"
        assert self._idle.is_set() == (self.num_running == 0), "idle and running disagree"
        assert self._busy.is_set() != self._idle.is_set(), "busy and idle agree"
        assert not self._waiting or self.num_running >= self.max_running, "a turn is free and somebody waits"

    @property
    def retry_after_s(self) -> int:
        """Returns the expected wait for a turn in seconds, from the mean time of recent requests."""
        wait_s = self._mean_s * (self.num_waiting + 1) / self.max_running
        return min(_MAX_RETRY_S, max(1, math.ceil(wait_s)))

    def _check_room(self, number: int) -> None:
        if self.is_stopping:
            raise stopping()
        most = self.max_running + self.max_waiting
        if number > most:
            raise invalid("n", f"times the prompts is {number} texts; this daemon takes {most} at a time")
        num_turns = max(0, self.max_running - self.num_running)  # where bounds fell, more than may may run
        if number > num_turns + self.max_waiting - self.num_waiting:
            message = f"{self.num_running} texts are generated and {self.num_waiting} wait, of at most {most}"
            raise busy(message, self.retry_after_s)

    async def _acquire(self, room: Room) -> None:
        room.num_kept -= 1
        self._num_kept -= 1
        if self.is_stopping and not room.has_begun:
            raise stopping()
        if self.num_running < self.max_running and not self._waiting:
            self._start(room)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, room))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release()  # the turn came in the same moment: pass it on
            elif (future, room) in self._waiting:
                self._waiting.remove((future, room))
            raise

    def _start(self, room: Room) -> None:
        room.has_begun = True
        self.num_running += 1
        self._idle.clear()
        self._busy.set()

    def _release(self) -> None:
        self.num_running -= 1
        self._admit()  # before those who wait for an idle daemon are told
        if self.num_running == 0:
            self._busy.clear()
            self._idle.set()

    def _admit(self) -> None:
        while self._waiting and self.num_running < self.max_running:
            future, room = self._waiting.popleft()
            if not future.done():
                self._start(room)
                future.set_result(None)
