"""Checks of every call's credentials, health excepted: by token or by certificate.

Both set `CALLER` in the call's task, where `admitted_caller` reads it. A stream is checked when it begins. On
loopback there may be neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from outrider.cloud_verifier.security.authenticator import AccessError, Authenticator
from outrider.cloud_verifier.security.metadata import TENANT_KEY, TENANT_PATTERN, Caller

CALLER: ContextVar[Caller] = ContextVar("caller")
AUTHORIZATION_KEY = "authorization"
OPEN_SERVICE = "/grpc.health.v1.Health/"
OnRefused = Callable[[AccessError], None]
Continuation = Callable[[Any], Awaitable[Any]]


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a valid token, before any message is read. The token identifies the caller."""

    def __init__(self, authenticator: Authenticator, on_refused: OnRefused) -> None:
        self._authenticator = authenticator
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Continuation, details: Any) -> Any:
        """Checks the call's token and tenant header."""
        if details.method.startswith(OPEN_SERVICE):
            return await continuation(details)
        metadata = details.invocation_metadata or ()
        try:
            caller = self._authenticator.identify([v for k, v in metadata if k == AUTHORIZATION_KEY])
            if caller.is_admin:
                raise AccessError("denied", "the token is for the admin port only")
            check_header(caller, metadata)
        except AccessError as error:
            self._on_refused(error)
            return _refusing(error)
        CALLER.set(caller)
        return await continuation(details)


class CertificateInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Identifies the caller by the common name of the client's certificate, which the handshake verified."""

    def __init__(self, on_refused: OnRefused) -> None:
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Continuation, details: Any) -> Any:
        """Returns a handler that checks the call's certificate and tenant header first."""
        handler = await continuation(details)
        if details.method.startswith(OPEN_SERVICE) or handler is None:
            return handler  # of a method that is unknown there is nothing to guard

        def admit(context: Any) -> None:
            try:
                caller = caller_of_certificate(context.auth_context())
                check_header(caller, details.invocation_metadata or ())
            except AccessError as error:
                self._on_refused(error)
                raise
            CALLER.set(caller)

        return _with_check(handler, admit)


def admitted_caller(_context: Any) -> Caller:
    """Returns the running call's caller. Raises LookupError where no interceptor has admitted it."""
    return CALLER.get()


def caller_of_certificate(auth_context: dict[str, Sequence[bytes]]) -> Caller:
    """Returns the caller named by a client certificate; raises `AccessError` without a usable name."""
    names = [bytes(name).decode("utf-8", "replace") for name in auth_context.get("x509_common_name", ())]
    if len(names) != 1:
        raise AccessError("missing", "the call came without a client certificate that has a common name")
    if TENANT_PATTERN.fullmatch(names[0]) is None:
        what = "must be 1 to 64 letters, digits, '.', '_' or '-', for it names the tenant"
        raise AccessError("denied", f"the common name of the client certificate {what}")
    return Caller(names[0])


def check_header(caller: Caller, metadata: Sequence[tuple[str, str | bytes]]) -> None:
    """Raises `AccessError` where `x-outrider-tenant` names another tenant than the credentials."""
    if any(key == TENANT_KEY and value != caller.tenant for key, value in metadata):
        whose = f"the credentials are of tenant {caller.tenant}"
        raise AccessError("denied", f"{whose}, and {TENANT_KEY} names another; leave it out")


def _refusing(error: AccessError) -> Any:
    async def refuse(_requests: Any, _context: Any) -> None:
        raise error  # for `ErrorInterceptor`

    return grpc.stream_stream_rpc_method_handler(refuse)  # on the wire it answers calls of every kind


def _with_check(handler: Any, admit: Callable[[Any], None]) -> Any:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    def checked(request: Any, context: Any) -> Any:
        admit(context)
        return behaviour(request, context)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(checked, handler.request_deserializer, handler.response_serializer)
