"""Transport: connections to a verifier behind one small protocol (`base`), built on gRPC."""

import outrider.common.process.grpc_quiet  # noqa: F401  before anything imports grpc
from outrider.edge_client.transport.link.balancing import allow_ring_hash

allow_ring_hash()  # that too
