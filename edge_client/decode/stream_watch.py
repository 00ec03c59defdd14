"""Following the target's stream for the mode policy, and choosing when to leave it."""

from __future__ import annotations

from outrider.common.types import GeneratedTokens
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.stream_measurement import StreamMeasurement
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.generation_state import GenerationState


class StreamWatch:
    """Follows a stream for the mode policy."""

    def __init__(self, state: GenerationState, choice: ModePolicy) -> None:
        self.is_left = False
        self._state = state
        self._choice = choice
        self._measurement = StreamMeasurement(choice)
        self._probed_s = state.clock.now()

    def should_leave(self, tokens: GeneratedTokens) -> bool:
        """Measures a message; returns True once, when the stream should be stopped."""
        if self.is_left or tokens.is_last or not tokens.token_ids:
            return False
        if not self._measurement.observe(tokens, self._state.clock.now, self._draft_next):
            return False
        self._probe_rtt(self._state.clock.now())
        self._state.window.choose(self._state.tokens.num_remaining)
        self.is_left = not self._state.is_to_stream
        return self.is_left

    def may_abandon(self) -> bool:
        """Returns True after a fault where rounds continue, whose fallback is the user's `--on-timeout`."""
        if self._state.options.on_timeout not in (OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY):
            return False
        self._choice.leave_stream()
        self.is_left = True
        return True

    def _draft_next(self) -> tuple[int | None, float]:
        draft, draft_ms = self._state.proposer.propose(1)
        return draft.token_ids[0] if draft.token_ids else None, draft_ms / 1e3

    def _probe_rtt(self, now_s: float) -> None:
        remote = self._state.remote
        if (rtt_s := remote.take_rtt()) is not None:
            self._choice.observe_rtt(rtt_s)
        if now_s - self._probed_s > SETTINGS.rtt_probe_interval_s:
            self._probed_s = now_s
            remote.start_rtt_probe()
