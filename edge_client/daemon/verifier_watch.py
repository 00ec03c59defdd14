"""Checks on request whether the verifier answers, and keeps its description and answer time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from outrider.common.errors import OutriderError
from outrider.common.types import ModelInfo
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.session.factory import create_link
from outrider.edge_client.session.session import new_session_id

TIMEOUT_S = 2.0
FRESH_S = 2.0  # so many callers as may ask, the verifier is asked once in this time


@dataclass(frozen=True, slots=True)
class VerifierState:
    """Holds one check's result. `answer_ms` covers connecting and one call; `model` is the last description,
    kept while the verifier is unreachable."""

    is_reachable: bool
    checked_s: float
    model: ModelInfo | None = None
    answer_ms: float | None = None
    trouble: str = ""


class VerifierWatch:
    """Calls the verifier at most once in `FRESH_S`, however many ask."""

    def __init__(self) -> None:
        self.state: VerifierState | None = None
        self._lock = asyncio.Lock()

    async def check(self, config: RunConfig) -> VerifierState:
        """Returns the state, from a new call where the last one is too old."""
        async with self._lock:
            state = self.state
            if state is None or time.monotonic() - state.checked_s > FRESH_S:
                state = self.state = await asyncio.to_thread(_ask, config, state.model if state else None)
            return state

    def forget(self) -> None:
        """Drops the state, since the configuration may name another verifier now."""
        self.state = None


def _ask(config: RunConfig, known: ModelInfo | None) -> VerifierState:
    start_s = time.monotonic()
    try:
        model = create_link(config, new_session_id()).describe(TIMEOUT_S)
    except OutriderError as error:
        return VerifierState(False, time.monotonic(), known, trouble=str(error))
    end_s = time.monotonic()
    return VerifierState(True, end_s, model, (end_s - start_s) * 1e3)
