"""The real transports against a real gRPC verifier in this process, whose target is a fake."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from support.calls import PATIENCE_S, eventually
from support.edge.tcp_proxy import TcpProxy
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.errors import IncompatibleError, LinkError, LinkFaultError, UsageError
from outrider.common.types import (
    LOADING,
    Closed,
    CloseRequest,
    Draft,
    FinishReason,
    Origin,
    SamplingParams,
    StopParams,
)
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.session.session import EdgeSession, SessionResult, new_session_id
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import CallRejectedError
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

PROMPT = (5, 6, 7)


class BackendDraft:
    """The fake target's own greedy choice, wrong at every fifth position."""

    num_tokens, max_context = 32, 500
    eos_token_ids = (0,)
    fingerprint, tokenizer_fingerprint = "d", "t" * 16

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.position = 0
        self._text: list[int] = []

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> BackendDraft:
        return BackendDraft(self._backend)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._text += token_ids
        self.position = len(self._text)

    def truncate(self, position: int) -> None:
        del self._text[position:]
        self.position = position

    def propose(self, num_draft_tokens: int, should_stop: object = None) -> Draft:
        text = list(self._text)
        for _ in range(num_draft_tokens):
            logits = self._backend.logits_after(text)[: self._backend.num_tokens]
            right = int(np.argmax(logits))
            text.append(right if len(text) % 5 else (right % 30) + 1)
        drafted = tuple(text[self.position :])
        return Draft(drafted, (1.0,) * len(drafted))

    def close(self) -> None: ...


def decode(
    port: int,
    backend: FakeBackend,
    *,
    mode: ExecutionMode = ExecutionMode.SPECULATIVE,
    transport: str = "stream",
    on_timeout: OnTimeout = OnTimeout.WAIT,
    deadline_s: float | None = None,
    recover_timeout_s: float = 20.0,
    num_new: int = 60,
    on_token: Callable[[int, EdgeSession], None] = lambda index, session: None,
    tokenizer_fingerprint: str = "",
    choice: ModePolicy | None = None,
    num_rounds: int | None = None,
    depth: int = 4,
) -> SessionResult:
    session_id = new_session_id()
    options = SessionOptions(
        mode=mode,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=num_new, ignore_eos=True),
        on_timeout=on_timeout,
        recover_timeout_s=recover_timeout_s,
        tokenizer_fingerprint=tokenizer_fingerprint,
    )
    verifier = RemoteVerifier(
        GrpcLink(f"127.0.0.1:{port}", session_id, transport),
        RoundDeadline(deadline_s),
        recover_timeout_s=recover_timeout_s,
        is_patient=on_timeout is OnTimeout.WAIT,
    )
    draft = BackendDraft(backend) if mode.has_draft else None
    session = EdgeSession(
        PROMPT,
        options,
        decode=lambda token_id: f"<{token_id}>",
        verifier=verifier,
        draft=draft,  # type: ignore[arg-type]
        depth=FixedDepth(depth),
        window=RoundWindow(num_rounds, choice),
        session_id=session_id,
    )
    for event in session.generate():
        if hasattr(event, "token_id"):
            on_token(event.index, session)
    return session.result


def expected_text(backend: FakeBackend, num_new: int = 60) -> tuple[int, ...]:
    text = list(PROMPT)
    for _ in range(num_new):
        text.append(int(np.argmax(backend.logits_after(text)[: backend.num_tokens])))
    return tuple(text[len(PROMPT) :])


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(max_context=256)


@pytest.fixture(scope="module")
def port(backend: FakeBackend) -> Iterator[int]:
    with serving(backend) as server:
        yield server.port


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("mode", [ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY])
def test_every_transport_and_mode_gives_the_targets_text(
    port: int, backend: FakeBackend, transport: str, mode: ExecutionMode
) -> None:
    result = decode(port, backend, mode=mode, transport=transport)
    assert result.token_ids == expected_text(backend)
    assert result.num_unverified_tokens == 0 and result.finish_reason is FinishReason.LENGTH
    assert result.stats.bytes_up > 0 and result.stats.bytes_down > 0
    assert backend.num_free_tokens == backend.kv_tokens, "the session was closed, its KV freed"


