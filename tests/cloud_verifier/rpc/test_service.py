"""The servicer over real gRPC on loopback, spoken to with bare stubs: streams, unary calls, statuses."""

from __future__ import annotations

import gc
import math
import os
import queue
import time
from collections import deque
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import eventually
from support.fakes import FakeBackend, GatedBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.rpc.stream import REJECTION_S
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc

SESSION_ID = bytes(range(16))
METADATA = (("x-session-id", SESSION_ID.hex()),)


@pytest.fixture
def server() -> Iterator[VerifierServer]:
    with serving(FakeBackend(), ServeConfig(max_message_bytes=4096)) as server:
        yield server


@pytest.fixture
def channel(server: VerifierServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> outrider_pb2_grpc.VerifierStub:
    return outrider_pb2_grpc.VerifierStub(channel)


class Stream:
    """One `Session` call: `say` a message, `hear` the next reply."""

    def __init__(
        self, stub: outrider_pb2_grpc.VerifierStub, metadata: tuple[tuple[str, str], ...] = METADATA
    ):
        self._outgoing: queue.Queue[pb.SessionRequest | None] = queue.Queue()
        self.call = stub.Session(iter(self._outgoing.get, None), metadata=metadata, timeout=60)

    def say(self, **body: object) -> None:
        self._outgoing.put(pb.SessionRequest(**body))

    def hear(self) -> pb.SessionResponse:
        return next(self.call)

    def ask(self, **body: object) -> pb.SessionResponse:
        self.say(**body)
        return self.hear()

    def half_close(self) -> None:
        self._outgoing.put(None)


def opening(**fields: object) -> pb.OpenRequest:
    defaults = {
        "session_id": SESSION_ID,
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 3,
        "ignore_eos": True,
        "sampling": pb.SamplingParams(temperature=0.0),
    }
    return pb.OpenRequest(**(defaults | fields))


def round_after(opened: pb.Opened, round_id: int = 1, **fields: object) -> pb.VerifyRequest:
    return pb.VerifyRequest(round_id=round_id, base_position=opened.position, base_hash=opened.hash, **fields)


def test_a_session_on_the_stream_opens_verifies_generates_and_closes(
    stub: outrider_pb2_grpc.VerifierStub,
) -> None:
    stream = Stream(stub)
    opened = stream.ask(open=opening()).open.opened
    assert opened.position == 4 and opened.describe.model_id == "fake"
    verdict = stream.ask(
        verify=round_after(opened, draft_tokens=[1, 2], q_token_probs=[0.5, 0.5])
    ).verify.verdict
    assert verdict.position == 4 + verdict.accepted_len + 1
    assert 0.0 <= verdict.metrics.alpha_mean <= 1.0
    stream.say(
        generate=pb.GenerateRequest(
            round_id=2, base_position=verdict.position, base_hash=verdict.hash, max_new_tokens=3
        )
    )
    replies = [stream.hear().generate.tokens for _ in range(3)]
    assert [r.is_last for r in replies] == [False, False, True]
    stream.say(close=pb.CloseRequest())
    stream.half_close()
    assert stream.hear().close.was_open, "what is owed comes after the half-close too"
    assert list(stream.call) == []


def test_unary_calls_give_the_same_tokens_as_the_stream(stub: outrider_pb2_grpc.VerifierStub) -> None:
    stream = Stream(stub)
    opened = stream.ask(open=opening()).open.opened
    verdict = stream.ask(verify=round_after(opened, draft_tokens=[1])).verify.verdict
    other = bytes(16)
    metadata = (("x-session-id", other.hex()),)
    opened_unary = stub.Open(opening(session_id=other), metadata=metadata).opened
    assert (opened_unary.first_token, opened_unary.hash) == (opened.first_token, opened.hash)
    reply = stub.Verify(round_after(opened, draft_tokens=[1], session_id=other), metadata=metadata)
    assert (reply.verdict.correction, reply.verdict.hash) == (verdict.correction, verdict.hash)
    tokens = stub.Generate(
        pb.GenerateRequest(
            session_id=other,
            round_id=2,
            base_position=verdict.position,
            base_hash=verdict.hash,
            max_new_tokens=4,
        ),
        metadata=metadata,
    )
    assert [t.tokens.is_last for t in tokens] == [False, False, False, True]
    assert stub.Close(pb.CloseRequest(session_id=other), metadata=metadata).was_open


def test_describe_and_health_answer_without_a_session(channel: grpc.Channel) -> None:
    info = outrider_pb2_grpc.VerifierStub(channel).Describe(pb.DescribeRequest())
    assert info.protocol_version == 1 and len(info.methods) == 8 and info.methods[0] == pb.METHOD_COUPLED
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "outrider.v1.Verifier"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_session_outlives_its_stream(stub: outrider_pb2_grpc.VerifierStub) -> None:
    first = Stream(stub)
    opened = first.ask(open=opening()).open.opened
    first.call.cancel()
    assert Stream(stub).ask(verify=round_after(opened)).verify.verdict.position == 5


def test_a_newer_stream_supersedes_the_older(stub: outrider_pb2_grpc.VerifierStub) -> None:
    first = Stream(stub)
    opened = first.ask(open=opening()).open.opened
    second = Stream(stub)
    assert second.ask(verify=round_after(opened)).verify.verdict.position == 5
    with pytest.raises(grpc.RpcError) as raised:
        first.hear()
    assert raised.value.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"draft_tokens": [1], "q_token_probs": [0.0]}, "q_token_probs"),
        ({"draft_tokens": [1], "q_token_probs": [math.nan]}, "q_token_probs"),
        ({"draft_tokens": [1], "q_token_probs": [1.5]}, "q_token_probs"),
        ({"draft_tokens": [1], "q_token_probs": [0.5, 0.5]}, "q_token_probs"),
        ({"committed_tokens": [1], "origins": [5, 5]}, "origins"),
        ({"committed_tokens": [1], "origins": [77]}, "origins"),
        ({"draft_tokens": [1], "hard_mask": b"abc"}, "hard_mask"),
        ({"draft_tokens": [4_000_000_000]}, "draft_tokens"),
    ],
)
def test_bad_values_are_invalid_in_the_stream_and_the_stream_goes_on(
    stub: outrider_pb2_grpc.VerifierStub, fields: dict[str, object], field: str
) -> None:
    stream = Stream(stub)
    opened = stream.ask(open=opening()).open.opened
    error = stream.ask(verify=round_after(opened, **fields)).verify.error
    assert (error.code, error.field, error.round_id) == (pb.ROUND_ERROR_CODE_INVALID, field, 1)
    assert stream.ask(verify=round_after(opened)).verify.verdict.position == 5


