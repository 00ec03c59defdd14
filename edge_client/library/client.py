"""The client for threads: `outrider.connect`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from outrider.common.types import ModelInfo
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.library.connection import Connection
from outrider.edge_client.library.result import Result, make_result
from outrider.edge_client.library.settings import client_config
from outrider.edge_client.session.generation import BlockingGeneration
from outrider.edge_client.session.shared_edge import Prepared
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer


def connect(verifier: str, *, draft: str | Path | None = None, **settings: object) -> Client:
    """Returns a client of the verifier at `verifier` (HOST:PORT, or several as `edge-client --verifier` takes them).

    `draft` is a draft's directory, None for the embedded draft, or "none" to decode in the cloud alone. `settings`
    are those of `edge-client`, with underscores (docs/library.md), and defaults for each call; what is not given
    is taken from the environment, as `edge-client` does. Raises `ConfigError` for a setting, `LinkError` where no
    verifier answers, `ModelError` and `UsageError` for the draft.
    """
    return Client(verifier, draft=draft, **settings)


class Client:
    """Generates text, in as many threads at once as call it; all share one draft. See `connect`."""

    def __init__(self, verifier: str, *, draft: str | Path | None = None, **settings: object) -> None:
        self._connection = Connection(*client_config(verifier, draft, settings))

    @property
    def config(self) -> RunConfig:
        """Returns the settings that calls have unless they choose others."""
        return self._connection.config

    @property
    def model(self) -> ModelInfo | None:
        """Returns the verifier's description of its target; None where none was asked (mode edge-only)."""
        return self._connection.model

    def generate(self, prompt: str | Iterable[int], **sampling: object) -> Result:
        """Returns the continuation of a prompt, text or token ids.

        `sampling` are settings for this call, by the names in docs/library.md. Raises `UsageError` for the prompt or
        a setting, `ClosedError` after `close`, and the `OutriderError` that ended the generation. If `close` cancels
        it, the result's `finish_reason` is "cancelled".
        """
        with self.stream(prompt, **sampling) as stream:
            for _ in stream:
                pass
            return stream.result()

    def stream(self, prompt: str | Iterable[int], **sampling: object) -> Stream:
        """Returns the events of a generation, which starts at once. Arguments and errors as of `generate`."""
        return open_stream(self._connection, prompt, sampling)

    def close(self, *, cancel: bool = False) -> None:
        """Waits until the generations under way in other threads have ended, or cancels them, and frees the draft.
        Later calls raise `ClosedError`; a second `close` does no harm."""
        self._connection.close(cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Closes; after an error generations under way are cancelled."""
        self.close(cancel=kind is not None)


def open_stream(
    connection: Connection, prompt: str | Iterable[int], sampling: Mapping[str, object]
) -> Stream:
    """Returns the events of a generation over `connection`, which starts at once. Errors as of `Client.generate`."""
    prepared = connection.prepare(prompt, sampling)
    return Stream(prepared, connection.start(prepared, BlockingGeneration), connection.tokenizer)


class Stream:
    """Iterates over the events of one generation: `TokenEvent` for each token, one `EndEvent` at the end.

    To leave it early, in any way, cancels the generation here and at the verifier; `with` or `close` do so at once.
    For one thread at a time.
    """

    def __init__(self, prepared: Prepared, generation: BlockingGeneration, tokenizer: EdgeTokenizer) -> None:
        self._prepared, self._generation, self._tokenizer = prepared, generation, tokenizer
        self._events: deque[SessionEvent] = deque()

    @property
    def seed(self) -> int:
        """Returns the seed of the sampling noise."""
        return self._prepared.seed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SessionEvent:
        """Returns the next event. Raises the `OutriderError` that ended the generation, after its tokens."""
        if not self._events:
            self._events.extend(self._generation.next_batch())
        if not self._events:
            raise StopIteration
        return self._events.popleft()

    def result(self) -> Result:
        """Waits for the end and returns the whole result; after an error or `close`, as far as it came."""
        self._generation.ended()
        return make_result(self._prepared, self._tokenizer)

    def close(self) -> None:
        """Cancels the generation if it is under way, and waits until both sides have forgotten it."""
        self._generation.cancel()
        self._generation.ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if (generation := getattr(self, "_generation", None)) is not None:
            generation.cancel()
