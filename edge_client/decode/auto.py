"""`--mode auto`: rounds, pipelined rounds or the target's own stream, changed on the way.

All of them are requests of one session that name the position and hash they build on, so a change costs a
trip and leaves no trace in the text. While the target streams, the edge measures what rounds would be worth
beside it: every few tokens it drafts the next one and sees whether it comes (with `coupled` that is exactly
whether it would have stood), and now and then it times a trip.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from outrider.common.types import GeneratedTokens
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.speculative import SpeculativeLoop

_EVERY = SETTINGS.stream_sample_tokens
_TRIP_EVERY_S = SETTINGS.rtt_probe_interval_s


def run_auto(decoding: Decoding) -> Iterator[SessionEvent]:
    """Until the text ends."""
    choice = decoding.window.policy
    assert choice is not None, "auto chooses"
    decoding.window.choose(decoding.text.num_remaining)
    while not decoding.is_over:
        if decoding.is_to_stream and not decoding.is_owed:  # which only rounds do
            yield from stream_cloud_only(decoding, StreamWatch(decoding, choice))
        else:
            yield from SpeculativeLoop(decoding).run()


class StreamWatch:
    """Sees a stream pass and says when to leave it."""

    def __init__(self, decoding: Decoding, choice: ModePolicy) -> None:
        self.is_left = False
        self._decoding = decoding
        self._choice = choice
        self._num_tokens = 0
        self._looked_s = 0.0  # when the last look was
        self._trip_s = time.monotonic()
        self._shadow: int | None = None  # what the draft says comes next

    def see(self, tokens: GeneratedTokens) -> bool:
        """After each message; True once: to stop the stream."""
        if self.is_left or tokens.is_last or not tokens.token_ids:
            return False
        self._compare(tokens.token_ids[0])
        self._num_tokens += len(tokens.token_ids)
        if self._choice.should_probe_draft(self._num_tokens):
            self._draft()
        if self._num_tokens % _EVERY:
            return False
        now_s = time.monotonic()
        if self._looked_s:
            self._choice.observe_stream((now_s - self._looked_s) / _EVERY)
        self._looked_s = now_s
        self._take_trip(now_s)
        self._decoding.window.choose(self._decoding.text.num_remaining)
        self.is_left = not self._decoding.is_to_stream
        return self.is_left

    def abandon(self) -> bool:
        """After a fault: True where rounds take over, whose fallback is the user's `--on-timeout`."""
        if self._decoding.options.on_timeout not in (OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY):
            return False
        self._choice.leave_stream()
        self.is_left = True
        return True

    def _compare(self, token_id: int) -> None:
        if self._shadow is not None:
            self._choice.observe_probe(token_id == self._shadow, self._draft_s)
            self._shadow = None

    def _draft(self) -> None:
        draft, draft_ms = self._decoding.proposer.propose(1)
        if draft.token_ids:
            self._shadow, self._draft_s = draft.token_ids[0], draft_ms / 1e3

    def _take_trip(self, now_s: float) -> None:
        lifeline = self._decoding.remote.lifeline
        if (trip_s := lifeline.take_trip()) is not None:
            self._choice.observe_rtt(trip_s)
        if now_s - self._trip_s > _TRIP_EVERY_S:
            self._trip_s = now_s
            lifeline.start_trip()
