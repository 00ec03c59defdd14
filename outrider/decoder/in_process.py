"""A verifier in this process: its engine, and a link to it without sockets or threads.

Whoever waits for an answer runs the engine's steps meanwhile. Sessions of several threads share their steps.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

from outrider.cloud_verifier.config import ServeConfig, parse_kv_memory
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Disconnect, Job
from outrider.cloud_verifier.server.loading import create_engine, load_models
from outrider.common.process.memory import give_back
from outrider.common.types import Closed, ModelInfo, SessionRequest, SessionResponse
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.transport.link.base import Traffic

IDLE_S = 0.0005  # until the next look where a step found nothing it could do
ADDRESS = "in-process"


class InProcessVerifier:
    """Holds the target, what drafts beside it, and the engine that `cloud-verifier serve` has too."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises `ModelError` for the target, and for a draft or heads that do not fit it."""
        backend, drafter = load_models(config, parse_kv_memory(config.kv_memory))
        self.backend = backend
        self.engine: Engine = create_engine(backend, config, drafter)
        self._stepping = threading.Lock()

    def create_link(self, config: RunConfig, session_id: bytes) -> InProcessLink:
        """Returns the link of one session (`Surroundings.create_link`)."""
        return InProcessLink(self, session_id)

    def step(self) -> bool:
        """Runs one step of the engine, or waits for another thread's; returns whether there was work."""
        with self._stepping:
            return self.engine.num_jobs > 0 and self.engine.step()

    def close(self) -> None:
        """Frees the models. No session may run."""
        self.engine.close()
        del self.engine, self.backend
        give_back()


class InProcessLink:
    """Implements `VerifierLink`."""

    address = ADDRESS

    def __init__(self, verifier: InProcessVerifier, session_id: bytes) -> None:
        self.traffic = Traffic()  # none
        self._verifier, self._session_id = verifier, session_id

    def connect(self, timeout_s: float) -> InProcessConnection:
        """Returns a connection."""
        return InProcessConnection(self._verifier, self._session_id)

    def describe(self, timeout_s: float) -> ModelInfo:
        """Returns the engine's model and limits."""
        engine = self._verifier.engine
        return replace(engine.model, memory=engine.reported_memory)


class InProcessConnection:
    """Implements `Connection`. Messages are handed over as they are."""

    def __init__(self, verifier: InProcessVerifier, session_id: bytes) -> None:
        self.queued_s = 0.0
        self._verifier, self._session_id = verifier, session_id
        self._clock = verifier.engine.clock
        self._inbox: deque[tuple[SessionResponse, float]] = deque()
        self._is_woken = False
        self._is_open = True  # the session may be, at the engine

    def send(self, request: SessionRequest | Disconnect) -> None:
        """Hands a request to the next step."""
        arrival_ns = int(self._clock.now() * 1e9)
        self._verifier.engine.submit(Job(self._session_id, request, self._take, arrival_ns, call=self._inbox))

    def receive(self, timeout_s: float) -> SessionResponse | None:
        """Returns the next message, after as many steps of the engine as it takes."""
        end_s = self._clock.now() + timeout_s
        while not self._inbox:
            if self._is_woken or self._clock.now() >= end_s:
                self._is_woken = False
                return None
            if not self._verifier.step() and not self._inbox:
                self._clock.sleep(IDLE_S)
        message, arrived_s = self._inbox.popleft()
        self.queued_s = self._clock.now() - arrived_s
        return message

    def start_rtt_probe(self) -> None:
        """Does nothing: there is no network."""

    def take_rtt(self) -> float | None:
        """Returns None: nothing was measured."""
        return None

    def wake(self) -> None:
        """Ends a waiting `receive` with the step that runs."""
        self._is_woken = True

    def close(self) -> None:
        """Ends what the connection asked for; the session stays for another one."""
        if self._is_open:
            self.send(Disconnect())
            self._verifier.step()

    def _take(self, message: SessionResponse) -> None:
        self._is_open = self._is_open and not isinstance(message, Closed)
        self._inbox.append((message, self._clock.now()))
