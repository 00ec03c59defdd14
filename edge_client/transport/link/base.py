"""What the edge asks of a transport. The stream and the unary calls look the same from above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.common.errors import OutriderError
from outrider.common.types import ModelInfo, SessionRequest, SessionResponse


@dataclass(slots=True)
class Traffic:
    """Bytes of whole messages (protobuf and gRPC's 5-byte frame), over every connection of a link."""

    bytes_up: int = 0
    bytes_down: int = 0


class Connection(Protocol):
    """One live connection of one session. Used by one thread; `wake` may come from any."""

    def send(self, request: SessionRequest) -> None:
        """Queues a request. Raises `LinkError` when the connection is known to be lost."""
        ...

    def receive(self, timeout_s: float) -> SessionResponse | None:
        """The next message, or None after `timeout_s` or a `wake`. Raises `LinkError` when lost."""
        ...

    @property
    def lay_here_s(self) -> float:
        """How long the message that `receive` last returned had been here: the edge drafts meanwhile."""
        ...

    def start_trip(self) -> None:
        """Times a round trip beside the messages under way; a connection that cannot does nothing."""
        ...

    def take_trip(self) -> float | None:
        """What it took in seconds, once."""
        ...

    def wake(self) -> None:
        """Ends a waiting `receive` early. Safe in a signal handler."""
        ...

    def close(self) -> None: ...


class VerifierLink(Protocol):
    """Makes connections to one address for one session."""

    @property
    def address(self) -> str: ...

    @property
    def traffic(self) -> Traffic: ...

    def connect(self, timeout_s: float) -> Connection:
        """A fresh connection, ready to send. Raises `LinkError` when it cannot be made in time."""
        ...

    def describe(self, timeout_s: float) -> ModelInfo: ...


class CallRejectedError(OutriderError):
    """The verifier refuses the call itself (too large, no such service, not allowed): do not try again."""

    exit_code = 4
