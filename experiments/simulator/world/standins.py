"""What product code gets in virtual time for `time`, `threading`, thread pools and `secrets`."""

from __future__ import annotations

import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from outrider.experiments.simulator.world.world import Waiting, World


class VirtualTime(types.ModuleType):
    """The module `time`, as far as clocks and sleeping go."""

    def __init__(self, world: World) -> None:
        super().__init__("time")
        # Plain functions: they are asked several times a round.
        self.time = self.monotonic = self.perf_counter = lambda: world.now_s
        self.time_ns = self.monotonic_ns = self.perf_counter_ns = lambda: int(world.now_s * 1e9)
        self.sleep = world.sleep


class VirtualThread:
    """`threading.Thread`, as a task."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        world: World,
    ) -> None:
        assert target is not None, "threads here are made with a target"
        self.name = name or "task"
        self._world, self._target = world, target
        self._args, self._kwargs = tuple(args), kwargs or {}
        self._is_done = False
        self._waiting = Waiting(world)

    def start(self) -> None:
        self._world.start(self._run)

    def _run(self) -> None:
        self._target(*self._args, **self._kwargs)
        self._is_done = True
        self._waiting.wake()

    def is_alive(self) -> bool:
        return not self._is_done

    def join(self, timeout: float | None = None) -> None:
        if not self._is_done:
            self._waiting.wait(timeout)


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


class VirtualThreading(types.ModuleType):
    """The module `threading`. Locks stay real: whoever holds one does not give way."""

    Lock = staticmethod(threading.Lock)
    RLock = staticmethod(threading.RLock)
    get_ident = staticmethod(threading.get_ident)
    current_thread = staticmethod(threading.current_thread)
    main_thread = staticmethod(threading.main_thread)

    def __init__(self, world: World) -> None:
        super().__init__("threading")
        self._world = world

    def Thread(self, *args: Any, **kwargs: Any) -> VirtualThread:
        return VirtualThread(*args, world=self._world, **kwargs)

    def Event(self) -> VirtualEvent:
        return VirtualEvent(self._world)


class VirtualPool:
    """`ThreadPoolExecutor`: at most `max_workers` calls at once, each of which may sleep."""

    def __init__(self, world: World, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        self._world = world
        self._num_free = max_workers or 1
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


class SeededSecrets(types.ModuleType):
    """The module `secrets`, the same in every run."""

    def __init__(self, seed: int) -> None:
        super().__init__("secrets")
        self._random = random.Random(f"secrets {seed}")

    def token_bytes(self, num_bytes: int = 32) -> bytes:
        return self._random.randbytes(num_bytes)

    def token_hex(self, num_bytes: int = 32) -> str:
        return self.token_bytes(num_bytes).hex()

    def randbits(self, num_bits: int) -> int:
        return self._random.getrandbits(num_bits)
