"""Openings and cloud-only streams of the load generator: time to first token, and whole texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common import codec
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
)
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import RoundSample, Tally
from outrider.experiments.load.stream import MIN_RETRY_S, SessionCall
from outrider.experiments.load.wire import StreamLost, WireConnection

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Opening:
    """Describes how an opening went."""

    opened: Opened
    ttft_s: float
    num_chunks: int  # forwards that fed the prompt
    begin_s: float
    end_s: float


class CloudStream(SessionCall):
    """Decodes one session in the verifier. `token_ids` and `times_s` grow as tokens arrive."""

    def __init__(
        self,
        connection: WireConnection,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        num_drafted: int = 0,
    ) -> None:
        """With `num_drafted` the verifier's own draft proposes so many tokens a round (co-located)."""
        super().__init__(connection)
        self._num_drafted = num_drafted
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self._prompt_ids, self._sampling = tuple(prompt_ids), sampling
        self._round_id = 1

    async def open(self) -> Opening:
        """Opens the session. Raises `StreamLost` for any other answer."""
        prompt = self._prompt_ids
        begin_s = time.perf_counter()
        self.send(
            OpenRequest(self.session_id, prompt, len(prompt), self._sampling, ignore_eos=True, round_id=1)
        )
        num_chunks = 1
        while isinstance(reply := await self._reply(), Progress):
            num_chunks += reply.done > 0
        end_s = time.perf_counter()
        if not isinstance(reply, Opened):
            raise StreamLost(f"the opening was answered by {reply}")
        self._take((reply.first_token,))
        return Opening(reply, end_s - begin_s, num_chunks, begin_s, end_s)

    def ask_to_generate(self, num_new: int, position: int, hash: int) -> None:
        """Asks for `num_new` tokens after `position`."""
        self._round_id += 1
        is_co_located = self._num_drafted > 0
        self.send(
            GenerateRequest(
                self._round_id,
                position,
                hash,
                num_new,
                is_co_located=is_co_located,
                num_speculative_tokens=self._num_drafted,
            )
        )

    async def run(self, num_new: int) -> list[int]:
        """Opens, decodes `num_new` tokens, closes; returns them. A refusal is waited for.

        Raises `StreamLost` for any other answer.
        """
        opened = (await self.open()).opened
        await self._generate(num_new, opened)
        await self.close()
        return self.token_ids

    async def _generate(self, num_new: int, opened: Opened) -> None:
        """Decodes what is missing of `num_new` tokens after an opening."""
        if num_new > 1:
            self.ask_to_generate(num_new - 1, opened.position, opened.hash)
        while len(self.token_ids) < num_new:
            reply = await self._reply()
            if isinstance(reply, GeneratedTokens):
                self._take_message(reply)
            elif isinstance(reply, RoundError) and reply.code is RoundErrorCode.REFUSED:
                await asyncio.sleep(max(MIN_RETRY_S, reply.retry_after_ms / 1e3))
                self.ask_to_generate(num_new - len(self.token_ids), reply.position, reply.hash)
            elif not isinstance(reply, Progress):
                raise StreamLost(f"the generation was answered by {reply}")

    async def _reply(self) -> SessionResponse:
        return codec.decode_response(await self.hear())

    def _take_message(self, message: GeneratedTokens) -> None:
        self._take(message.token_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.times_s += [time.perf_counter()] * len(token_ids)


class ReplayedText(CloudStream):
    """Has the verifier write a recorded text again and again: `open`, then `text` as often as wanted, then `close`.
    Every token is compared with the recorded one."""

    def __init__(
        self, connection: WireConnection, recorded: RecordedSession, tally: Tally, num_drafted: int = 0
    ) -> None:
        super().__init__(connection, recorded.prompt_ids, recorded.sampling, num_drafted)
        self._recorded, self._tally, self._number = recorded, tally, tally.next_session()
        self._opened: Opened | None = None

    async def open(self) -> Opening:
        """See `CloudStream.open`."""
        opening = await super().open()
        self._opened = opening.opened
        return opening

    async def text(self) -> None:
        """Writes the text once, from its first token on. Raises `StreamLost`."""
        assert self._opened is not None, "it was not opened"
        del self.token_ids[1:], self.times_s[1:]
        self.times_s[0] = time.perf_counter()
        await self._generate(len(self._recorded.output_ids), self._opened)

    def _take_message(self, message: GeneratedTokens) -> None:
        start, since_s = len(self.token_ids), self.times_s[-1]
        self._take(message.token_ids)
        expected = self._recorded.output_ids[start : len(self.token_ids)]
        if tuple(message.token_ids) != expected:
            seed = self._recorded.sampling.seed
            self._tally.note_mismatch(f"seed {seed}, token {start}: {message.token_ids}, recorded {expected}")
        if message.token_ids:
            self._tally.rounds.append(generated_sample(message, self.times_s[-1], since_s, self._number))


def generated_sample(message: GeneratedTokens, now_s: float, since_s: float, session: int) -> RoundSample:
    """Returns the sample of a message that came at `now_s`, after the one of `since_s`."""
    metrics = message.metrics
    return RoundSample(
        now_s,
        now_s - since_s,
        metrics.forward_ns,
        metrics.queue_ns,
        metrics.total_ns,
        metrics.batch_size,
        session,
        len(message.token_ids),
        message.num_draft_tokens,
    )


async def open_and_close(connection: WireConnection, prompt_ids: Sequence[int]) -> Opening:
    """Opens a session and closes it."""
    stream = CloudStream(connection, prompt_ids)
    opening = await stream.open()
    await stream.close()
    return opening


async def decode_all(streams: Sequence[CloudStream], num_new: int) -> float:
    """Decodes all streams at once; returns the seconds from the first request to the last token."""
    begin_s = time.perf_counter()
    await asyncio.gather(*(stream.run(num_new) for stream in streams))
    return max(stream.times_s[-1] for stream in streams) - begin_s
