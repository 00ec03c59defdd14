"""A verifier's certificates, tokens and interceptors by its configuration, and their reloading."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.authenticator import REASONS, AccessError, Authenticator
from outrider.cloud_verifier.security.files import FileWatch
from outrider.cloud_verifier.security.interceptors import (
    CertificateInterceptor,
    TokenInterceptor,
    admitted_caller,
)
from outrider.cloud_verifier.security.metadata import Caller, claimed_caller
from outrider.cloud_verifier.security.token_file import read_tokens
from outrider.common.errors import ConfigError
from outrider.common.process.logs import LogLimiter

log = logging.getLogger(__name__)

SAID_AGAIN_S = 60.0  # between two lines about files that still cannot be loaded; they are tried each second

_WHY = {  # for the log; `AccessError` has more for the caller
    "missing": "it has no credentials",
    "malformed": "its token is malformed",
    "unknown": "its token is unknown",
    "expired": "its token has expired",
    "revoked": "its token is revoked",
    "denied": "its credentials do not allow it",
}


class ServerSecurity:
    """Holds a verifier's credentials.

    Raises `ConfigError` for files that cannot be used. Lives on the event loop.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.certificates = None
        self.authenticator: Authenticator | None = None
        self.num_refused = dict.fromkeys(REASONS, 0)
        self.interceptors: tuple[Any, ...] = ()
        self.caller_of: Callable[[Any], Caller] = claimed_caller
        self._limiter = LogLimiter(log)
        self._failures = LogLimiter(log, SAID_AGAIN_S)
        self._tokens_path = config.tokens
        if config.tls_cert is not None:
            from outrider.cloud_verifier.security.certificates import ServerCertificates, TlsPaths

            assert config.tls_key is not None, "checked with the addresses"
            paths = TlsPaths(config.tls_cert, config.tls_key, config.tls_client_ca)
            self.certificates = ServerCertificates(paths)
        if self._tokens_path is not None:
            self._tokens_watch = FileWatch((self._tokens_path,))
            self.authenticator = Authenticator(read_tokens(self._tokens_path))
            self.interceptors = (TokenInterceptor(self.authenticator, self.on_refused),)
            if not len(self.authenticator):
                log.warning("the token file has no token: nobody can call", extra={"path": self._tokens_path})
        elif config.tls_client_ca is not None:
            self.interceptors = (CertificateInterceptor(self.on_refused),)
        if self.interceptors:
            self.caller_of = admitted_caller

    @property
    def has_files(self) -> bool:
        """Returns whether there are files to reload."""
        return self.certificates is not None or self.authenticator is not None

    def add_port(self, server: Any, listen: str) -> int:
        """Binds a gRPC server and returns the port. Raises RuntimeError when the address cannot be bound."""
        if self.certificates is None:
            return int(server.add_insecure_port(listen))
        return int(server.add_secure_port(listen, self.certificates.grpc_credentials()))

    def reload(self, is_forced: bool = False) -> frozenset[str]:
        """Loads files that changed, all of them if forced. Those that cannot be loaded are logged, change nothing and
        are tried again by the next call.

        Returns the ids of tokens that were valid before and are not any more.
        """
        if self.certificates is not None:
            self._attempt("certificates", lambda: self._reload_certificates(is_forced), is_forced)
        if self.authenticator is None:
            return frozenset()
        if self._tokens_watch.has_changed() or is_forced:
            self._attempt("tokens", self._reload_tokens, is_forced)
        return self.authenticator.take_ended()

    def _attempt(self, what: str, reload: Callable[[], None], is_forced: bool) -> None:
        try:
            reload()
        except Exception as error:  # of whatever kind: the other files are loaded all the same
            reason = error if isinstance(error, ConfigError | OSError) else repr(error)
            line = f"cannot take up the new {what}, the old ones stay: {reason}"
            if is_forced:  # whoever asked for it looks for an answer
                log.error(line)
            else:
                self._failures.error(line, line, {})

    def _reload_certificates(self, is_forced: bool) -> None:
        assert self.certificates is not None
        if self.certificates.reload(is_forced):
            log.info("took up certificates", extra={"expires": self.certificates.expires.isoformat()})

    def _reload_tokens(self) -> None:
        assert self.authenticator is not None and self._tokens_path is not None
        self.authenticator.replace(read_tokens(self._tokens_path))
        self._tokens_watch.accept()
        log.info("took up tokens", extra={"num_tokens_known": len(self.authenticator)})

    def on_refused(self, error: AccessError) -> None:
        """Counts and logs a refused call, or a refused admin request from a thread of its own."""
        self.num_refused[error.reason] += 1
        facts = {"reason": error.reason} | ({"token_id": error.token_id} if error.token_id else {})
        self._limiter.info(error.reason, f"refused a call: {_WHY[error.reason]}", facts)
