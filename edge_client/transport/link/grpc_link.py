"""`VerifierLink` over gRPC, with stream or unary connections."""

from __future__ import annotations

import grpc

from outrider.common import codec
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import LinkFaultError, UsageError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import ModelInfo
from outrider.edge_client.transport.link.base import Connection, Traffic
from outrider.edge_client.transport.link.calls import CallSettings
from outrider.edge_client.transport.link.channel import open_channel, translate
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity
from outrider.edge_client.transport.link.stream import StreamConnection
from outrider.edge_client.transport.link.targets import parse_target
from outrider.edge_client.transport.link.trace import SessionTrace
from outrider.edge_client.transport.link.unary import UnaryConnection

TRANSPORTS: dict[str, type[StreamConnection] | type[UnaryConnection]] = {
    "stream": StreamConnection,
    "unary": UnaryConnection,
}


class GrpcLink:
    """Makes the connections of one session. `address` is parsed by `outrider.edge_client.transport.link.targets`,
    `transport` is "stream" or "unary".

    Raises `UsageError` for another transport, and for a malformed address.
    """

    def __init__(
        self,
        address: str,
        session_id: bytes,
        transport: str = "stream",
        security: LinkSecurity = PLAINTEXT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if transport not in TRANSPORTS:
            raise UsageError(f"--transport {transport}: want one of {', '.join(TRANSPORTS)}")
        parse_target(address)
        self.address = address
        self.traffic = Traffic()
        self._session_id = session_id
        self._security = security
        self._clock = clock
        self._connection_type = TRANSPORTS[transport]
        self._trace = SessionTrace(address, session_id)

    def connect(self, timeout_s: float) -> Connection:
        """Returns a fresh connection. Raises `LinkError`, its kind `LinkFaultError` included."""
        try:
            credentials = self._security.metadata()
            channel = open_channel(self.address, timeout_s, self._security, self._session_id)
        except UsageError as error:  # a file that was there when we started
            raise LinkFaultError(f"cannot connect to a verifier at {self.address}: {error}") from error
        call = CallSettings(self.address, self._session_id, credentials, self._security, self._clock)
        return self._connection_type(channel, call, self.traffic, self._trace.begin())

    def describe(self, timeout_s: float) -> ModelInfo:
        """Asks the verifier for its model and limits. Raises `LinkError` and `CallRejectedError`."""
        channel = open_channel(self.address, timeout_s, self._security, self._session_id)
        settings = CallSettings(self.address, self._session_id, self._security.metadata(), self._security)
        call = channel.unary_unary(
            "/outrider.v1.Verifier/Describe",
            request_serializer=pb.DescribeRequest.SerializeToString,
            response_deserializer=pb.DescribeResponse.FromString,
        )
        try:
            return codec.decode_model_info(
                call(pb.DescribeRequest(), timeout=timeout_s, metadata=settings.metadata)
            )
        except grpc.RpcError as error:
            raise translate(error, self.address) from error
        finally:
            channel.close()
