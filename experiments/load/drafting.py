"""A session of the load generator that drafts as an edge does: a depth policy chooses each round's length, a recorded
trace says what the draft proposes there, and drafting takes its time without using a processor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.common import codec
from outrider.common.alignment import TokenChain
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import VerifyRequest
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.core.stats import RoundRecord
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Tally
from outrider.experiments.load.stream import Expected, ReplayStream
from outrider.experiments.load.wire import WireConnection
from outrider.experiments.simulator.parts.drafts import TracedSequence
from outrider.experiments.simulator.parts.times import DraftTimes


class DraftingStream(ReplayStream):
    """Replays a text that was recorded as a trace. Each pass through it begins with a new policy, as a generation
    does."""

    def __init__(
        self,
        connection: WireConnection,
        recorded: RecordedSession,
        tally: Tally,
        make_policy: Callable[[], DepthPolicy],
        draft_token_s: float,
        *,
        deadline_ms: int = 0,
    ) -> None:
        super().__init__(connection, recorded, tally)
        assert recorded.trace is not None, "the session was recorded as rounds"
        self._text, self._num_positions = recorded.trace.text, len(recorded.trace.runs)
        self._known = recorded.trace.known_text(recorded.prompt_ids)
        self._make_policy, self._deadline_ms = make_policy, deadline_ms
        self._times = DraftTimes(token_ms=draft_token_s * 1e3)
        self._round: tuple[pb.SessionRequest, Expected] | None = None
        self._restart()

    def _restart(self) -> None:
        num_prompt_tokens = len(self.recorded.prompt_ids)
        self._index = 0  # positions of the text so far
        self._policy = self._make_policy()
        self._chain = TokenChain((*self.recorded.prompt_ids, self._text[0]))
        self._sequence = TracedSequence(
            self._times, self._spend, self._known.trace, num_prompt_tokens, 0, self._known
        )
        self._sequence.commit(self._chain.token_ids)
        self._round = None

    def _spend(self, seconds: float) -> None:
        self._draft_s += seconds

    async def round_at_last(self) -> None:
        """Drafts, and sends the round until it is not refused."""
        self._draft()
        await asyncio.sleep(self._draft_s)
        await super().round_at_last()

    def _draft(self) -> None:
        self._draft_s = 0.0
        draft = self._sequence.propose(self._policy.next_depth(), self._policy.stop_rule())
        self._drafted = draft
        start, num_drafted = self._index + 1, len(draft.token_ids)
        num_right = min(self._known.trace.runs[self._index], num_drafted)
        self._new = self._text[start : start + num_right + 1]
        request = VerifyRequest(
            0,  # each sending has its own
            self._chain.position,
            self._chain.hash,
            draft_tokens=draft.token_ids,
            q_token_probs=draft.draft_probs,
            deadline_ms=self._deadline_ms,
        )
        position, hash_ = self._chain.position + len(self._new), self._chain.hash_with(self._new)
        self._round = codec.encode_request(request), (num_right, self._new[-1], position, hash_)

    def _next_round(self) -> tuple[pb.SessionRequest, Expected]:
        assert self._round is not None, "nothing was drafted"
        return self._round

    def _advance(self, verdict: pb.Verdict, wait_s: float) -> None:
        metrics = verdict.metrics
        self._policy.observe(
            RoundRecord(
                round_id=verdict.round_id,
                num_draft_tokens=len(self._drafted.token_ids),
                num_accepted_tokens=verdict.accepted_len,
                draft_ms=self._draft_s * 1e3,
                rtt_ms=wait_s * 1e3,
                net_ms=wait_s * 1e3 - metrics.total_ns / 1e6,
                queue_ms=metrics.queue_ns / 1e6,
                forward_ms=metrics.forward_ns / 1e6,
                verifier_ms=metrics.total_ns / 1e6,
                batch_size=metrics.batch_size,
                step_token_ms=metrics.step_token_ns / 1e6,
                confidences=self._drafted.confidences,
            )
        )
        self._index += len(self._new)
        self._chain.extend(self._new)
        self._sequence.commit(self._new)
        if self._index >= self._num_positions:
            self._restart()
