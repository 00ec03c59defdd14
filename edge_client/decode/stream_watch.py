"""Measuring, while the target streams, what rounds would be worth, and choosing when to leave the stream."""

from __future__ import annotations

from outrider.common.types import GeneratedTokens
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.generation_state import GenerationState

_READ_IN_A_ROUND = 2  # tokens that a round's draft reads at most: a last draft and a bonus


class StreamWatch:
    """Follows a stream for the mode policy."""

    def __init__(self, state: GenerationState, choice: ModePolicy) -> None:
        self.is_left = False
        self._state = state
        self._choice = choice
        self._num_tokens = 0
        self._looked_s = 0.0  # the time of the last look
        self._probed_s = state.clock.now()
        # The draft's next token, and the seconds it took where it read no more than in a round.
        self._shadow: tuple[int, float | None] | None = None
        self._num_unread = 0  # tokens since the draft was last asked

    def should_leave(self, tokens: GeneratedTokens) -> bool:
        """Measures a message; returns True once, when the stream should be stopped."""
        if self.is_left or tokens.is_last or not tokens.token_ids:
            return False
        self._compare(tokens.token_ids[0])
        self._num_tokens += len(tokens.token_ids)
        self._num_unread += len(tokens.token_ids)
        if self._choice.should_probe_draft(self._num_tokens):
            self._draft()
        if self._num_tokens % SETTINGS.stream_sample_tokens:
            return False
        now_s = self._state.clock.now()
        if self._looked_s:
            self._choice.observe_stream((now_s - self._looked_s) / SETTINGS.stream_sample_tokens)
        self._looked_s = now_s
        self._probe_rtt(now_s)
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

    def _compare(self, token_id: int) -> None:
        if self._shadow is not None:
            expected, draft_s = self._shadow
            self._choice.observe_probe(token_id == expected, draft_s)
            self._shadow = None

    def _draft(self) -> None:
        draft, draft_ms = self._state.proposer.propose(1)
        draft_s = draft_ms / 1e3 if self._num_unread <= _READ_IN_A_ROUND else None
        self._num_unread = 0
        if draft.token_ids:
            self._shadow = draft.token_ids[0], draft_s
        else:
            self._choice.observe_probe(is_accepted=False, draft_s=draft_s)

    def _probe_rtt(self, now_s: float) -> None:
        remote = self._state.remote
        if (rtt_s := remote.take_rtt()) is not None:
            self._choice.observe_rtt(rtt_s)
        if now_s - self._probed_s > SETTINGS.rtt_probe_interval_s:
            self._probed_s = now_s
            remote.start_rtt_probe()
