"""Authentication and TLS: tokens, certificates, interceptors. Imports `config` and `common`."""
