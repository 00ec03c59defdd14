"""A session of the load generator that drafts as an edge does: the edge's own policies choose each round's length and,
with `--mode auto`, when the target's stream is faster; a recorded trace says what the draft proposes, and drafting
takes its time without using a processor."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple

from outrider.common import codec
from outrider.common.alignment import TokenChain
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    GeneratedTokens,
    GenerateRequest,
    Progress,
    VerifyRequest,
)
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior, PriorKey
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.depth.registry import create_depth_policy
from outrider.edge_client.controller.round_costs import StepTimes
from outrider.edge_client.controller.stream_measurement import StreamMeasurement
from outrider.edge_client.controller.window import create_window
from outrider.edge_client.core.options import Pipelining
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.recorder import Recorder
from outrider.experiments.load.cloud import generated_sample
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Tally
from outrider.experiments.load.stream import Expected, ReplayStream
from outrider.experiments.load.wire import StreamLost, WireConnection
from outrider.experiments.simulator.parts.drafts import TracedSequence
from outrider.experiments.simulator.parts.times import DraftTimes


@dataclass(frozen=True, slots=True)
class Drafting:
    """Says how sessions draft."""

    depth_policy: str
    num_speculative_tokens: int | None = None  # where the policy starts
    token_s: float = 0.0  # of each drafted token
    may_stream: bool = False  # the mode is `auto`


class _Opening(NamedTuple):
    """Holds what an opening shows of link and verifier, in seconds."""

    rtt_s: float
    forward_s: float
    stated: StepTimes


class DraftingStream(ReplayStream):
    """Replays a text that was recorded as a trace. Each pass through it begins with new policies, which know what those
    of the passes before found, as an edge's next generation does. Its opening is taken to show what the first one
    did, but for the round trip and the active sessions that were found since: the session is opened once."""

    def __init__(
        self,
        connection: WireConnection,
        recorded: RecordedSession,
        tally: Tally,
        drafting: Drafting,
        *,
        deadline_ms: int = 0,
    ) -> None:
        super().__init__(connection, recorded, tally)
        assert recorded.trace is not None, "the session was recorded as rounds"
        self._text, self._num_positions = recorded.trace.text, len(recorded.trace.runs)
        self._known = recorded.trace.known_text(recorded.prompt_ids)
        self._drafting, self._deadline_ms = drafting, deadline_ms
        self._times = DraftTimes(token_ms=drafting.token_s * 1e3)
        self._prior, self._key = AcceptancePrior(), PriorKey.at("", recorded.sampling.temperature)
        self._round: tuple[pb.SessionRequest, Expected] | None = None
        self._opening: _Opening | None = None
        self._begin()

    # ------------------------------------------------------------------------------- a pass of the text

    def _begin(self) -> None:
        num_prompt_tokens, drafting = len(self.recorded.prompt_ids), self._drafting
        self._index = 0  # positions of the text so far
        self._chain = TokenChain((*self.recorded.prompt_ids, self._text[0]))
        self._sequence = TracedSequence(
            self._times, self._spend, self._known.trace, num_prompt_tokens, 0, self._known
        )
        self._sequence.commit(self._chain.token_ids)
        self._conditions = Conditions()
        self._prior.start_times(self._conditions)
        self._prior.start_acceptance(self._key, self._conditions)
        start = drafting.num_speculative_tokens
        self._depth = create_depth_policy(drafting.depth_policy, start, self._conditions)
        self._window = create_window(
            Pipelining.OFF,
            None,
            drafting.depth_policy,
            num_speculative_tokens=start,
            has_stream_too=drafting.may_stream,
            conditions=self._conditions,
        )
        self._recorder = Recorder(self._depth, self._window, self._conditions)
        if (opening := self._opening) is not None:
            found = self._prior.costs
            rtt_s = opening.rtt_s if found.rtt_s is None else found.rtt_s
            self._begin_with(opening._replace(rtt_s=rtt_s), round(found.num_sharing))
        self._round = None

    def _restart(self) -> None:
        self._recorder.observe()
        self._prior.learn_from(self._key, self._conditions)
        self._begin()

    @property
    def _num_left(self) -> int:
        return self._num_positions - self._index

    def _observe_opening(self, opened: pb.Opened, wait_s: float) -> None:
        metrics = opened.metrics
        self._opening = _Opening(
            max(0.0, wait_s - metrics.total_ns / 1e9),
            metrics.forward_ns / 1e9,
            StepTimes.from_ns(
                opened.step_fixed_ns, opened.step_token_ns, opened.step_session_ns, opened.stream_gap_ns
            ),
        )
        self._begin_with(self._opening, metrics.num_active_sessions)

    def _begin_with(self, opening: _Opening, num_active: int) -> None:
        self._conditions.observe_opening(
            opening.rtt_s, opening.forward_s, self._drafting.token_s, opening.stated, num_active
        )
        self._window.choose(self._num_left)

    def _write(self, token_ids: tuple[int, ...]) -> None:
        self._index += len(token_ids)
        self._chain.extend(token_ids)
        self._sequence.commit(token_ids)

    def _spend(self, seconds: float) -> None:
        self._draft_s += seconds

    async def round_at_last(self) -> None:
        """Drafts, and sends the round until it is not refused; or has the target write, as long as that is faster."""
        if self._window.is_to_stream:
            await self._stream()
            return
        self._draft()
        await asyncio.sleep(self._draft_s)
        await super().round_at_last()

    # ------------------------------------------------------------------------------------------- rounds

    def _draft(self) -> None:
        self._draft_s = 0.0
        draft = self._sequence.propose(self._depth.next_depth(), self._depth.stop_rule())
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
        self._recorder.record(
            RoundRecord(
                round_id=verdict.round_id,
                num_draft_tokens=len(self._drafted.token_ids),
                num_accepted_tokens=verdict.accepted_len,
                draft_ms=self._draft_s * 1e3,
                since_ms=(self._draft_s + wait_s) * 1e3,
                edge_ms=0.0,  # an edge of its own spends less than the many here, which take turns
                rtt_ms=wait_s * 1e3,
                net_ms=wait_s * 1e3 - metrics.total_ns / 1e6,
                queue_ms=metrics.queue_ns / 1e6,
                forward_ms=metrics.forward_ns / 1e6,
                verifier_ms=metrics.total_ns / 1e6,
                batch_size=metrics.batch_size,
                num_active_sessions=metrics.num_active_sessions,
                step_token_ms=metrics.step_token_ns / 1e6,
                confidences=self._drafted.confidences,
            )
        )
        self._write(self._new)
        if self._index >= self._num_positions:
            self._restart()
            return
        if self._recorder.is_plan_due:
            self._recorder.observe()
        if not self._recorder.has_unobserved:
            self._window.choose(self._num_left)

    # -------------------------------------------------------------------------------------- the stream

    async def _stream(self) -> None:
        """Has the target write until the text ends, the policy leaves the stream, or the verifier refuses it. Raises
        `StreamLost`."""
        self._round_id += 1
        self.send(GenerateRequest(self._round_id, self._chain.position, self._chain.hash, self._num_left))
        policy = self._window.policy
        assert policy is not None
        measurement, is_left, since_s = StreamMeasurement(policy), False, time.perf_counter()
        is_last = False
        while not is_last:
            message = await self.hear()
            now_s = time.perf_counter()
            if message.generate.WhichOneof("body") == "error":
                self._take_error(message.generate.error, since_s)
                await self._wait_after_refusal()
                return
            reply = codec.decode_response(message)
            if isinstance(reply, Progress):
                continue
            if not isinstance(reply, GeneratedTokens):
                raise StreamLost(f"the stream was answered by {reply}")
            is_last = reply.is_last
            if not reply.token_ids:
                continue
            self._tally.rounds.append(generated_sample(reply, now_s, since_s, self._number))
            since_s = now_s
            start = self._index + 1
            expected = self._text[start : start + len(reply.token_ids)]
            self._write(expected)
            if reply.token_ids != expected:
                self._tally.note_mismatch(f"token {start}: {reply.token_ids}, recorded {expected}")
            if is_left or not self._num_left:
                continue
            if measurement.observe(reply, time.perf_counter, self._probe):
                self._window.choose(self._num_left)
                if is_left := not self._window.is_to_stream:
                    self.send(CancelRequest(self._round_id))
        if self._index >= self._num_positions:
            self._restart()

    def _probe(self) -> tuple[int | None, float]:
        """Returns what the draft would propose, which it does beside the stream."""
        right = self._text[self._index + 1]
        is_right = self._known.trace.runs[self._index] > 0
        return right if is_right else None, self._drafting.token_s
