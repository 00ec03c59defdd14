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
    """Decodes one session cloud-only. `token_ids` and `times_s` grow as tokens arrive."""

    def __init__(
        self, connection: WireConnection, prompt_ids: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> None:
        super().__init__(connection)
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
        self.send(GenerateRequest(self._round_id, position, hash, num_new))

    async def run(self, num_new: int) -> list[int]:
        """Opens, decodes `num_new` tokens, closes; returns them. A refusal is waited for.

        Raises `StreamLost` for any other answer.
        """
        opened = (await self.open()).opened
        if num_new > 1:
            self.ask_to_generate(num_new - 1, opened.position, opened.hash)
        while len(self.token_ids) < num_new:
            reply = await self._reply()
            if isinstance(reply, GeneratedTokens):
                self._take(reply.token_ids)
            elif isinstance(reply, RoundError) and reply.code is RoundErrorCode.REFUSED:
                await asyncio.sleep(max(MIN_RETRY_S, reply.retry_after_ms / 1e3))
                self.ask_to_generate(num_new - len(self.token_ids), reply.position, reply.hash)
            elif not isinstance(reply, Progress):
                raise StreamLost(f"the generation was answered by {reply}")
        await self.close()
        return self.token_ids

    async def _reply(self) -> SessionResponse:
        return codec.decode_response(await self.hear())

    def _take(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.times_s += [time.perf_counter()] * len(token_ids)


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
