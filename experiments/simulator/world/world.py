"""Virtual time: ordinary blocking code runs as tasks that give way where they sleep or wait. One thread.

A task is a greenlet, so what it calls need not know: the product's edge sleeps and waits as it always does,
ten thousand times over, and a switch takes under a microsecond. Events of one moment run in the order they
were made, so a run is a function of its seed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from queue import Empty
from typing import Any

from greenlet import getcurrent, greenlet


class WorldEnded(BaseException):
    """Unwinds a task when its world closes: not an error, and nothing the task may handle."""


class World:
    """`now_s` is the virtual clock, in seconds from 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_over = False
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._next_number = itertools.count().__next__
        self._hub = getcurrent()
        self._tasks: set[Any] = set()

    def call_at(self, at_s: float, function: Callable[..., object], *args: Any) -> None:
        """`function(*args)` at `at_s`, now where that has passed. It must not block: it is no task."""
        heappush(self._events, (max(at_s, self.now_s), self._next_number(), function, args))

    def start(self, function: Callable[..., object], *args: Any) -> None:
        """A task that begins with the events of now. What it raises ends the run."""
        task = greenlet(self._run_task, self._hub)
        self._tasks.add(task)
        self.call_at(self.now_s, task.switch, function, args)

    def _run_task(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except WorldEnded:
            pass
        finally:
            self._tasks.discard(getcurrent())

    def sleep(self, seconds: float) -> None:
        """The running task goes on `seconds` later."""
        self.check_open()
        task, at_s = getcurrent(), self.now_s + max(seconds, 0.0)
        assert task is not self._hub, "an event's function must not sleep: start a task"
        heappush(self._events, (at_s, self._next_number(), task.switch, ()))
        self._hub.switch()

    def pause(self) -> Any:
        """The running task gives way until something switches to it; returns what it is handed."""
        self.check_open()
        assert getcurrent() is not self._hub, "an event's function must not wait: start a task"
        return self._hub.switch()

    def resume(self, task: Any, handed: Any) -> None:
        """A paused task goes on now: at once, where no task is running."""
        if getcurrent() is self._hub:
            task.switch(handed)
        else:
            self.call_at(self.now_s, task.switch, handed)

    def run(self, until_s: float = math.inf) -> None:
        """All events up to `until_s`, or until there are none. Raises what a task raised."""
        events, num_before = self._events, self._next_number()
        while events and events[0][0] <= until_s:
            self.now_s, _, function, args = heappop(events)
            function(*args)
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
        self.num_events += self._next_number() - num_before

    def close(self) -> None:
        """Ends every task where it stands."""
        self.is_over = True
        self._events.clear()
        while self._tasks:
            task = self._tasks.pop()
            if task:  # it has begun
                task.throw(WorldEnded)

    def check_open(self) -> None:
        """Raises `WorldEnded` where it is closed."""
        if self.is_over:
            raise WorldEnded


class Waiting:
    """A place where one task at a time waits to be woken."""

    __slots__ = ("_deadline_s", "_task", "_timer_s", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._task: Any = None
        self._deadline_s = math.inf
        self._timer_s = math.inf  # when the one event that counts will look at the deadline

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether it was woken, False after `timeout_s`."""
        world = self._world
        world.check_open()
        assert self._task is None, "two tasks wait in one place"
        self._deadline_s = math.inf if timeout_s is None else world.now_s + timeout_s
        if self._deadline_s < self._timer_s:  # else the timer that is set comes early enough
            self._set_timer()
        self._task = getcurrent()
        return bool(world.pause())

    def wake(self) -> None:
        """Whoever waits here goes on now."""
        if (task := self._task) is not None:
            self._task = None
            self._world.resume(task, True)

    def _set_timer(self) -> None:
        self._timer_s = self._deadline_s
        self._world.call_at(self._deadline_s, self._ring, self._deadline_s)

    def _ring(self, timer_s: float) -> None:
        if timer_s != self._timer_s:
            return  # an earlier one took its place
        self._timer_s = math.inf
        if self._task is None:
            return
        if self._deadline_s > self._world.now_s:
            self._set_timer()
            return
        task, self._task = self._task, None
        task.switch(False)


class VirtualQueue:
    """`queue.SimpleQueue` in virtual time, for one reader."""

    __slots__ = ("_items", "_waiting")

    def __init__(self, world: World) -> None:
        self._items: deque[Any] = deque()
        self._waiting = Waiting(world)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiting.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Raises `queue.Empty` after `timeout`."""
        if not self._items and block and (timeout is None or timeout > 0):
            self._waiting.wait(timeout)
        if not self._items:
            raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
