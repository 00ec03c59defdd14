"""Garbage from a verifier ends the generation with one clear line, over both transports."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.edge.edge_fakes import PROMPT, TARGET, FakeConnection, FakeDraft, FakeVerifier
from support.edge.edge_fakes import make_session as make_fake_session
from support.edge.liar import Spoil, lying

from benchmarks.reliability.frames import mutate
from outrider.common import codec
from outrider.common.alignment import extend_hash
from outrider.common.errors import OutriderError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    FinishReason,
    GenerateRequest,
    Method,
    SamplingParams,
    SessionResponse,
    StopParams,
    VerifyRequest,
)
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.session.session import EdgeSession, SessionResult, new_session_id
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import UnreadableAnswerError
from outrider.edge_client.transport.link.calls import decode_answer
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

PAST_VOCABULARY = 2**32 - 1
SPECULATIVE, CLOUD_ONLY = ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY


def make_session(port: int, transport: str, mode: ExecutionMode, method: Method) -> EdgeSession:
    options = SessionOptions(
        mode=mode,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=12),
        method=method,
        num_logprobs=2,
        on_timeout=OnTimeout.FAIL,
        recover_timeout_s=5.0,
    )
    session_id = new_session_id()
    link = GrpcLink(f"127.0.0.1:{port}", session_id, transport)
    return EdgeSession(
        PROMPT,
        options,
        decode=lambda token_id: f"<{token_id}>",
        verifier=RemoteVerifier(link, RoundDeadline(5.0), recover_timeout_s=5.0),
        draft=FakeDraft() if mode.has_draft else None,  # type: ignore[arg-type]
        depth=FixedDepth(4),
        session_id=session_id,
    )


def run(
    spoil: Spoil, transport: str, mode: ExecutionMode = SPECULATIVE, method: Method = Method.COUPLED
) -> SessionResult:
    with lying(spoil) as port:
        session = make_session(port, transport, mode, method)
        list(session.generate())
        return session.result


def on_verdict(change: Callable[[pb.Verdict], object]) -> Spoil:
    def spoil(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
        if message.verify.WhichOneof("body") == "verdict":
            change(message.verify.verdict)

    return spoil


def on_opened(change: Callable[[pb.Opened], object]) -> Spoil:
    def spoil(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
        if message.open.WhichOneof("body") == "opened":
            change(message.open.opened)

    return spoil


def on_tokens(change: Callable[[pb.GeneratedTokens], object]) -> Spoil:
    def spoil(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
        if message.generate.WhichOneof("body") == "tokens":
            change(message.generate.tokens)

    return spoil


def no_message(body: str) -> Spoil:
    return lambda message, verifier: b"\xff\xff\xff\xff" if message.WhichOneof("body") == body else None


def hash_past_vocabulary(verifier: FakeVerifier) -> int:
    """The hash of the honest sequence with another last token."""
    assert verifier.chain is not None
    return extend_hash(verifier.chain.hash_at(verifier.chain.position - 1), (PAST_VOCABULARY,))


def correction_past_vocabulary(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
    if message.verify.WhichOneof("body") == "verdict":
        message.verify.verdict.correction = PAST_VOCABULARY
        message.verify.verdict.hash = hash_past_vocabulary(verifier)


def first_token_past_vocabulary(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
    if message.open.WhichOneof("body") == "opened":
        message.open.opened.first_token = PAST_VOCABULARY
        message.open.opened.hash = hash_past_vocabulary(verifier)


def as_generated(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
    if message.WhichOneof("body") == "verify":
        round_id = message.verify.verdict.round_id
        message.generate.tokens.round_id = round_id


def add_logprobs(
    target: Any,
    num: int,
    *,
    value: float = -1.0,
    processed: float = -1.0,
    top: float = -1.0,
    num_top: int = 1,
    top_id: int = 3,
) -> None:
    for _ in range(num):
        target.add(
            raw_logprob=value,
            processed_logprob=processed,
            top_token_ids=[top_id],
            top_logprobs=[top] * num_top,
        )


VERDICTS: dict[str, tuple[Spoil, str]] = {
    "bytes": (no_message("verify"), "bytes that are no message"),
    "accepted beyond the draft": (on_verdict(lambda v: setattr(v, "accepted_len", 99)), "accepted_len"),
    "id past the vocabulary": (correction_past_vocabulary, "token_ids"),
    "candidate of probability NaN": (
        on_verdict(lambda v: v.candidates.add(token_id=3, target_prob=math.nan)),
        "candidates",
    ),
    "candidate past the vocabulary": (
        on_verdict(lambda v: v.candidates.add(token_id=PAST_VOCABULARY, target_prob=0.5)),
        "token_ids",
    ),
    "more logprobs than tokens": (on_verdict(lambda v: add_logprobs(v.logprobs, 9)), "logprobs"),
    "logprobs of NaN": (on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=math.nan)), "logprobs"),
    "an infinite logprob": (on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=math.inf)), "logprobs"),
    "a logprob of nothing": (on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=-math.inf)), "logprobs"),
    "a processed logprob of nothing": (
        on_verdict(lambda v: add_logprobs(v.logprobs, 1, processed=-math.inf)),
        "logprobs",
    ),
    "an infinite logprob among the likeliest": (
        on_verdict(lambda v: add_logprobs(v.logprobs, 1, top=math.inf)),
        "logprobs",
    ),
    "two infinite logprobs": (
        on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=math.inf, top=-math.inf)),
        "logprobs",
    ),
    "a logprob above 0": (on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=0.01)), "logprobs"),
    "ids without logprobs": (on_verdict(lambda v: add_logprobs(v.logprobs, 1, num_top=0)), "logprobs"),
    "logprobs past the vocabulary": (
        on_verdict(lambda v: add_logprobs(v.logprobs, 1, top_id=PAST_VOCABULARY)),
        "token_ids",
    ),
    "shares of NaN": (on_verdict(lambda v: setattr(v.metrics, "la_over_k", math.nan)), "metrics"),
    "unknown kind": (on_verdict(lambda v: setattr(v, "correction_kind", 77)), "correction_kind"),
    "another hash": (on_verdict(lambda v: setattr(v, "hash", 5)), "hash"),
}
OPENINGS: dict[str, tuple[Spoil, str]] = {
    "bytes": (no_message("open"), "bytes that are no message"),
    "first token past the vocabulary": (first_token_past_vocabulary, "token_ids"),
    "no tokens at all": (on_opened(lambda o: setattr(o.describe, "num_tokens", 0)), "num_tokens"),
    "end of text past the vocabulary": (
        on_opened(lambda o: o.describe.eos_token_ids.append(PAST_VOCABULARY)),
        "num_tokens",
    ),
    "another hash": (on_opened(lambda o: setattr(o, "hash", 5)), "hash"),
    "choices that nobody asked for": (on_opened(lambda o: o.prompt_choices.append(3)), "prompt_choices"),
}
STREAMS: dict[str, tuple[Spoil, str]] = {
    "bytes": (no_message("generate"), "bytes that are no message"),
    "too few origins": (on_tokens(lambda t: t.ClearField("origins")), "origins"),
    "too many logprobs": (on_tokens(lambda t: add_logprobs(t.logprobs, 3)), "logprobs"),
    "id past the vocabulary": (on_tokens(lambda t: t.token_ids.__setitem__(0, PAST_VOCABULARY)), "token_ids"),
    "no tokens, not the last": (
        on_tokens(lambda t: (t.ClearField("token_ids"), t.ClearField("origins"))),
        "token_ids",
    ),
    "another hash": (on_tokens(lambda t: setattr(t, "hash", 5)), "hash"),
}


def check_line(error: OutriderError, field: str) -> None:
    line = str(error)
    assert field in line and "\n" not in line and line.isprintable(), line


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_cannot_be_is_one_clear_line(name: str, transport: str) -> None:
    spoil, field = VERDICTS[name]
    with pytest.raises(OutriderError) as raised:
        run(spoil, transport)
    check_line(raised.value, field)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("name", OPENINGS)
def test_an_opening_answered_by_what_cannot_be_is_one_clear_line(name: str, transport: str) -> None:
    spoil, field = OPENINGS[name]
    with pytest.raises(OutriderError) as raised:
        run(spoil, transport)
    check_line(raised.value, field)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("name", STREAMS)
def test_generated_tokens_that_cannot_be_are_one_clear_line(name: str, transport: str) -> None:
    spoil, field = STREAMS[name]
    with pytest.raises(OutriderError) as raised:
        run(spoil, transport, CLOUD_ONLY)
    check_line(raised.value, field)


def test_a_logprob_that_rounding_puts_above_0_passes() -> None:
    result = run(on_verdict(lambda v: add_logprobs(v.logprobs, 1, value=1e-6)), "stream")
    assert result.token_ids == tuple(TARGET[2:14])


def test_an_answer_of_another_kind_is_one_clear_line() -> None:
    with pytest.raises(UnreadableAnswerError, match="the answer to VerifyRequest is GeneratedTokens"):
        run(as_generated, "stream")


def test_an_error_is_shown_without_its_control_characters() -> None:
    def spoil(message: pb.SessionResponse, verifier: FakeVerifier) -> None:
        if message.WhichOneof("body") == "verify":
            message.verify.error.code = pb.ROUND_ERROR_CODE_INVALID
            message.verify.error.round_id = 2
            message.verify.error.message = "\x1b[2J\x1b]0;title\x07gone\nfor good\u202e"

    with pytest.raises(OutriderError) as raised:
        run(spoil, "stream")
    check_line(raised.value, "gone for good")


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("mode", [SPECULATIVE, CLOUD_ONLY])
def test_honest_answers_pass(mode: ExecutionMode, transport: str) -> None:
    result = run(lambda message, verifier: None, transport, mode)
    assert result.token_ids == tuple(TARGET[2:14]) and result.finish_reason is FinishReason.LENGTH


class MutatingConnection(FakeConnection):
    """Every third answer or so is changed in one field or in its bytes on the way."""

    rng: random.Random

    def receive(self, timeout_s: float) -> SessionResponse | None:
        reply = super().receive(timeout_s)
        if reply is None:
            return None
        message = codec.encode_response(reply, GenerateRequest if self.is_streaming else VerifyRequest)
        if self.rng.random() < 0.3:
            mutate(message, self.rng)
        data = bytearray(message.SerializeToString())
        if self.rng.random() < 0.03 and data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return decode_answer("fake:1", bytes(data), pb.SessionResponse, codec.decode_response)

    @property
    def is_streaming(self) -> bool:
        return bool(self._verifier.of(GenerateRequest))


@pytest.mark.parametrize("mode", [SPECULATIVE, CLOUD_ONLY, ExecutionMode.CO_LOCATED])
@pytest.mark.parametrize("seed", range(10))
def test_mutated_answers_end_in_a_text_or_in_one_clear_line(
    seed: int, mode: ExecutionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, rng = FakeVerifier(), random.Random(f"{seed}-{mode}")

    def connect(timeout_s: float) -> MutatingConnection:
        connection = MutatingConnection(verifier)
        connection.rng = rng
        return connection

    monkeypatch.setattr(verifier, "connect", connect)
    draft = FakeDraft() if mode.has_draft else None
    session = make_fake_session(
        verifier, draft, mode=mode, on_timeout=OnTimeout.FAIL, recover_timeout_s=0.1, num_logprobs=2
    )
    try:
        list(session.generate())
    except OutriderError as error:
        check_line(error, "")
    assert all(token_id < 100 for token_id in session.result.token_ids)