def test_an_oversized_message_is_refused_by_status_and_others_go_on(
    stub: outrider_pb2_grpc.VerifierStub,
) -> None:
    other = bytes(16)
    good = Stream(stub, (("x-session-id", other.hex()),))
    opened = good.ask(open=opening(session_id=other)).open.opened
    with pytest.raises(grpc.RpcError) as raised:
        Stream(stub).ask(open=opening(token_ids=[1] * 9000))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert good.ask(verify=round_after(opened)).verify.verdict.position == 5


def test_an_unknown_session_is_named_in_the_stream(stub: outrider_pb2_grpc.VerifierStub) -> None:
    reply = Stream(stub).ask(verify=pb.VerifyRequest(round_id=3, base_position=4))
    assert reply.verify.error.code == pb.ROUND_ERROR_CODE_UNKNOWN_SESSION


@pytest.mark.parametrize("header", ["zz", "abcd"])
def test_a_malformed_session_header_is_an_invalid_argument(
    stub: outrider_pb2_grpc.VerifierStub, header: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        Stream(stub, (("x-session-id", header),)).ask(open=opening())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-session-id" in raised.value.details()


@pytest.mark.parametrize(("size", "code"), [(17, "INVALID"), (16, "UNKNOWN_SESSION")])
def test_a_generation_that_is_rejected_takes_its_client_as_long_as_any_other_call(
    stub: outrider_pb2_grpc.VerifierStub, size: int, code: str
) -> None:
    begin_s = time.monotonic()
    request = pb.GenerateRequest(session_id=b"x" * size, round_id=1, max_new_tokens=1)
    (answer,) = stub.Generate(request)
    assert pb.RoundErrorCode.Name(answer.error.code) == f"ROUND_ERROR_CODE_{code}"
    assert time.monotonic() - begin_s >= REJECTION_S


def test_a_malformed_session_id_is_an_invalid_argument_of_close(stub: outrider_pb2_grpc.VerifierStub) -> None:
    with pytest.raises(grpc.RpcError, match="session_id") as raised:
        stub.Close(pb.CloseRequest(session_id=b"x" * 17))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "a/b"])
