"""The protocols of a link: a stream and unary calls look the same to their users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.common.errors import OutriderError
from outrider.common.types import ModelInfo, SessionRequest, SessionResponse


@dataclass(slots=True)
class Traffic:
    """Counts the bytes of whole messages (protobuf and gRPC's 5-byte frame), over every connection of a link."""

    bytes_up: int = 0
    bytes_down: int = 0


class Connection(Protocol):
    """One live connection of one session. Used by one thread; `wake` may come from any."""

    def send(self, request: SessionRequest) -> None:
        """Queues a request. Raises `LinkError` when the connection is known to be lost."""

    def receive(self, timeout_s: float) -> SessionResponse | None:
        """Returns the next message, or None after `timeout_s` or a `wake`. Raises `LinkError` when lost."""

    @property
    def queued_s(self) -> float:
        """Returns the seconds between arrival and `receive` of the last message: the edge drafts meanwhile."""

    def start_rtt_probe(self) -> None:
        """Measures a round trip beside the messages under way; a connection that cannot does nothing."""

    def take_rtt(self) -> float | None:
        """Returns the seconds that the last probe measured, once."""

    def wake(self) -> None:
        """Ends a waiting `receive` early. Safe in a signal handler."""

    def close(self) -> None:
        """Closes it; no message arrives any more."""


class VerifierLink(Protocol):
    """Makes connections to one address for one session."""

    @property
    def address(self) -> str: ...

    @property
    def traffic(self) -> Traffic: ...

    def connect(self, timeout_s: float) -> Connection:
        """Returns a fresh connection, ready to send. Raises `LinkError` when it cannot be made in time."""

    def describe(self, timeout_s: float) -> ModelInfo:
        """Asks the verifier for its model and limits. Raises `LinkError` and `CallRejectedError`."""


class CallRejectedError(OutriderError):
    """The verifier rejects the call itself (too large, no such service, not allowed): a retry is useless."""

    exit_code = 4


class UnreadableAnswerError(CallRejectedError):
    """The verifier answers what no verifier of this protocol does."""

    def __init__(self, address: str, found: object) -> None:
        super().__init__(f"{address} answers what this edge cannot read: {found}")
