"""Transport: connections to a verifier behind one small protocol (`base`), built on gRPC."""
