"""Transport: connections to a verifier behind one small protocol (`base`), built on gRPC."""

import common.grpc_quiet  # noqa: F401  before anything imports grpc
