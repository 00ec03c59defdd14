"""Mutated, repeated, reordered and random frames from three sessions: nothing fails, nobody else is touched.

`benchmarks/reliability` runs the same frames by the hundred thousand against a verifier's own process.
"""

from __future__ import annotations

import logging
import random

import pytest
from google.protobuf.message import DecodeError
from support.fakes import FakeBackend
from test_colocated_drafts import CoLocated, KnownDraft
from test_engine import SAMPLED, round_of

from benchmarks.reliability.frames import FrameSource
from outrider.cloud_verifier.engine.job import Job
from outrider.common import codec
from outrider.common.alignment import TokenChain
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    Verdict,
)

MAX_CONTEXT, NUM_FRAMES = 48, 900
WITNESS, PROMPT = b"w" * 16, (5, 6, 7)


class Fuzzed:
    """An engine, three hostile sessions of two tenants, and a witness that decodes a text beside them."""

    def __init__(self, seed: int) -> None:
        backend = FakeBackend(max_context=MAX_CONTEXT, kv_tokens=150)
        draft = KnownDraft([7 * i % 32 for i in range(MAX_CONTEXT)])
        self.harness = CoLocated(draft, backend, max_sessions=6)
        self.sources = {
            FrameSource(random.Random(f"{seed}-{n}"), bytes([n]) * 16, 32, MAX_CONTEXT): f"tenant-{n % 2}"
            for n in range(3)
        }
        self.codes: set[RoundErrorCode] = set()
        self.num_ends: list[int] = []  # final answers to each request that wants one
        self.text: list[int] = []
        self._chain = TokenChain()
        self._round_id = 0

    def send(self, source: FrameSource) -> None:
        for frame in source.next():
            try:
                request = codec.decode_request(pb.SessionRequest.FromString(frame))
            except (DecodeError, InvalidFieldError):
                continue  # the edge of the server: it answers these without the engine
            kind, session_id = type(request), getattr(request, "session_id", b"") or source.session_id

            number = len(self.num_ends)
            self.num_ends.append(int(kind is CancelRequest))

            def hear(
                reply: SessionResponse,
                kind: type = kind,
                number: int = number,
                source: FrameSource = source,
            ) -> None:
                if isinstance(reply, RoundError):
                    self.codes.add(reply.code)
                is_between = isinstance(reply, Progress) or not getattr(reply, "is_last", True)
                self.num_ends[number] += not is_between
                message = codec.encode_response(reply, kind)
                source.hear(pb.SessionResponse.FromString(message.SerializeToString()))

            arrival_ns = int(self.harness.clock.now_s * 1e9)
            self.harness.engine.submit(Job(session_id, request, hear, arrival_ns, self.sources[source]))

    def decode(self, expected: list[int]) -> None:
        """One round of the witness, opened again where it was evicted or refused."""
        self._round_id += 1
        if not self._chain.position:
            opening = OpenRequest(
                WITNESS, (*PROMPT, *self.text), 3, SAMPLED, ignore_eos=True, round_id=self._round_id
            )
            reply = self._ask(opening)
            if isinstance(reply, Opened):
                self.text.append(reply.first_token)
                self._chain = TokenChain((*PROMPT, *self.text))
            return
        draft = expected[len(self.text) : len(self.text) + 2] + [3]
        reply = self._ask(round_of(self._chain, self._round_id, draft))
        if isinstance(reply, Verdict):
            self.text += [*draft[: reply.accepted_len], reply.correction]
            self._chain = TokenChain((*PROMPT, *self.text))
            assert (reply.position, reply.hash) == (self._chain.position, self._chain.hash)
        elif reply.code is RoundErrorCode.UNKNOWN_SESSION:
            self._chain = TokenChain()

    def _ask(self, request: object) -> SessionResponse:
        replies = self.harness.submit(WITNESS, request, "witness")  # type: ignore[arg-type]
        for _ in range(200):
            self.harness.engine.step()
            final = [reply for reply in replies if isinstance(reply, Opened | Verdict | RoundError)]
            if final:
                assert not isinstance(final[0], RoundError) or final[0].code in (
                    RoundErrorCode.REFUSED,
                    RoundErrorCode.UNKNOWN_SESSION,
                )
                return final[0]
        raise AssertionError("the witness was not answered")


@pytest.mark.parametrize("seed", range(4))
def test_frames_of_hostile_clients_harm_nobody(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    fuzzed = Fuzzed(seed)
    harness, rng = fuzzed.harness, random.Random(seed)
    expected = harness.reference(PROMPT, SAMPLED, MAX_CONTEXT - 3)
    for number in range(NUM_FRAMES):
        fuzzed.send(rng.choice(list(fuzzed.sources)))
        if rng.random() < 0.5:
            harness.clock.now_s += rng.choice((0.0, 0.001, 0.1))
            harness.engine.step()
            harness.engine.check_integrity()
        if number % 20 == 0 and len(fuzzed.text) < MAX_CONTEXT - 12:
            fuzzed.decode(expected)
    harness.settle()
    assert set(fuzzed.num_ends) == {1}, "a request has no end, or two"
    assert len(fuzzed.text) >= 20 and fuzzed.text == expected[: len(fuzzed.text)]
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert RoundErrorCode.INTERNAL not in fuzzed.codes and not told, caplog.text
    assert fuzzed.codes >= {RoundErrorCode.INVALID, RoundErrorCode.STALE, RoundErrorCode.UNKNOWN_PREFIX}
    for session in list(harness.engine.sessions):
        harness.submit(session.opening.session_id, CloseRequest(), session.tenant)
    harness.settle()
    assert not harness.engine.num_sessions and not harness.backend.kv_usage.num_used
    harness.engine.step()
    assert not harness.draft.num_open
