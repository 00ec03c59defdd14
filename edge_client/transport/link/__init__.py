"""Connections to a verifier: one small protocol (`base`) and its implementations over gRPC."""

import outrider.common.process.grpc_quiet  # noqa: F401  before anything imports grpc
from outrider.edge_client.transport.link.balancing import allow_ring_hash

allow_ring_hash()  # before gRPC is imported, too
