"""When a channel is closed: not while gRPC's own thread still watches its state, which would die with a traceback."""

from __future__ import annotations

from types import SimpleNamespace

from support.calls import eventually
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.edge_client.transport.link.channel import close_later, is_watched, open_channel


class Channel:
    """A channel of gRPC's as far as closing goes, whose thread ends when the test says so."""

    def __init__(self) -> None:
        self._connectivity_state = SimpleNamespace(polling=True)
        self.was_watched_when_closed: list[bool] = []

    def close(self) -> None:
        self.was_watched_when_closed.append(self._connectivity_state.polling)


def test_grpc_still_says_whether_it_watches_a_channel() -> None:
    with serving(FakeBackend()) as server:
        channel = open_channel(f"127.0.0.1:{server.port}", 5.0)
        assert is_watched(channel)
        assert eventually(lambda: not is_watched(channel))
        close_later(channel)


def test_a_channel_is_closed_when_nothing_watches_it_any_more_however_long_that_takes() -> None:
    channel = Channel()
    close_later(channel)
    assert not eventually(lambda: bool(channel.was_watched_when_closed), timeout_s=0.5)
    channel._connectivity_state.polling = False
    assert eventually(lambda: bool(channel.was_watched_when_closed))
    assert channel.was_watched_when_closed == [False]
