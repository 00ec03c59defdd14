"""A stream's connection: when `send` returns."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.types import CloseRequest
from outrider.edge_client.transport.link import stream
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.link.stream import FRAME_BYTES, StreamConnection


class ScriptedChannel:
    """Takes requests on a thread of its own, as gRPC does; never where it `is_stuck`."""

    def __init__(self, is_stuck: bool = False) -> None:
        self.is_stuck = is_stuck
        self.sent: list[bytes] = []
        self.answers: SimpleQueue[bytes | None] = SimpleQueue()

    def stream_stream(self, method: str) -> Any:
        return self.call

    def call(self, requests: Iterable[bytes], metadata: object) -> Iterator[bytes]:
        if not self.is_stuck:
            threading.Thread(target=self.take, args=(requests,), daemon=True).start()
        return iter(self.answers.get, None)

    def take(self, requests: Iterable[bytes]) -> None:
        for each in requests:
            self.sent.append(each)


def connect(channel: ScriptedChannel) -> StreamConnection:
    settings: Any = SimpleNamespace(address="host:1", clock=SYSTEM_CLOCK, metadata=())
    span: Any = SimpleNamespace(metadata=())
    return StreamConnection(channel, settings, Traffic(), span)


def test_a_message_has_left_when_send_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LEAVING_S", 30.0)
    channel = ScriptedChannel()
    connection = connect(channel)
    for number in range(1, 20):
        connection.send(CloseRequest())
        assert len(channel.sent) == number


def test_a_link_that_takes_nothing_holds_nobody_up() -> None:
    channel = ScriptedChannel(is_stuck=True)
    connection = connect(channel)
    connection.send(CloseRequest())
    connection.send(CloseRequest())
    assert channel.sent == [] and connection._traffic.bytes_up >= 2 * FRAME_BYTES