def test_a_malformed_tenant_is_an_invalid_argument(stub: outrider_pb2_grpc.VerifierStub, tenant: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        Stream(stub, (*METADATA, ("x-outrider-tenant", tenant))).ask(open=opening())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-outrider-tenant" in raised.value.details()


def test_a_stream_of_another_tenant_neither_ends_nor_sees_the_session(
    stub: outrider_pb2_grpc.VerifierStub,
) -> None:
    ours = Stream(stub)
    opened = ours.ask(open=opening()).open.opened
    theirs = Stream(stub, (*METADATA, ("x-outrider-tenant", "other")))
    error = theirs.ask(verify=round_after(opened)).verify.error
    assert error.code == pb.ROUND_ERROR_CODE_UNKNOWN_SESSION and error.position == 0
    assert ours.ask(verify=round_after(opened)).verify.verdict.position == 5


def test_a_stream_without_a_session_is_an_invalid_argument(stub: outrider_pb2_grpc.VerifierStub) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        Stream(stub, ()).ask(verify=pb.VerifyRequest(round_id=1))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_abandoned_generate_stops_computing() -> None:
    with (
        serving(FakeBackend(max_context=100_000, kv_tokens=200_000)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stream = Stream(outrider_pb2_grpc.VerifierStub(channel))
        opened = stream.ask(open=opening()).open.opened
        stream.say(
            generate=pb.GenerateRequest(
                round_id=1, base_position=opened.position, base_hash=opened.hash, max_new_tokens=90_000
            )
        )
        stream.hear()
        stream.call.cancel()
        assert eventually(lambda: server.engine.num_jobs == 0)
        assert server.engine.num_steps < 50_000


def test_what_a_lost_stream_asked_for_ends_and_its_opening_goes_on_where_it_was() -> None:
    """Rounds of 1,000 tokens each wait behind an opening of 8,000; then the client is gone."""
    backend = GatedBackend(shuts_at=7, max_context=10_000, kv_tokens=20_000)
    config = ServeConfig(min_forward_ms=20.0, max_step_tokens=64)  # 2 s until a token too much is fed
    with serving(backend, config) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = outrider_pb2_grpc.VerifierStub(channel)
        long = opening(token_ids=[1 + i % 30 for i in range(8000)])
        stream = Stream(stub)
        stream.say(open=long)
        for round_id in range(1, 5):
            stream.say(verify=pb.VerifyRequest(round_id=round_id, committed_tokens=[1] * 1000))
        assert eventually(lambda: not backend.gate.is_set())
        stream.call.cancel()
        backend.gate.set()
        assert eventually(lambda: server.engine.num_jobs == 0)
        assert sum(map(sum, backend.batches)) < 7000
        server.engine._min_forward_s = 0.0  # what follows is as right at any speed
        again = Stream(stub)
        again.say(open=long)
        while (reply := again.hear().open).WhichOneof("body") == "progress":
            pass
        assert reply.opened.position == 8001 and not reply.opened.is_existing
        assert sum(map(sum, backend.batches)) == 8000, "no token was fed twice"
        assert not server.service.occupancy.waiting_ids


def test_a_unary_opening_ends_with_its_call() -> None:
    backend = GatedBackend(shuts_at=7, max_context=10_000, kv_tokens=20_000)
    config = ServeConfig(min_forward_ms=20.0, max_step_tokens=64)  # 2 s until a token too much is fed
    with serving(backend, config) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = outrider_pb2_grpc.VerifierStub(channel)
        call = stub.Open.future(opening(token_ids=[1 + i % 30 for i in range(8000)]), metadata=METADATA)
        assert eventually(lambda: not backend.gate.is_set())
        call.cancel()
        backend.gate.set()
        assert eventually(lambda: server.engine.num_jobs == 0)
        assert sum(map(sum, backend.batches)) < 7000


def test_a_round_that_cannot_be_decoded_is_not_counted_among_those_that_wait(
    server: VerifierServer, stub: outrider_pb2_grpc.VerifierStub
) -> None:
    stream = Stream(stub)
    opened = stream.ask(open=opening()).open.opened
    verdict = stream.ask(verify=round_after(opened, draft_tokens=[1])).verify.verdict
    wrong = round_after(verdict, 2, draft_tokens=[1, 2], q_token_probs=[0.5])
    error = stream.ask(verify=wrong).verify.error
    assert (error.code, error.round_id) == (pb.ROUND_ERROR_CODE_INVALID, 2)
    assert server.engine.backlog.num_tokens() == (0, 0)
    assert stream.ask(verify=round_after(verdict, 2, draft_tokens=[1])).verify.verdict.round_id == 2


def num_references(root: object) -> int:
    """Counts what the objects of ours below `root` refer to, and the containers that they hold."""
    containers = (dict, list, tuple, set, frozenset, deque)
    seen, waiting, count = {id(root)}, [root], 0
    while waiting:
        for referent in gc.get_referents(waiting.pop()):
            count += 1
            is_ours = type(referent).__module__.startswith("outrider.")
            if id(referent) not in seen and (is_ours or isinstance(referent, containers)):
                seen.add(id(referent))
                waiting.append(referent)
    return count


def test_sessions_that_came_and_went_leave_nothing_behind(
    server: VerifierServer, stub: outrider_pb2_grpc.VerifierStub
) -> None:
    def serve_sessions(count: int) -> int:
        """Returns how much the server refers to once they have ended."""
        for _ in range(count):
            session_id = os.urandom(16)
            stream = Stream(stub, (("x-session-id", session_id.hex()),))
            opened = stream.ask(open=opening(session_id=session_id)).open.opened
            stream.ask(verify=round_after(opened, draft_tokens=[1, 2], q_token_probs=[0.5, 0.5]))
            stream.ask(close=pb.CloseRequest())
            stream.half_close()
            assert not list(stream.call)
        assert eventually(lambda: not server.service.num_calls and not server.engine.num_jobs)
        return num_references(server)

    assert serve_sessions(10) == serve_sessions(50)
