"""gRPC: the servicer, one `Session` stream, interceptors. Imports `engine` and `security`."""
