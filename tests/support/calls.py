"""Calls of a verifier as a client that nobody here wrote would make them: bare stubs, credentials by hand."""

from __future__ import annotations

import contextlib
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc

Metadata = tuple[tuple[str, str], ...]
PATIENCE_S = 60.0
# A test's channels must not share a connection, and with it a handshake, with another's.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def get_url(url: str, accept: str = "") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


@contextlib.contextmanager
def plain_channel(port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        yield channel


@contextlib.contextmanager
def tls_channel(
    port: int, ca: Path, certificate: Path | None = None, key: Path | None = None, host: str = "localhost"
) -> Iterator[grpc.Channel]:
    pair = [] if certificate is None or key is None else [key.read_bytes(), certificate.read_bytes()]
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    with grpc.secure_channel(f"{host}:{port}", credentials, options=_OPTIONS) as channel:
        yield channel


def opening(session_id: bytes, **fields: Any) -> pb.OpenRequest:
    defaults = {
        "session_id": session_id,
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 3,
        "ignore_eos": True,
        "sampling": pb.SamplingParams(temperature=0.0),
    }
    return pb.OpenRequest(**(defaults | fields))


class Caller:
    """Everything that one client does with one session id; `metadata` are its credentials."""

    def __init__(self, channel: grpc.Channel, session_id: bytes, metadata: Metadata = ()) -> None:
        self.session_id = session_id
        self.metadata = (("x-session-id", session_id.hex()), *metadata)
        self.stub = outrider_pb2_grpc.VerifierStub(channel)

    def open(self) -> Any:
        return self.stub.Open(opening(self.session_id), metadata=self.metadata, timeout=PATIENCE_S)

    def verify(self, after: Any, round_id: int, draft: tuple[int, ...] = (1, 2)) -> Any:
        request = pb.VerifyRequest(
            session_id=self.session_id,
            round_id=round_id,
            base_position=after.position,
            base_hash=after.hash,
            draft_tokens=draft,
        )
        return self.stub.Verify(request, metadata=self.metadata, timeout=PATIENCE_S)

    def generate(self, after: Any, round_id: int, num_new: int = 2) -> list[Any]:
        request = pb.GenerateRequest(
            session_id=self.session_id,
            round_id=round_id,
            base_position=after.position,
            base_hash=after.hash,
            max_new_tokens=num_new,
        )
        return list(self.stub.Generate(request, metadata=self.metadata, timeout=PATIENCE_S))

    def close(self) -> bool:
        request = pb.CloseRequest(session_id=self.session_id)
        return bool(self.stub.Close(request, metadata=self.metadata, timeout=PATIENCE_S).was_open)


class Stream:
    """A `Session` call: `ask` says a message and hears the next reply."""

    def __init__(self, caller: Caller) -> None:
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        requests = iter(self._outgoing.get, None)
        self.call = caller.stub.Session(requests, metadata=caller.metadata, timeout=PATIENCE_S)

    def ask(self, **body: Any) -> Any:
        self._outgoing.put(pb.SessionRequest(**body))
        return next(self.call)

    def open(self, session_id: bytes) -> Any:
        return self.ask(open=opening(session_id)).open.opened

    def verify(self, after: Any, round_id: int) -> Any:
        """A round that drafts nothing."""
        base = {"base_position": after.position, "base_hash": after.hash}
        return self.ask(verify=pb.VerifyRequest(round_id=round_id, **base)).verify.verdict

    def close(self) -> None:
        self._outgoing.put(None)
        self.call.cancel()


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Of a call that must fail."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            answer = next(answer)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"the call was answered: {answer}")


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether it came true at last; the time is for machines that others are busy on."""
    end_s = time.monotonic() + timeout_s
    while not (is_so := condition()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_so
