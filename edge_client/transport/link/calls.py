"""What every call of one connection carries, and what its failures mean."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from outrider.common.errors import LinkError, OutriderError, UsageError
from outrider.edge_client.transport.link.balancing import SESSION_HEADER
from outrider.edge_client.transport.link.channel import translate
from outrider.edge_client.transport.link.security import LinkSecurity, Metadata


@dataclass(frozen=True, slots=True)
class CallSettings:
    """`credentials` are those of the connection; `security` knows whether there are newer ones."""

    address: str
    session_id: bytes
    credentials: Metadata
    security: LinkSecurity

    @property
    def metadata(self) -> Metadata:
        return ((SESSION_HEADER, self.session_id.hex()), *self.credentials)

    def translate(self, error: grpc.RpcError) -> OutriderError:
        """Our exception for a failed call. A token replaced since makes it a connection to make again."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._has_new_token():
            return LinkError(f"{self.address} does not take the token any more, and there is a new one")
        return translate(error, self.address)

    def _has_new_token(self) -> bool:
        try:
            return self.security.metadata() != self.credentials
        except UsageError:
            return False
