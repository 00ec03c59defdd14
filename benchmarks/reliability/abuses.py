"""Clients that harm others where a verifier lets them: one function each, for the runner and for tests.

Every abuse gets a channel of its own, the metadata of its tenant and an event that ends it. It opens its own
sessions, goes on after refusals and errors, and never raises for what the verifier answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc

SERVICE = "/outrider.v1.Verifier"
Metadata = tuple[tuple[str, str], ...]
ONE_MIB = 1 << 20
_ID_OF_A = 65  # the embedded pair's token of "a"
_PAUSE_S = 0.002  # between two attempts of a client that was refused
_NUM_LONG_TEXTS = 8  # of each task of `long_texts`


@dataclass(slots=True)
class Abuser:
    """Holds the connection of one abusive tenant, and how large its requests may get before they are invalid."""

    channel: grpc.aio.Channel
    metadata: Metadata
    until: asyncio.Event
    num_sessions: int = 8
    num_tokens: int = 8192  # ids below this exist
    max_context: int = 4096

    async def everywhere(self, one: Callable[[], Awaitable[None]]) -> None:
        """Runs `one` again and again in each of `num_sessions` tasks until told to stop."""

        async def again() -> None:
            while not self.until.is_set():
                with contextlib.suppress(grpc.aio.AioRpcError, _RefusedError, asyncio.InvalidStateError):
                    await one()
                await asyncio.sleep(_PAUSE_S)

        tasks = [asyncio.create_task(again()) for _ in range(self.num_sessions)]
        await self.until.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _RefusedError(Exception):
    """The verifier answered with an error."""


class _Session:
    """Carries one session on a stream."""

    def __init__(self, abuser: Abuser) -> None:
        self.abuser = abuser
        self.session_id = os.urandom(16)
        self._round_ids = itertools.count(1)
        self.position, self.hash = 0, 0
        self._call = outrider_pb2_grpc.VerifierStub(abuser.channel).Session(
            metadata=(("x-session-id", self.session_id.hex()), *abuser.metadata)
        )

    async def open(self, token_ids: list[int] | None = None, **fields: Any) -> None:
        """Opens the session. Raises `_RefusedError` where it is refused."""
        ids = token_ids or [5, 6, 7]
        body: dict[str, Any] = {
            "num_prompt_tokens": len(ids),
            "sampling": pb.SamplingParams(seed=7, temperature=0.8),
        } | fields
        message = pb.OpenRequest(session_id=self.session_id, token_ids=ids, ignore_eos=True, **body)
        await self.write(open=message)
        opened = (await self._final("open")).opened
        self.position, self.hash = opened.position, opened.hash

    async def round(self, num_draft_tokens: int = 4, **fields: Any) -> None:
        """Sends a round of random drafts and takes its verdict."""
        await self.write(verify=self.request(num_draft_tokens, **fields))
        verdict = (await self._final("verify")).verdict
        self.position, self.hash = verdict.position, verdict.hash

    def request(self, num_draft_tokens: int = 4, **fields: Any) -> pb.VerifyRequest:
        """Returns a round that builds on what the session has."""
        drafts = [random.randrange(self.abuser.num_tokens) for _ in range(num_draft_tokens)]
        base: dict[str, Any] = {
            "base_position": self.position,
            "base_hash": self.hash,
            "draft_tokens": drafts,
        }
        return pb.VerifyRequest(round_id=next(self._round_ids), **(base | fields))

    async def rounds(self, **fields: Any) -> None:
        """Sends rounds until told to stop, or the context is full."""
        room = self.abuser.max_context - 80
        while not self.abuser.until.is_set() and self.position < room:
            await self.round(**fields)

    async def write(self, **body: Any) -> None:
        await self._call.write(pb.SessionRequest(**body))

    async def _final(self, kind: str) -> Any:
        while True:
            reply = await self._call.read()
            if reply is grpc.aio.EOF:
                raise _RefusedError("the stream ended")
            if reply.WhichOneof("body") != kind:
                continue
            body = getattr(reply, kind)
            if body.WhichOneof("body") == "error":
                await asyncio.sleep(body.error.retry_after_ms / 1000.0)
                raise _RefusedError(body.error.message)
            if body.WhichOneof("body") != "progress":
                return body

    async def read_all(self) -> None:
        """Reads answers, whatever they say, until the stream ends."""
        while await self._call.read() is not grpc.aio.EOF:
            pass

    async def close(self) -> None:
        """Closes the session and ends the stream."""
        await self.write(close=pb.CloseRequest())
        await self._call.done_writing()
        self._call.cancel()


def _ids(abuser: Abuser, num_ids: int) -> list[int]:
    return [random.randrange(1, abuser.num_tokens) for _ in range(num_ids)]


async def _sampled_rounds(
    abuser: Abuser,
    sampling: pb.SamplingParams,
    num_draft_tokens: int = 4,
    draft_tokens: Sequence[int] = (),
    **fields: Any,
) -> None:
    """Sends rounds of random drafts, or of `draft_tokens`, in sessions opened with `fields`."""
    drafted = {"draft_tokens": draft_tokens} if draft_tokens else {}

    async def one() -> None:
        session = _Session(abuser)
        await session.open(sampling=sampling, **fields)
        await session.rounds(num_draft_tokens=num_draft_tokens, **drafted)
        await session.close()

    await abuser.everywhere(one)


async def busy(abuser: Abuser) -> None:
    """Sends rounds of the most drafts without a pause: the honest tenant that others are compared with."""
    await _sampled_rounds(abuser, pb.SamplingParams(seed=7, temperature=0.8), num_draft_tokens=64)


async def bad_words(abuser: Abuser) -> None:
    """Opens with as many bad words as a message holds, then sends rounds."""
    words = [pb.TokenSequence(token_ids=[i % 97, i % 89, 1 + i % 8000]) for i in range(ONE_MIB // 10)]
    await _fallback(
        abuser, lambda share: pb.SamplingParams(temperature=0.8, bad_words=words[: int(share * len(words))])
    )


async def logit_bias(abuser: Abuser) -> None:
    """Opens with a bias of nearly every id, then sends rounds."""
    biases = [pb.LogitBias(token_id=i, bias=0.5) for i in range(1, abuser.num_tokens)]
    await _fallback(abuser, lambda share: pb.SamplingParams(logit_bias=biases[: int(share * len(biases))]))


async def ambiguous_grammars(abuser: Abuser) -> None:
    """Sends rounds under a grammar with more readings the longer its text is, whose masks take longest."""
    grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text='start: s\ns: s s s s s s | "a" | "b" |')
    sampling = pb.SamplingParams(seed=7, temperature=0.8, grammar=grammar)
    await _sampled_rounds(abuser, sampling, draft_tokens=[_ID_OF_A] * 64)


async def compiled_grammars(abuser: Abuser) -> None:
    """Opens with one grammar after another that takes as long to compile as is allowed, and is new."""
    divisors = itertools.count(99_999_989)

    async def one() -> None:
        text = f'{{"type": "integer", "multipleOf": {next(divisors)}}}'
        grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_SCHEMA, text=text)
        await _Session(abuser).open(sampling=pb.SamplingParams(grammar=grammar))

    await abuser.everywhere(one)


async def penalties(abuser: Abuser) -> None:
    """Sends rounds of a text nearly as long as the context, under every penalty."""
    sampling = pb.SamplingParams(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    )
    await _sampled_rounds(
        abuser, sampling, token_ids=_ids(abuser, abuser.max_context * 7 // 8), num_prompt_tokens=1
    )


async def long_texts(abuser: Abuser) -> None:
    """Sends rounds of more texts nearly as long as the context than the KV pool holds, one session after the other: an
    edge that drafts for as long keeps its KV only where tenants are told apart."""

    async def one() -> None:
        sessions = [_Session(abuser) for _ in range(_NUM_LONG_TEXTS)]
        for session in sessions:
            await session.open(_ids(abuser, abuser.max_context * 7 // 8))
        while not abuser.until.is_set() and sessions[0].position < abuser.max_context - 80:
            for session in sessions:
                await session.round()
        for session in sessions:
            await session.close()

    await abuser.everywhere(one)


async def truncation(abuser: Abuser) -> None:
    """Sends rounds whose top-p has to sort nearly the whole vocabulary."""
    await _sampled_rounds(abuser, pb.SamplingParams(temperature=100.0, top_p=0.999999, min_p=1e-9))


async def stop_ids(abuser: Abuser) -> None:
    """Opens with every id but one as a stop id, and so long a minimum that they are masked in every row of the longest
    rounds."""
    sampling = pb.SamplingParams(temperature=0.8, min_new_tokens=abuser.max_context)
    await _sampled_rounds(abuser, sampling, num_draft_tokens=64, stop_token_ids=range(abuser.num_tokens - 1))


async def supports(abuser: Abuser) -> None:
    """Sends sparse rounds with the most drafts, and the largest support at each."""

    async def one() -> None:
        session = _Session(abuser)
        await session.open(method=pb.METHOD_SPARSE)
        while not abuser.until.is_set() and session.position < abuser.max_context - 80:
            request = session.request(64)
            for drafted in request.draft_tokens:
                ids = [drafted, *(i for i in range(64) if i != drafted)][:64]
                request.q_support.add(token_ids=ids, weights=[1] * 64)
            await session.write(verify=request)
            verdict = (await session._final("verify")).verdict
            session.position, session.hash = verdict.position, verdict.hash

    await abuser.everywhere(one)


async def openings(abuser: Abuser) -> None:
    """Opens with the longest prompt, another one each time, and closes before it is computed."""

    async def one() -> None:
        session = _Session(abuser)
        ids = _ids(abuser, abuser.max_context - 2)
        for _ in range(10):
            ids[0] = random.randrange(1, abuser.num_tokens)
            message = pb.OpenRequest(session_id=session.session_id, token_ids=ids, num_prompt_tokens=1)
            await session.write(open=message)
            await session.write(close=pb.CloseRequest())
        session._call.cancel()

    await abuser.everywhere(one)


async def waiting(abuser: Abuser) -> None:
    """Sends the largest rounds after one that is computed, and never reads what they are answered."""

    async def one() -> None:
        session = _Session(abuser)
        await session.open(_ids(abuser, abuser.max_context // 8))
        tokens = [300 + i % 7000 for i in range(min(ONE_MIB // 2 - 64, 500_000))]
        for _ in range(31):
            await session.write(verify=session.request(1, committed_tokens=tokens))
        tokens = [1 + token_id % (abuser.num_tokens - 1) for token_id in tokens[: abuser.max_context // 2]]
        for _ in range(31):
            await session.write(verify=session.request(1, committed_tokens=tokens))
        await asyncio.sleep(0.5)
        session._call.cancel()

    await abuser.everywhere(one)


async def garbage(abuser: Abuser) -> None:
    """Sends bytes that are no message, on streams and in unary calls."""
    stream = abuser.channel.stream_stream(f"{SERVICE}/Session")
    unary = abuser.channel.unary_unary(f"{SERVICE}/Verify")

    async def one() -> None:
        metadata = (("x-session-id", os.urandom(16).hex()), *abuser.metadata)
        call = stream(metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(b"\xff" * 1000)
            await call.read()
        await unary(b"\xff" * 1000, metadata=metadata)

    await abuser.everywhere(one)


async def silent_streams(abuser: Abuser) -> None:
    """Opens stream after stream and says nothing on any."""
    stub = outrider_pb2_grpc.VerifierStub(abuser.channel)
    await _open_silently(abuser, stub.Session)


async def silent_calls(abuser: Abuser) -> None:
    """Opens unary calls whose message never comes, and health watches."""
    unary = abuser.channel.stream_unary(f"{SERVICE}/Open")  # on the wire a unary call is a stream
    watch = abuser.channel.stream_stream("/grpc.health.v1.Health/Watch")
    await _open_silently(abuser, unary, watch)


async def _open_silently(abuser: Abuser, *methods: Callable[..., Any]) -> None:
    """Opens calls of `methods`, of one session each time, and keeps them open until the end."""
    calls: list[Any] = []

    async def one() -> None:
        metadata = (("x-session-id", os.urandom(16).hex()), *abuser.metadata)
        for method in methods:
            calls.append(call := method(metadata=metadata))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call.wait_for_connection(), 0.02)

    await abuser.everywhere(one)
    for call in calls:
        call.cancel()


async def cancels(abuser: Abuser) -> None:
    """Cancels rounds that there are not, as fast as they are read, and leaves."""

    async def one() -> None:
        session = _Session(abuser)
        for _ in range(1000):
            await session.write(cancel=pb.CancelRequest(round_id=1))
        session._call.cancel()

    await abuser.everywhere(one)


async def refused_rounds(abuser: Abuser) -> None:
    """Sends rounds that cannot be answered by their deadline where anybody else is served, and heeds no hint."""

    async def one() -> None:
        session = _Session(abuser)
        await session.open()
        reading = asyncio.create_task(session.read_all())
        try:
            while not reading.done():
                await session.write(verify=session.request(1, deadline_ms=1))
        finally:
            reading.cancel()

    await abuser.everywhere(one)


async def unary_flood(abuser: Abuser) -> None:
    """Makes unary calls for sessions that nobody opened, many at a time."""
    stub = outrider_pb2_grpc.VerifierStub(abuser.channel)

    async def one() -> None:
        session_id = os.urandom(16)
        request = pb.VerifyRequest(session_id=session_id, round_id=1, draft_tokens=[1, 2, 3])
        await asyncio.gather(*(stub.Verify(request, metadata=abuser.metadata) for _ in range(16)))

    await abuser.everywhere(one)


async def co_located(abuser: Abuser) -> None:
    """Has the verifier draft and decode for many sessions at once, the most tokens at a time."""

    async def one() -> None:
        session = _Session(abuser)
        await session.open()
        request = pb.GenerateRequest(
            round_id=1,
            base_position=session.position,
            base_hash=session.hash,
            max_new_tokens=abuser.max_context,
            mode=pb.GENERATE_MODE_CO_LOCATED,
            num_speculative_tokens=64,
        )
        await session.write(generate=request)
        while not (tokens := (await session._final("generate")).tokens).is_last:
            assert tokens.position

    await abuser.everywhere(one)


async def _fallback(abuser: Abuser, sampling: Callable[[float], pb.SamplingParams]) -> None:
    """Sends rounds under the largest share of what `sampling` gives that the verifier takes."""
    for share in (1.0, 0.5, 0.25, 0.1, 0.05, 0.01):
        session = _Session(abuser)
        with contextlib.suppress(grpc.aio.AioRpcError, _RefusedError, asyncio.InvalidStateError):
            await session.open(sampling=sampling(share))
            await _sampled_rounds(abuser, sampling(share))
            return
    await abuser.until.wait()


ABUSES: dict[str, Callable[[Abuser], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        bad_words,
        logit_bias,
        ambiguous_grammars,
        compiled_grammars,
        penalties,
        long_texts,
        truncation,
        stop_ids,
        supports,
        openings,
        waiting,
        garbage,
        silent_streams,
        silent_calls,
        cancels,
        refused_rounds,
        unary_flood,
        co_located,
    )
}
"""Every abuse by its name; `busy` is what they are compared with."""
