"""What a stream of the target tells a mode policy: the times of its tokens, and what the draft would have proposed."""

from __future__ import annotations

from collections.abc import Callable

from outrider.common.types import GeneratedTokens
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.settings import SETTINGS

DraftNext = Callable[[], tuple[int | None, float]]
"""Drafts the token after those that came: its id, None where there is none, and the seconds that drafting it took."""

_READ_IN_A_ROUND = 2  # tokens that a round's draft reads at most: a last draft and a bonus


class StreamMeasurement:
    """Measures one stream for its policy."""

    def __init__(self, policy: ModePolicy) -> None:
        self._policy = policy
        self._num_tokens = 0
        self._sampled_s = 0.0  # when the last time between tokens was taken
        # The draft's next token, and the seconds it took where it read no more than in a round.
        self._probe: tuple[int, float | None] | None = None
        self._num_unread = 0  # tokens since the draft was last asked

    def observe(self, message: GeneratedTokens, now: Callable[[], float], draft_next: DraftNext) -> bool:
        """Adds a message with tokens, which the text has by now; returns whether the time was taken (`now`, in
        seconds), after which the policy may decide."""
        token_ids = message.token_ids
        if self._probe is not None:
            expected, draft_s = self._probe
            self._policy.observe_probe(token_ids[0] == expected, draft_s)
            self._probe = None
        self._num_tokens += len(token_ids)
        self._num_unread += len(token_ids)
        if self._policy.should_probe_draft(self._num_tokens):
            self._ask(draft_next)
        if self._num_tokens % SETTINGS.stream_sample_tokens:
            return False
        now_s = now()
        if self._sampled_s:
            token_s = (now_s - self._sampled_s) / SETTINGS.stream_sample_tokens
            self._policy.observe_stream(token_s, message.metrics.num_active_sessions)
        self._sampled_s = now_s
        return True

    def _ask(self, draft_next: DraftNext) -> None:
        token_id, seconds = draft_next()
        draft_s = seconds if self._num_unread <= _READ_IN_A_ROUND else None
        self._num_unread = 0
        if token_id is None:
            self._policy.observe_probe(is_accepted=False, draft_s=draft_s)
        else:
            self._probe = token_id, draft_s