class Alternating(ModePolicy):
    """Streams and rounds in turns."""

    def choose(self, num_remaining: int) -> ExecutionMode:
        self.num_changes += 1
        self.current = self._modes[self.num_changes % 2]
        return self.current


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_stream_is_left_for_rounds_at_once(port: int, backend: FakeBackend, transport: str) -> None:
    choice = Alternating((ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY))
    fail = OnTimeout.FAIL
    result = decode(
        port,
        backend,
        mode=ExecutionMode.AUTO,
        transport=transport,
        on_timeout=fail,
        deadline_s=30.0,
        choice=choice,
    )
    assert result.token_ids == expected_text(backend)
    assert choice.num_changes >= 2 and result.stats.num_generate_tokens > 0
    assert result.stats.num_timeouts == result.stats.num_reconnects == 0


def test_a_sessions_own_rounds_before_it_get_none_refused() -> None:
    backend = FakeBackend(max_context=256)
    config = ServeConfig(min_forward_ms=20.0, max_queue_ms=50.0)
    with serving(backend, config) as server:
        result = decode(server.port, backend, num_rounds=16, depth=1, num_new=40)
    assert result.token_ids == expected_text(backend, 40)
    assert sum(each.pipelined_hit is True for each in result.stats.rounds) > 10
    assert result.stats.num_refusals == 0


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_an_answer_is_stamped_when_it_comes(
    port: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteVerifier(GrpcLink(f"127.0.0.1:{port}", new_session_id(), transport), RoundDeadline())
    remote.connect()
    connection = remote._connections.connection
    assert connection is not None
    inbox: Any = connection._inbox  # type: ignore[attr-defined]
    put, has_come = inbox.put, threading.Event()

    def put_and_tell(message: object) -> None:
        put(message)
        has_come.set()

    monkeypatch.setattr(inbox, "put", put_and_tell)
    connection.send(CloseRequest())
    assert has_come.wait(PATIENCE_S)
    time.sleep(0.05)
    # The thread that connected may have ended a wait of nobody's before.
    replies = (connection.receive(1.0) for _ in range(2))
    assert isinstance(next(filter(None, replies)), Closed)
    assert connection.queued_s >= 0.05
    remote.close()


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_cancel_in_mid_text_closes_the_session_over_there(
    port: int, backend: FakeBackend, transport: str
) -> None:
    for mode in (ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY):
        result = decode(
            port,
            backend,
            mode=mode,
            transport=transport,
            num_new=200,
            on_token=lambda index, session: session.cancel() if index == 10 else None,
        )
        assert result.finish_reason is FinishReason.CANCELLED and 11 <= len(result.token_ids) < 60
        assert eventually(lambda: backend.num_free_tokens == backend.kv_tokens)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("mode", [ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY])
def test_cut_connections_leave_no_trace_under_wait(
    port: int, backend: FakeBackend, transport: str, mode: ExecutionMode
) -> None:
    with TcpProxy(port, faults=["cut", "cut"]) as proxy:
        result = decode(proxy.port, backend, mode=mode, transport=transport)
    assert not proxy.faults, "both connections were cut"
    assert result.token_ids == expected_text(backend) and result.num_unverified_tokens == 0


@pytest.mark.parametrize("mode", [ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY])
def test_a_connection_that_swallows_everything_is_replaced_by_a_fresh_one(
    port: int, backend: FakeBackend, mode: ExecutionMode
) -> None:
    with TcpProxy(port, faults=["swallow"]) as proxy:
        result = decode(proxy.port, backend, mode=mode, deadline_s=0.2)
    assert not proxy.faults and proxy.num_accepted >= 2
    assert result.token_ids == expected_text(backend) and result.num_unverified_tokens == 0


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_an_outage_is_bridged_and_after_it_tokens_are_verified_again_on_a_fresh_connection(
    policy: OnTimeout,
) -> None:
    backend = FakeBackend(max_context=4000)
    bridged: list[int] = []  # tokens of the outage: a slow machine may miss a deadline at any other time too
    with serving(backend) as server, TcpProxy(server.port) as proxy:

        def on_token(index: int, session: EdgeSession) -> None:
            if index == 9:
                proxy.is_swallowing = True
                threading.Timer(1.0, lambda: setattr(proxy, "is_swallowing", False)).start()
            origin = session.result.origins[index]
            if origin is Origin.EDGE_ONLY:
                time.sleep(0.02)
            if proxy.is_swallowing and not origin.is_verified:
                bridged.append(index)
            if bridged and not proxy.is_swallowing and origin.is_verified:
                session.cancel()

        result = decode(
            proxy.port, backend, on_timeout=policy, deadline_s=0.1, num_new=3000, on_token=on_token
        )
    assert bridged and result.finish_reason is FinishReason.CANCELLED
    assert result.is_verified[-1], "bytes lost are missed for ever: not by the connection of before"


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_an_edge_that_gave_up_says_that_the_verifier_was_still_loading(
    backend: FakeBackend, transport: str
) -> None:
    def refuse(request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, LOADING)

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {name: grpc.stream_stream_rpc_method_handler(refuse) for name in ("Session", "Open")}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.Verifier", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(LinkError, match=rf"the verifier at 127\.0\.0\.1:{port} is loading the target"):
            decode(port, backend, transport=transport, recover_timeout_s=1.0)
    finally:
        server.stop(None).wait()


def test_a_restarted_verifier_gets_the_session_again(backend: FakeBackend) -> None:
    with contextlib.ExitStack() as old:
        port = old.enter_context(serving(FakeBackend(max_context=256))).port
        with TcpProxy(port) as proxy, contextlib.ExitStack() as new:

            def restart(index: int, session: EdgeSession) -> None:
                if index == 20:
                    old.close()
                    proxy.cut()
                    proxy.target_port = new.enter_context(serving(FakeBackend(max_context=256))).port

            result = decode(proxy.port, backend, on_token=restart)
    assert result.stats.num_rebuilds == 1
    assert result.token_ids == expected_text(backend) and result.num_unverified_tokens == 0


# ------------------------------------------------------------------------------------------- errors


def test_nobody_listening_is_one_clear_error(backend: FakeBackend) -> None:
    with pytest.raises(
        LinkError, match=r"cannot connect to a verifier at 127\.0\.0\.1:9: connection refused"
    ):
        decode(9, backend, on_timeout=OnTimeout.FIRST_TOKEN)


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
@pytest.mark.parametrize("others", ["", ",127.0.0.1:9"])
def test_a_host_that_can_be_no_name_is_one_clear_error(host: str, others: str) -> None:
    remote = RemoteVerifier(GrpcLink(f"{host}:7077{others}", new_session_id()), RoundDeadline())
    with pytest.raises(LinkError, match="there is no such host"):
        remote.connect()


def test_a_bug_on_the_way_to_a_connection_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link = GrpcLink("127.0.0.1:9", new_session_id())
    monkeypatch.setattr(link, "connect", lambda timeout_s: [][0])
    remote = RemoteVerifier(link, RoundDeadline(), is_patient=True)
    with pytest.raises(LinkFaultError, match="IndexError"):
        remote.connect()


def test_another_tokenizer_is_one_sentence_with_what_to_do(port: int, backend: FakeBackend) -> None:
    with pytest.raises(IncompatibleError, match="tokenizer is not the"):
        decode(port, backend, tokenizer_fingerprint="mine")


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_message_too_large_is_not_sent_again_and_again(transport: str) -> None:
    backend = FakeBackend()
    with serving(backend, ServeConfig(max_message_bytes=1024)) as server:
        link = GrpcLink(f"127.0.0.1:{server.port}", new_session_id(), transport)
        remote = RemoteVerifier(link, RoundDeadline(), recover_timeout_s=5.0, is_patient=True)
        prompt = [5] * 2000
        session = EdgeSession(
            prompt,
            SessionOptions(mode=ExecutionMode.CLOUD_ONLY, on_timeout=OnTimeout.WAIT),
            decode=str,
            verifier=remote,
        )
        with pytest.raises(CallRejectedError, match="too large"):
            list(session.generate())


@pytest.mark.parametrize("address", ["nohost", "host:", "host:99999", ":7077", "host:port"])
def test_a_malformed_address_is_the_users_mistake(address: str) -> None:
    with pytest.raises(UsageError, match="want HOST:PORT"):
        GrpcLink(address, new_session_id())
