"""An in-process gRPC verifier on a loopback port, for tests that need the wire and no process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.cloud_verifier.verification.grammars import GrammarStore


@contextlib.contextmanager
def serving(
    backend: TargetBackend,
    config: ServeConfig | None = None,
    drafter: CoLocatedDrafter | None = None,
    grammars: GrammarStore | None = None,
) -> Iterator[VerifierServer]:
    """`with serving(FakeBackend()) as server: ... server.port`; runs on an event loop of its own."""
    config = replace(config or ServeConfig(), listen="127.0.0.1:0", admin_listen="127.0.0.1:0")
    is_ready, is_over = threading.Event(), threading.Event()
    servers: list[VerifierServer] = []
    failures: list[BaseException] = []

    async def run() -> None:
        async with VerifierServer(backend, config, drafter, grammars=grammars) as server:
            servers.append(server)
            is_ready.set()
            while not is_over.is_set():
                await asyncio.sleep(0.01)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
            is_ready.set()

    thread = threading.Thread(target=main, name="verifier", daemon=True)
    thread.start()
    assert is_ready.wait(120), "the in-process verifier did not start"
    if failures:
        raise failures[0]
    try:
        yield servers[0]
    finally:
        is_over.set()
        thread.join(120)
        assert not failures, failures
