"""A verifier process: target, engine and gRPC server from start to drained stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.driver import EngineDriver, EngineStoppedError
from outrider.cloud_verifier.rpc.service import VerifierService
from outrider.cloud_verifier.rpc.tracing import create_round_tracer
from outrider.cloud_verifier.security.authenticator import AccessError
from outrider.cloud_verifier.server.addresses import ADMIN_OFF
from outrider.cloud_verifier.server.entrance import Entrance
from outrider.cloud_verifier.server.load_progress import LOADING_THREAD
from outrider.cloud_verifier.server.loading import create_engine
from outrider.cloud_verifier.server.supervision import Supervision
from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
from outrider.common.process.memory import give_back

if TYPE_CHECKING:
    from outrider.cloud_verifier.rpc.probe_port import ProbePort
    from outrider.cloud_verifier.server.admin import AdminServer

log = logging.getLogger(__name__)

# The forward takes the interpreter lock back after every operation. At Python's 5 ms it waits that long for
# an event loop busy with refusals, and a refusal as long for the Python of a step.
SWITCH_INTERVAL_S = 0.0005
LAST_ANSWERS_S = 2.0  # after a drain's grace: for the rounds that are being computed
RELOAD_S = 1.0  # between two looks at idle streams, and at the files of TLS and tokens


class VerifierServer:
    """Serves on `server.port` inside `async with VerifierServer(backend, config) as server:`."""

    def __init__(
        self,
        backend: TargetBackend,
        config: ServeConfig,
        drafter: CoLocatedDrafter | None = None,
        entrance: Entrance | None = None,
        labels: tuple[str, ...] = (),
        grammars: GrammarStore | None = None,
    ) -> None:
        """`drafter` makes co-located generation possible, `grammars` those of sessions; both are closed with the
        server. `entrance`, closed with it too, is made from `config` where none is given."""
        load_row_kernels()  # compiled here, so that no round waits for it
        self._config = config
        self.engine = create_engine(backend, config, drafter, labels, grammars)
        tracer = create_round_tracer()
        self._entrance = entrance or Entrance(config)
        self.security = self._entrance.security
        self.service = VerifierService(
            self.engine,
            tracer,
            self.security.caller_of,
            max_unread_bytes=config.max_unread_bytes,
            call_limits=config.call_limits,
        )
        self.probes: ProbePort | None = None
        if config.probe_listen not in ADMIN_OFF:
            from outrider.cloud_verifier.rpc.probe_port import ProbePort

            self.probes = ProbePort(config.probe_listen, self.engine)
        self._watching: asyncio.Task[None]
        self._driver: EngineDriver

    @property
    def failed(self) -> asyncio.Event:
        """Returns what is set once the engine stopped for a bug."""
        return self._driver.failed

    @property
    def admin(self) -> AdminServer | None:
        """Returns the admin port; None where there is none."""
        return self._entrance.admin

    @property
    def port(self) -> int:
        """Returns the port it serves on, 0 before it does."""
        return self._entrance.port

    async def __aenter__(self) -> VerifierServer:
        await self._entrance.open()
        try:
            if self.probes is not None:
                await self.probes.open()
        except BaseException:
            await self._entrance.close()
            raise
        self._driver = EngineDriver(self.engine, delivery=self.service.delivery)
        self._driver.start()
        self._entrance.admit(self.service, self.engine)
        self._watching = asyncio.create_task(self._watch())
        return self

    def reload(self, is_forced: bool = True) -> None:
        """Loads certificates and tokens again, and ends streams whose token has ended.

        Other streams continue.
        """
        if ended := self.security.reload(is_forced):
            self.service.end_streams_of(ended, AccessError("revoked", "the token of this call has ended"))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            self.service.end_idle_streams()
            try:
                if self.security.has_files:
                    self.reload(is_forced=False)
            except Exception:
                log.exception("could not look at the files of TLS and tokens")

    async def __aexit__(self, *exc_info: object) -> None:
        self._watching.cancel()
        await self._entrance.close()
        if self.probes is not None:
            await self.probes.close()
        await self._driver.stop()
        self.engine.close()

    async def drain(self) -> None:
        """Takes no new sessions; open ones continue until they close or the grace ends.

        Rounds that are then being computed are still answered.
        """
        grace_s = self._config.drain_grace_s
        self.engine.is_draining = True
        self._entrance.refuse()
        self.service.announce_draining(grace_s, "shutting down")
        log.info("draining %d sessions for up to %.0f s", self.engine.num_sessions, grace_s)
        await self._calls_ended(grace_s)
        self.service.end_calls()
        await self._calls_ended(LAST_ANSWERS_S)

    async def _calls_ended(self, timeout_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + timeout_s
        while self.service.num_calls and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)


def run_until_signalled(
    entrance: Entrance,
    load: Callable[[], VerifierServer],
    on_ready: Callable[[VerifierServer], None],
) -> None:
    """Runs `serve_until_signalled` on uvloop: a round costs a tenth less than on asyncio's own loop."""
    import uvloop

    try:
        uvloop.run(serve_until_signalled(entrance, load, on_ready))
    finally:
        gc.unfreeze()


async def serve_until_signalled(
    entrance: Entrance,
    load: Callable[[], VerifierServer],
    on_ready: Callable[[VerifierServer], None],
) -> None:
    """Serves what `load`, called on a thread, returns behind `entrance`, until SIGTERM or SIGINT; drains, stops.

    A second signal ends the grace at once; SIGTERM while `load` runs ends it all. Raises `EngineStoppedError` where the
    engine has a bug: calls end, and edges open their sessions again elsewhere or at the next start.
    """
    loop = asyncio.get_running_loop()
    await entrance.open()
    loop.add_signal_handler(signal.SIGHUP, entrance.security.reload, True)  # the target may take minutes
    first, second = asyncio.Event(), asyncio.Event()
    loading = asyncio.create_task(_on_a_thread(load))

    def stop_loading() -> None:
        first.set()
        loading.cancel()

    # Without a handler the first process of a container is sent none, and would serve once it has loaded.
    loop.add_signal_handler(signal.SIGTERM, stop_loading)
    try:
        server = await loading
    except BaseException:
        await entrance.close()
        if first.is_set():
            log.info("stopped while the target was loading")
            return
        raise
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    supervision = Supervision(server.engine)
    async with server:
        on_ready(server)
        supervision.ready(f"serving {server.engine.model.model_id} on port {server.port}")
        await _first_of(first.wait(), server.failed.wait())
        if not server.failed.is_set():
            supervision.stopping()
            await _first_of(server.drain(), second.wait(), server.failed.wait())
        supervision.close()
        if server.failed.is_set():
            raise EngineStoppedError("the engine stopped for a bug; the log above says where")


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits for one of several, and cancels the others."""
    tasks = [asyncio.create_task(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _on_a_thread(load: Callable[[], VerifierServer]) -> VerifierServer:
    """Returns what `load` returns. An interrupted process does not wait for the thread.

    Collections are left out meanwhile: what loading makes lives as long as the process, and is frozen.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[VerifierServer] = loop.create_future()

    def work() -> None:
        try:
            settle = partial(loaded.set_result, load())
        except BaseException as error:
            settle = partial(loaded.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop was interrupted
            loop.call_soon_threadsafe(settle)

    gc.disable()
    try:
        threading.Thread(target=work, name=LOADING_THREAD, daemon=True).start()
        return await loaded
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        give_back()
