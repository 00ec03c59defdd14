"""Runs the engine's steps: on the event loop where they are short, on a thread beside it where they are long.

A step on another thread costs two hand-overs of the interpreter lock, and its Python and the loop's wait for
each other; the loop alone has a third more rounds a second. While a long step runs the loop goes on reading,
refusing and answering health checks. A step on a GPU is always run on the thread: it waits for the device, and
the loop need not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

from outrider.cloud_verifier.engine.delivery import Delivery, WaitAllowance
from outrider.cloud_verifier.engine.engine import Engine
from outrider.common.errors import OutriderError
from outrider.common.process.thread_pool import start_pool

log = logging.getLogger(__name__)

INLINE_S = 0.01  # the longest that a step may keep the event loop from everything else, as expected
IDLE_TURN_S = 0.001  # until the next look where a step found nothing it could do
# A message needs a few turns of the loop from its socket to the engine, and an answer as many back. Where one
# step follows the other the loop has them in between: what waits in sockets joins the next, or is refused.
LOOP_TURNS, CROWDED_S = 4, 0.0005
# How long the next step waits for answers to the step before the last one: a client that does not read costs it once.
# All such waits take at most this share of the time, as a client may read each answer a little too late.
MAX_DELIVERY_S, MAX_DELIVERY_SHARE = 0.005, 0.25


class EngineStoppedError(OutriderError):
    """The engine stopped for a bug of its own; its process ends, for a supervisor to start it again."""


class EngineDriver:
    """Calls `engine.step()` whenever there is work. One step at a time: nothing of the engine's needs a lock.

    Lives on one event loop.
    """

    def __init__(
        self, engine: Engine, pool: Executor | None = None, delivery: Delivery | None = None
    ) -> None:
        """`pool` runs the long steps and is closed here; one thread where none is given. `delivery` knows the answers
        that are still being written."""
        self._engine = engine
        self._delivery = delivery or Delivery()
        self._allowance = WaitAllowance(MAX_DELIVERY_S, MAX_DELIVERY_SHARE)
        self._is_waiting = False  # for answers to be written
        self._clock = engine.clock
        self._is_on_cpu = engine.backend.device == "cpu"
        self._loop = asyncio.get_running_loop()
        self._pool = pool or start_pool(1, "engine")
        self._next: asyncio.Handle | None = None  # the next turn
        self._is_due = False  # it comes as soon as the loop gets to it
        self._step: Future[bool] | None = None  # on the thread
        self._last_end_s = 0.0  # of a step that did something
        self.failed = asyncio.Event()  # the engine stopped for a bug

    def start(self) -> None:
        """Steps from now on."""
        self._engine.on_job = self._hurry
        self._engine.call_there = self._call_there
        self._engine.is_running = True
        self._plan(False)

    async def stop(self) -> None:
        """Waits for the step on the thread, if any; what is not computed is not answered."""
        self._engine.is_running = False
        self._engine.on_job = None
        if self._next is not None:
            self._next.cancel()
        if self._step is not None:
            await asyncio.wait((asyncio.wrap_future(self._step),))
        self._pool.shutdown()

    def _call_there(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)

    def _hurry(self) -> None:
        """Plans a step for the next turn of the loop, as there is a job, unless one runs already."""
        if self._is_due or self._step is not None:
            return
        if self._next is not None:
            self._next.cancel()
        is_crowded = self._clock.now() - self._last_end_s < CROWDED_S
        self._is_due, self._next = True, self._loop.call_soon(self._wait, LOOP_TURNS if is_crowded else 0)

    def _wait(self, num_turns: int) -> None:
        if num_turns:
            self._next = self._loop.call_soon(self._wait, num_turns - 1)
        elif self._delivery.is_behind and (wait_s := self._allowance.left_s(self._clock.now())) > 0.0:
            self._is_waiting, self._next = True, self._loop.call_later(wait_s, self._turn)
            self._delivery.call_when_written(self._turn_now)
        else:
            self._turn()

    def _turn_now(self) -> None:
        """Takes the turn that waits for answers to be written."""
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.call_soon(self._turn)

    def _plan(self, did_work: bool) -> None:
        engine = self._engine
        if not engine.is_running:
            return
        if did_work:
            self._last_end_s = self._clock.now()
        if engine.num_jobs and did_work:
            self._hurry()
        else:
            delay_s = IDLE_TURN_S if engine.num_jobs else max(IDLE_TURN_S, engine.seconds_to_sweep)
            self._is_due, self._next = False, self._loop.call_later(delay_s, self._turn)

    def _turn(self) -> None:
        self._is_due, self._next = False, None
        self._delivery.call_when_written(None)
        if self._is_waiting:
            self._is_waiting = False
            self._allowance.waited(self._clock.now())
        if not self._engine.is_running:  # a job that came after it stopped
            return
        if wait_s := self._engine.seconds_to_gather:
            self._next = self._loop.call_later(wait_s, self._turn)  # or with the next job
            return
        self._delivery.step_begins()
        if not self._is_on_cpu or self._engine.expected_step_s > INLINE_S:
            self._step = self._pool.submit(self._engine.step)
            self._step.add_done_callback(lambda step: self._loop.call_soon_threadsafe(self._end_step, step))
            return
        try:
            did_work = self._engine.step()
        except Exception as error:
            self._fail(error)
        else:
            self._loop.call_soon(self._observe)
            self._plan(did_work)

    def _observe(self) -> None:
        """Has the engine note the times of its step, now that its answers are on their way."""
        if self._step is None:
            self._engine.observe()

    def _end_step(self, step: Future[bool]) -> None:
        self._step = None
        self._loop.call_soon(self._observe)
        if (error := step.exception()) is not None:
            self._fail(error)
        else:
            self._plan(step.result() or bool(self._engine.num_arrived))

    def _fail(self, error: BaseException) -> None:
        """Stops for a bug outside of any round: nothing more is computed, and `failed` tells."""
        self._engine.is_running = False
        log.error("the engine stopped", exc_info=error)
        self.failed.set()
