"""One session on one stream, replayed round by round; every verdict is compared with the recorded one.

After its last round a session goes back to its first: a round may build on any earlier position of its text,
so a replay never needs a new prompt. Messages are encoded once; a round costs a new id and its serialisation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.common import codec
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import CloseRequest, SessionRequest
from outrider.edge_client.session.session import new_session_id
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Refusal, RoundSample, Tally
from outrider.experiments.load.wire import StreamLost, WireConnection

METHOD = "/outrider.v1.Verifier/Session"
Expected = tuple[int, int, int, int]  # accepted_len, correction, position and hash of a verdict
MAX_ATTEMPTS = 200
MIN_RETRY_S = 0.005


class SessionCall:
    """Carries one session's messages on a stream of its own."""

    def __init__(self, connection: WireConnection, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.session_id = new_session_id()
        headers = [("x-session-id", self.session_id.hex()), *metadata]
        self._call = connection.open_stream(METHOD, headers)

    def send(self, request: SessionRequest) -> None:
        """Sends a request. Raises `StreamLost`."""
        self._call.write(codec.encode_request(request).SerializeToString())

    def write(self, message: bytes) -> None:
        """Sends an encoded request. Raises `StreamLost`."""
        self._call.write(message)

    async def hear(self) -> pb.SessionResponse:
        """Awaits the next response. Raises `StreamLost`."""
        reply: pb.SessionResponse = pb.SessionResponse.FromString(await self._call.read())
        return reply

    async def close(self) -> None:
        """Ends session and stream. Never raises: a lost stream is closed."""
        try:
            self.send(CloseRequest())
            self._call.done_writing()
            while True:
                await self._call.read()
        except StreamLost:
            pass

    def cancel(self) -> None:
        """Drops the stream without a word, as a client that dies does."""
        self._call.cancel()


class ReplayStream(SessionCall):
    """Replays a session: `open`, then `round` again and again, then `close`. One task at a time."""

    def __init__(
        self,
        connection: WireConnection,
        recorded: RecordedSession,
        tally: Tally,
        *,
        deadline_ms: int = 0,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(connection, metadata)
        self.recorded = recorded
        self._tally = tally
        self._number = tally.next_session()
        self._index = 0
        self._round_id = 1
        self._rounds = [
            (
                codec.encode_request(replace(request, deadline_ms=deadline_ms)),
                (each.accepted_len, each.correction, position, hash_),
            )
            for each, (request, position, hash_) in zip(recorded.rounds, recorded.requests(), strict=True)
        ]

    async def open(self) -> float:
        """Returns the seconds until the first token; a refused opening is waited for. Raises `StreamLost`."""
        message = codec.encode_request(self.recorded.opening(self.session_id)).SerializeToString()
        for _ in range(MAX_ATTEMPTS):
            start_s = time.perf_counter()
            self.write(message)
            reply = await self.hear()
            while reply.open.WhichOneof("body") == "progress":
                reply = await self.hear()
            if reply.open.WhichOneof("body") == "opened":
                if reply.open.opened.first_token != self.recorded.first_token:
                    self._tally.note_mismatch(
                        f"first token {reply.open.opened.first_token}, recorded {self.recorded.first_token}"
                    )
                wait_s = time.perf_counter() - start_s
                self._observe_opening(reply.open.opened, wait_s)
                return wait_s
            error = reply.open.error
            if error.code != pb.ROUND_ERROR_CODE_REFUSED:
                raise StreamLost(f"the opening was answered by: {reply}")
            await asyncio.sleep(max(MIN_RETRY_S, error.retry_after_ms / 1e3))
        raise StreamLost(f"the opening was refused {MAX_ATTEMPTS} times")

    async def round(self) -> bool:
        """Sends one round; False when it was refused (the same one comes next). Raises `StreamLost`."""
        message, expected = self._next_round()
        self._round_id += 1
        message.verify.round_id = self._round_id
        start_s = time.perf_counter()
        self.write(message.SerializeToString())
        while True:
            reply = (await self.hear()).verify
            kind = reply.WhichOneof("body")
            if kind == "verdict" and reply.verdict.round_id == self._round_id:
                self._take(reply.verdict, expected, len(message.verify.draft_tokens), start_s)
                return True
            if kind == "error":
                return self._take_error(reply.error, start_s)
            if kind != "progress":
                raise StreamLost(f"round {self._round_id} was answered by: {reply}")

    async def round_at_last(self) -> None:
        """Sends one round, again after the time the verifier gave where it is refused, at most
        `MAX_ATTEMPTS` times."""
        for _ in range(MAX_ATTEMPTS):
            if await self.round():
                return
            await self._wait_after_refusal()
        raise StreamLost(f"a round was refused {MAX_ATTEMPTS} times")

    async def _wait_after_refusal(self) -> None:
        """Waits for the time that the verifier gave with the last refusal."""
        await asyncio.sleep(max(MIN_RETRY_S, self._tally.refusals[-1].retry_after_ms / 1e3))

    def _take(self, verdict: pb.Verdict, expected: Expected, num_drafted: int, start_s: float) -> None:
        end_s, metrics = time.perf_counter(), verdict.metrics
        self._tally.rounds.append(
            RoundSample(
                end_s,
                end_s - start_s,
                metrics.forward_ns,
                metrics.queue_ns,
                metrics.total_ns,
                metrics.batch_size,
                self._number,
                verdict.accepted_len + 1,
                num_drafted,
            )
        )
        found = (verdict.accepted_len, verdict.correction, verdict.position, verdict.hash)
        if found == expected:
            self._advance(verdict, end_s - start_s)
            return
        self._tally.note_mismatch(
            f"seed {self.recorded.sampling.seed}, round {self._index}: accepted_len, correction, position, "
            f"hash are {found}, recorded {expected}"
        )
        self._restart()

    def _next_round(self) -> tuple[pb.SessionRequest, Expected]:
        """Returns the round to send, until `_advance` or `_restart`, and what its verdict must be."""
        return self._rounds[self._index]

    def _advance(self, verdict: pb.Verdict, wait_s: float) -> None:
        self._index = (self._index + 1) % len(self._rounds)

    def _restart(self) -> None:
        self._index = 0

    def _observe_opening(self, opened: pb.Opened, wait_s: float) -> None:
        """Adds what an opening tells to whoever plans rounds."""

    def _take_error(self, error: pb.RoundError, start_s: float) -> bool:
        end_s = time.perf_counter()
        if error.code == pb.ROUND_ERROR_CODE_REFUSED:
            self._tally.refusals.append(Refusal(end_s, end_s - start_s, error.retry_after_ms))
            return False
        name = pb.RoundErrorCode.Name(error.code).removeprefix("ROUND_ERROR_CODE_").lower()
        self._tally.errors[name] += 1
        raise StreamLost(f"{name}: {error.message}")
