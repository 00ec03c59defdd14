"""`--mode auto`: rounds, pipelined rounds or the target's own stream, changed while it generates.

All of them are requests of one session that name the position and hash they build on, so a change costs a
round trip and does not alter the tokens. While the target streams, the edge measures what rounds would be
worth: every few tokens it drafts the next one and compares (with `coupled` that is exactly whether the token
would have been accepted), and now and then it measures the round trip.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.speculative import SpeculativeLoop
from outrider.edge_client.decode.stream_watch import StreamWatch


def run_auto(state: GenerationState) -> Iterator[SessionEvent]:
    """Runs rounds or the stream, as the mode policy chooses, until the sequence ends."""
    choice = state.window.policy  # None where only rounds are left to choose
    state.window.choose(state.tokens.num_remaining)
    while not state.is_over:
        state.note_mode()
        if choice is not None and state.is_to_stream and not state.has_pending_reverification:
            yield from stream_cloud_only(state, StreamWatch(state, choice))  # only rounds reverify
        else:
            yield from SpeculativeLoop(state).run()
