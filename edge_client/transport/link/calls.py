"""The settings of every call on one connection, and the meaning of a call's failure."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import LinkError, OutriderError, UsageError
from outrider.edge_client.transport.link.balancing import SESSION_HEADER
from outrider.edge_client.transport.link.channel import translate
from outrider.edge_client.transport.link.security import LinkSecurity, Metadata


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
