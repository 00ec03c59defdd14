"""The client for event loops: `outrider.connect_async`. It has the methods of `Client`, to be awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from outrider.common.errors import ClosedError, OutriderError
from outrider.common.types import ModelInfo
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.library.connection import Connection
from outrider.edge_client.library.result import Result, make_result
from outrider.edge_client.library.settings import client_config
from outrider.edge_client.session.generation import Generation
from outrider.edge_client.session.shared_edge import Prepared


def connect_async(verifier: str, *, draft: str | Path | None = None, **settings: object) -> AsyncClient:
    """Returns a client for the running event loop. Arguments and `ConfigError` as of `connect`; it connects, and raises
    the other errors, with `async with` or the first call."""
    return AsyncClient(verifier, draft=draft, **settings)


class AsyncClient:
    """Generates text in as many tasks of one event loop at once as call it. See `connect_async` and `Client`."""

    def __init__(self, verifier: str, *, draft: str | Path | None = None, **settings: object) -> None:
        self._config, self._has_draft = client_config(verifier, draft, settings)
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None  # None: not begun, or it failed
        self._is_closed = False

    @property
    def config(self) -> RunConfig:
        """Returns the settings that calls have unless they choose others."""
        return self._config

    @property
    def model(self) -> ModelInfo | None:
        """Returns the verifier's description of its target, once it is connected (`Client.model`)."""
        return self._connection.model if self._connection else None

    async def generate(self, prompt: str | Iterable[int], **sampling: object) -> Result:
        """Returns the continuation of a prompt, as `Client.generate`. To cancel the task cancels the generation."""
        async with self.stream(prompt, **sampling) as stream:
            async for _ in stream:
                pass
            return await stream.result()

    def stream(self, prompt: str | Iterable[int], **sampling: object) -> AsyncStream:
        """Returns the events of a generation, which starts with `async with` or the first event, and raises there
        what `generate` raises."""
        return AsyncStream(self, prompt, sampling)

    async def close(self, *, cancel: bool = False) -> None:
        """Waits until the generations under way have ended, or cancels them, and frees the draft, as
        `Client.close`."""
        self._is_closed = True
        if self._opening is not None:
            with suppress(OutriderError):  # whoever asked for the connection was told
                connection = await asyncio.shield(self._opening)
                await asyncio.to_thread(connection.close, cancel)

    async def connected(self) -> Connection:
        """Returns the connection, opened on another thread by the first call. A caller that is cancelled leaves it to
        others."""
        if self._opening is None:
            if self._is_closed:
                raise ClosedError("this client is closed", "open another with outrider.connect_async")
            self._opening = asyncio.create_task(asyncio.to_thread(Connection, self._config, self._has_draft))
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[Connection]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None  # the next call tries again
        else:
            self._connection = opening.result()

    async def __aenter__(self) -> Self:
        try:
            await self.connected()
        except asyncio.CancelledError:
            self._is_closed = True
            if self._opening is not None:  # nobody else will close what it opens
                self._opening.add_done_callback(_close_opened)
            raise
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        """Closes; after an error generations under way are cancelled."""
        await self.close(cancel=kind is not None)


def _close_opened(opening: asyncio.Task[Connection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(cancel=True)


class AsyncStream:
    """Iterates over the events of one generation, as `Stream` does, in one task at a time."""

    def __init__(
        self, client: AsyncClient, prompt: str | Iterable[int], sampling: Mapping[str, object]
    ) -> None:
        self._client, self._prompt, self._sampling = client, prompt, sampling
        self._begun: tuple[Prepared, Generation] | None = None
        self._events: deque[SessionEvent] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionEvent:
        """Returns the next event. Raises the `OutriderError` that ended the generation, after its tokens."""
        _, generation = await self._begin()
        if not self._events:
            self._events.extend(await generation.next_batch())
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def result(self) -> Result:
        """Waits for the end and returns the whole result; after an error or `close`, as far as it came."""
        prepared, generation = await self._begin()
        await generation.ended()
        connection = await self._client.connected()
        return await asyncio.to_thread(make_result, prepared, connection.tokenizer)

    async def close(self) -> None:
        """Cancels the generation if it is under way, and waits until both sides have forgotten it."""
        if self._begun is not None:
            _, generation = self._begun
            generation.cancel()
            await generation.ended()

    async def _begin(self) -> tuple[Prepared, Generation]:
        if self._begun is None:
            connection = await self._client.connected()
            prepared = await asyncio.to_thread(connection.prepare, self._prompt, self._sampling)
            self._begun = prepared, connection.start(prepared, Generation)
        return self._begun

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if begun := getattr(self, "_begun", None):
            begun[1].cancel()
