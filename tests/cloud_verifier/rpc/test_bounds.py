"""What one tenant's calls may hold, and what becomes of those that are no calls: over real gRPC on loopback."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.calls import eventually, plain_channel, status_of
from support.fakes import GatedBackend
from support.processes.server import serving
from test_service import Stream, opening, round_after

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.admission import MAX_WAITING
from outrider.cloud_verifier.rpc.occupancy import MAX_REQUESTS
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.experiments.shared.verifier_metrics import read_metrics

SERVICE = "/outrider.v1.Verifier"
GARBAGE = b"\xff" * 100
LIMITS = {"max_sampling_ids": 100, "tenant_max_waiting_ids": 300, "tenant_max_calls": 4, "max_calls": 6}
CONFIG = ServeConfig(
    max_draft_tokens=8,
    session_max_tokens=200,
    max_queue_ms=1e4,
    hide_batch_size=True,
    **LIMITS,  # type: ignore[arg-type]
)


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def server(backend: GatedBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierServer]:
    monkeypatch.setattr("outrider.cloud_verifier.engine.driver.INLINE_S", -1.0)
    with serving(backend, CONFIG) as server:
        yield server
        backend.gate.set()


@pytest.fixture
def channel(server: VerifierServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


def metadata_of(name: int, tenant: str) -> tuple[tuple[str, str], ...]:
    return (("x-session-id", (bytes([name]) * 16).hex()), ("x-outrider-tenant", tenant))


def open_stream(channel: grpc.Channel, name: int, tenant: str) -> tuple[Stream, pb.Opened]:
    stream = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(name, tenant))
    return stream, stream.ask(open=opening(session_id=bytes([name]) * 16)).open.opened


# ------------------------------------------------------------------------------------ bytes and lengths


def hold_in_forward(backend: GatedBackend, stream: Stream, opened: Any) -> None:
    """Shuts the gate, and sends the stream's first round, whose forward waits there."""
    backend.gate.clear()
    num_begun = backend.num_begun
    stream.say(verify=round_after(opened))
    assert eventually(lambda: backend.num_begun > num_begun)


@pytest.mark.parametrize("name", ["Describe", "Open", "Verify", "Close", "Generate", "Session"])
def test_bytes_that_are_no_message_are_an_invalid_argument_and_one_line_in_the_log(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "outrider")
    make = {"Generate": channel.unary_stream, "Session": channel.stream_stream}.get(name, channel.unary_unary)
    call = make(f"{SERVICE}/{name}")
    for _ in range(3):
        code, details = status_of(lambda: call(GARBAGE if name != "Session" else iter([GARBAGE]), timeout=20))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "no " in details
    lines = [record for record in caplog.records if record.name.startswith(("outrider", "grpc"))]
    assert [line.getMessage() for line in lines] == ["a call was rejected"]


MANY = [pb.TokenSequence(token_ids=[1, 2])] * 60
TOO_LONG = {
    "token_ids": {"token_ids": [1] * 300, "num_prompt_tokens": 1},
    "stop_token_ids": {"stop_token_ids": [1] * 101},
    "sampling.bad_words": {"sampling": pb.SamplingParams(bad_words=MANY)},
    "sampling.logit_bias": {"sampling": pb.SamplingParams(logit_bias=[pb.LogitBias(token_id=1)] * 101)},
    "tokenizer_fingerprint": {"tokenizer_fingerprint": "f" * 1000},
}


@pytest.mark.parametrize("field", TOO_LONG)
def test_lists_of_an_opening_that_are_too_long_name_field_and_limit(
    channel: grpc.Channel, field: str
) -> None:
    stub = outrider_pb2_grpc.VerifierStub(channel)
    error = stub.Open(opening(**TOO_LONG[field]), metadata=metadata_of(0, "a")[1:]).error
    assert (error.code, error.field) == (pb.ROUND_ERROR_CODE_INVALID, field)
    assert "at most" in error.message


def test_a_word_longer_than_rounds_look_back_is_rejected(channel: grpc.Channel) -> None:
    sampling = pb.SamplingParams(bad_words=[pb.TokenSequence(token_ids=[1] * 65)])
    error = outrider_pb2_grpc.VerifierStub(channel).Open(opening(sampling=sampling)).error
    assert (error.code, error.field) == (pb.ROUND_ERROR_CODE_INVALID, "sampling.bad_words")


