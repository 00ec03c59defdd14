"""The clock, threads, events, queues and pools that product code is given in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from outrider.common.clock import Clock
from outrider.edge_client.transport.threads import Threads
from outrider.experiments.simulator.world.world import VirtualQueue, Waiting, World


class VirtualClock(Clock):
    """Reads a world's clock."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """Returns the virtual time in seconds."""
        return self._world.now_s

    def sleep(self, seconds: float) -> None:
        """Lets the running task go on after `seconds`; at once where they are not above 0."""
        if seconds > 0:
            self._world.sleep(seconds)


class VirtualEvent:
    """`threading.Event`, for one task that waits."""

    def __init__(self, world: World) -> None:
        self._is_set = False
        self._waiting = Waiting(world)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiting.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.wait(timeout)
        return self._is_set


def virtual_threads(world: World) -> Threads:
    """Returns threads that are tasks of `world`. Locks stay real: whoever holds one does not give way."""
    return Threads(
        start=lambda target, name: world.start(target),
        event=lambda: VirtualEvent(world),  # type: ignore[arg-type, return-value]
        queue=lambda: VirtualQueue(world),  # type: ignore[arg-type, return-value]
    )


class VirtualPool:
    """`ThreadPoolExecutor`: at most `max_workers` calls at once, each of which may sleep."""

    def __init__(self, world: World, max_workers: int) -> None:
        self._world = world
        self._num_free = max_workers
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: function(*args, **kwargs)))
        if self._num_free:
            self._num_free -= 1
            self._world.start(self._work)
        return future

    def _work(self) -> None:
        while self._calls:
            future, call = self._calls.popleft()
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._num_free += 1

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(function, *args) for args in zip(*iterables, strict=False)]
        for future in futures:
            waiting = Waiting(self._world)
            if not future.done():
                future.add_done_callback(lambda _, waiting=waiting: waiting.wake())  # type: ignore[misc]
                waiting.wait()
            yield future.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What was submitted is still done."""
