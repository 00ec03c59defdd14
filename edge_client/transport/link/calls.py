"""The settings of every call on one connection, and the meaning of a call's failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import InvalidFieldError, LinkError, OutriderError, UsageError
from outrider.edge_client.transport.link.balancing import SESSION_HEADER
from outrider.edge_client.transport.link.base import UnreadableAnswerError
from outrider.edge_client.transport.link.channel import translate
from outrider.edge_client.transport.link.security import LinkSecurity, Metadata

Answer = TypeVar("Answer")


def decode_answer(address: str, data: bytes, message_type: Any, decode: Callable[[Any], Answer]) -> Answer:
    """Returns what the bytes of a `message_type` say. Raises `UnreadableAnswerError` for bytes that are none,
    and for a field that no verifier sends."""
    try:
        return decode(message_type.FromString(data))
    except DecodeError as error:
        raise UnreadableAnswerError(address, "bytes that are no message") from error
    except InvalidFieldError as error:
        raise UnreadableAnswerError(address, error) from error


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Holds what the calls of a connection share. `credentials` are those that it was made with; `security`
    reads the present ones."""

    address: str
    session_id: bytes
    credentials: Metadata
    security: LinkSecurity
    clock: Clock = SYSTEM_CLOCK

    @property
    def metadata(self) -> Metadata:
        """Returns the headers of every call."""
        return ((SESSION_HEADER, self.session_id.hex()), *self.credentials)

    def translate(self, error: grpc.RpcError) -> OutriderError:
        """Returns our exception for a failed call: a `LinkError`, so that it is retried, where the token was
        replaced since."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._has_new_token():
            return LinkError(f"{self.address} does not take the token any more, and there is a new one")
        return translate(error, self.address)

    def _has_new_token(self) -> bool:
        try:
            return self.security.metadata() != self.credentials
        except UsageError:
            return False