def test_lists_of_a_round_that_are_too_long_are_rejected_and_it_goes_on(channel: grpc.Channel) -> None:
    stream, opened = open_stream(channel, 1, "a")
    supports = [pb.Support(token_ids=range(65), weights=[1] * 65)]
    for field, fields in {
        "draft_tokens": {"draft_tokens": [1] * 9},
        "committed_tokens": {"committed_tokens": [1] * 201},
        "origins": {"origins": [1] * 50},
        "parents": {"draft_tokens": [1], "parents": [0] * 9},
        "hard_mask": {"hard_mask": b"1" * 9},
        "q_support": {"draft_tokens": [1], "q_support": supports},
        "session_id": {"session_id": b"1" * 99},
    }.items():
        error = stream.ask(verify=round_after(opened, **fields)).verify.error
        assert (error.code, error.field) == (pb.ROUND_ERROR_CODE_INVALID, field)
    assert stream.ask(verify=round_after(opened)).verify.verdict.position == 5


def test_an_operator_can_hide_how_many_are_served(channel: grpc.Channel) -> None:
    stream, opened = open_stream(channel, 1, "a")
    metrics = stream.ask(verify=round_after(opened)).verify.verdict.metrics
    assert metrics.batch_size == metrics.num_active_sessions == 0 and metrics.total_ns > 0


# ------------------------------------------------------------------------------- what waits, what is open


def test_waiting_requests_are_bounded_by_tenant_and_another_is_let_in(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend
) -> None:
    (loud, opened), (quiet, opened_too) = open_stream(channel, 1, "loud"), open_stream(channel, 2, "quiet")
    hold_in_forward(backend, loud, opened)
    for round_id in range(2, 5):
        loud.say(verify=round_after(opened, round_id, committed_tokens=[9] * 120, origins=[1] * 120))
    error = loud.hear().verify.error
    assert error.code == pb.ROUND_ERROR_CODE_REFUSED and error.retry_after_ms > 0
    assert "--tenant-max-waiting-ids" in error.message
    quiet.say(verify=round_after(opened_too))
    backend.gate.set()
    assert quiet.hear().verify.verdict.position == 5
    assert loud.hear().verify.verdict.round_id == 1
    assert eventually(lambda: not server.service.occupancy.waiting_ids), "what was answered is counted out"


def counted(server: VerifierServer, name: str) -> dict[str, float]:
    """The counts of one metric by reason, without those of 0."""
    assert server.admin is not None
    pattern = re.compile(name + r'_total\{reason="(\w+)"\}')
    samples = read_metrics(server.admin.url).items()
    return {found[1]: value for each, value in samples if (found := pattern.fullmatch(each)) and value}


def test_calls_are_bounded_by_tenant_and_another_is_let_in(
    server: VerifierServer, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.cloud_verifier")
    streams = [open_stream(channel, name, "loud")[0] for name in range(4)]
    stub = outrider_pb2_grpc.VerifierStub(channel)
    for call in (
        lambda: stub.Session(iter(()), metadata=metadata_of(9, "loud")),
        lambda: stub.Open(opening(session_id=bytes([9]) * 16), metadata=metadata_of(9, "loud")),
    ):
        code, details = status_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE and "--tenant-max-calls" in details
    others = [open_stream(channel, name, "quiet")[0] for name in range(2)]
    code, details = status_of(lambda: stub.Session(iter(()), metadata=metadata_of(9, "third")))
    assert code is grpc.StatusCode.UNAVAILABLE and "--max-calls" in details
    assert counted(server, "refusals") == {"tenant_calls": 2, "calls": 1}
    lines = [each for each in caplog.records if each.getMessage().startswith("refused a call")]
    assert [each.tenant for each in lines] == ["loud", "third"]  # type: ignore[attr-defined]
    for stream in (*streams, *others):
        stream.call.cancel()
    assert eventually(lambda: not server.service.occupancy.calls)
    open_stream(channel, 1, "loud")


CANCEL, EMPTY_OPENING = (
    {"cancel": pb.CancelRequest(round_id=1)},
    {"open": pb.OpenRequest(session_id=b"a" * 16)},
)


@pytest.mark.parametrize("body", [CANCEL, EMPTY_OPENING], ids=["cancels", "openings"])
def test_a_stream_is_read_no_faster_than_the_engine_takes_its_requests(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend, body: dict[str, Any]
) -> None:
    busy, opened = open_stream(channel, 1, "quiet")
    stub = outrider_pb2_grpc.VerifierStub(channel)
    hold_in_forward(backend, busy, opened)
    loud = Stream(stub, metadata_of(ord("a"), "loud"))
    for _ in range(10 * MAX_REQUESTS):
        loud.say(**body)
    assert eventually(lambda: server.engine.num_arrived == MAX_REQUESTS)
    for _ in range(20):
        stub.Describe(pb.DescribeRequest())
        assert server.engine.num_arrived == MAX_REQUESTS
    backend.gate.set()
    assert busy.hear().verify.verdict.position == 5
    loud.call.cancel()
    assert eventually(lambda: server.engine.num_jobs == 0)
    assert eventually(lambda: set(server.service.occupancy.calls) == {"quiet"})


def test_a_client_that_pipelines_as_many_rounds_as_a_session_holds_is_read_at_once(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend
) -> None:
    stream, opened = open_stream(channel, 1, "a")
    hold_in_forward(backend, stream, opened)
    for round_id in range(2, MAX_WAITING + 2):
        stream.say(verify=round_after(opened, round_id))
    assert eventually(lambda: server.engine.num_arrived == MAX_WAITING)
    backend.gate.set()
    answers = [stream.hear().verify.verdict.round_id for _ in range(MAX_WAITING + 1)]
    assert answers == list(range(1, MAX_WAITING + 2))


def test_requests_of_calls_that_ended_count_as_calls_until_the_engine_has_taken_them(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend
) -> None:
    busy, opened = open_stream(channel, 1, "quiet")
    hold_in_forward(backend, busy, opened)
    stub = outrider_pb2_grpc.VerifierStub(channel)
    streams = [Stream(stub, metadata_of(name, "loud")) for name in (2, 3)]
    for stream in streams:
        stream.say(cancel=pb.CancelRequest(round_id=1))
    calls = [stub.Verify.future(pb.VerifyRequest(), metadata=metadata_of(name, "loud")) for name in (4, 5)]
    assert eventually(lambda: server.engine.num_arrived == 4)
    for call in (*(stream.call for stream in streams), *calls):
        call.cancel()
    assert eventually(lambda: server.engine.num_arrived == 8), "the engine is told that they are over"
    code, details = status_of(lambda: stub.Verify(pb.VerifyRequest(), metadata=metadata_of(6, "loud")))
    assert code is grpc.StatusCode.UNAVAILABLE and "--tenant-max-calls" in details
    backend.gate.set()
    assert eventually(lambda: set(server.service.occupancy.calls) == {"quiet"})
    open_stream(channel, 2, "loud")


def test_no_more_is_read_for_a_while_after_what_the_engine_finds_invalid(
    server: VerifierServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.rpc.stream.REJECTION_S", 3600.0)
    wrong = opening(session_id=b"a" * 16, tokenizer_fingerprint="of another")
    stream = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(ord("a"), "a"))
    for _ in range(2):  # the second was being waited for already
        assert stream.ask(open=wrong).open.error.code == pb.ROUND_ERROR_CODE_INVALID
    stream.say(open=wrong)
    other, opened = open_stream(channel, 1, "b")
    for round_id in range(1, 10):
        opened = other.ask(verify=round_after(opened, round_id)).verify.verdict
    assert server.engine.observer.errors["invalid"] == 2


@pytest.mark.parametrize("name", ["Describe", "Open", "Verify", "Close", "Generate"])
def test_a_call_counts_before_its_message_has_come_and_ends_where_it_does_not(
    server: VerifierServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make = channel.stream_stream(f"{SERVICE}/{name}")  # on the wire a unary call is a stream
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    silent = [make(iter(messages.get, None), metadata=metadata_of(1, "loud")) for _ in range(4)]
    calls = server.service.occupancy.calls
    assert eventually(lambda: calls["loud"] == 4)
    code, details = status_of(lambda: make(iter([b""]), metadata=metadata_of(1, "loud")))
    assert code is grpc.StatusCode.UNAVAILABLE and "--tenant-max-calls" in details
    open_stream(channel, 2, "quiet")[0].call.cancel()
    for call in silent:
        call.cancel()
    assert eventually(lambda: not calls)
    monkeypatch.setattr("outrider.cloud_verifier.rpc.service.SILENT_S", 0.05)
    code, details = status_of(lambda: make(iter(messages.get, None), metadata=metadata_of(1, "loud")))
    assert code is grpc.StatusCode.UNAVAILABLE and "has not come" in details
    assert eventually(lambda: not calls)
    for _ in range(5):
        messages.put(None)


def test_a_connection_has_a_bounded_number_of_calls_and_the_others_wait_at_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.entrance.MAX_CONNECTION_STREAMS", 3)
    with serving(GatedBackend()) as server, plain_channel(server.port) as channel:
        streams = [open_stream(channel, name, "loud")[0] for name in range(3)]
        waiting = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(9, "loud"))
        waiting.say(open=opening(session_id=bytes([9]) * 16))
        with plain_channel(server.port) as other:
            open_stream(other, 10, "quiet")[0].call.cancel()
        assert server.service.occupancy.calls["loud"] == 3
        streams[0].call.cancel()
        assert waiting.hear().open.opened.position == 4


def test_a_call_that_ends_without_a_message_is_an_invalid_argument(channel: grpc.Channel) -> None:
    code, details = status_of(lambda: channel.stream_stream(f"{SERVICE}/Open")(iter(())))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "no message" in details


def test_idle_streams_end_silent_ones_sooner_and_busy_ones_stay(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.rpc.service.SILENT_S", 0.2)
    (idle, _), (busy, opened) = open_stream(channel, 1, "a"), open_stream(channel, 2, "a")
    stub = outrider_pb2_grpc.VerifierStub(channel)
    silent = Stream(stub, metadata_of(3, "a"))
    assert eventually(lambda: silent.call.code() is not None if silent.call.done() else False, 10.0)
    assert silent.call.code() is grpc.StatusCode.UNAVAILABLE and "idle" in silent.call.details()
    assert not idle.call.done()
    hold_in_forward(backend, busy, opened)
    now_s = time.monotonic()
    monkeypatch.setattr(server.service, "_engine", Later(server.engine, now_s + 3600))
    assert eventually(idle.call.done, 10.0) and idle.call.code() is grpc.StatusCode.UNAVAILABLE
    backend.gate.set()
    assert busy.hear().verify.verdict.position == 5
    assert counted(server, "ended_calls") == {"idle": 2}


def test_a_superseded_stream_is_counted_and_one_line_in_the_log(
    server: VerifierServer, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.cloud_verifier")
    older, _ = open_stream(channel, 1, "a")
    open_stream(channel, 1, "a")
    assert eventually(older.call.done) and older.call.code() is grpc.StatusCode.ABORTED
    assert counted(server, "ended_calls") == {"superseded": 1}
    assert [each.getMessage() for each in caplog.records if "ended a call" in each.getMessage()] == [
        "ended a call: a newer one carries its session"
    ]


def test_calls_that_fail_here_are_counted_with_few_traces(
    server: VerifierServer,
    channel: grpc.Channel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server.service, "_engine", None)
    describe = outrider_pb2_grpc.VerifierStub(channel).Describe
    for _ in range(5):
        code, _ = status_of(lambda: describe(pb.DescribeRequest()))
        assert code is grpc.StatusCode.INTERNAL
    monkeypatch.undo()
    assert counted(server, "ended_calls") == {"internal": 5}
    lines = [each for each in caplog.records if each.getMessage() == "a call failed"]
    assert 1 <= len(lines) <= 3 and lines[0].exc_info is not None


class Later:
    """The engine, whose clock is an hour ahead for whoever looks for idle streams."""

    def __init__(self, engine: Any, now_s: float) -> None:
        self._engine, self._now_s = engine, now_s
        self.idle_clock = self

    def now(self) -> float:
        return self._now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
