"""Translates exceptions to gRPC status codes, in one place (docs/protocol.md, "Limits and errors")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from outrider.cloud_verifier.rpc.answers import UnreadError
from outrider.cloud_verifier.rpc.ended_calls import EndedCalls
from outrider.cloud_verifier.rpc.health import HealthError
from outrider.cloud_verifier.rpc.occupancy import TooManyCallsError
from outrider.cloud_verifier.rpc.service import ShuttingDownError
from outrider.cloud_verifier.rpc.stream import REJECTION_S, IdleError, SupersededError
from outrider.cloud_verifier.security.authenticator import AccessError
from outrider.common.errors import InvalidFieldError

log = logging.getLogger(__name__)


def _status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    match error:
        case AccessError(reason="denied"):
            return grpc.StatusCode.PERMISSION_DENIED, str(error)
        case AccessError():
            return grpc.StatusCode.UNAUTHENTICATED, str(error)
        case HealthError():
            return error.code, str(error)
        case InvalidFieldError():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case SupersededError():
            return grpc.StatusCode.ABORTED, str(error)
        # A client may connect again.
        case ShuttingDownError() | IdleError() | TooManyCallsError() | UnreadError():
            return grpc.StatusCode.UNAVAILABLE, str(error)
        case _:
            return grpc.StatusCode.INTERNAL, "the verifier failed here; its log says where"


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call that raises with the status of its exception, and has it counted."""

    def __init__(self, ended_calls: EndedCalls | None = None) -> None:
        self._ended_calls = ended_calls or EndedCalls()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Returns the call's handler, guarded."""
        handler = await continuation(details)
        if handler is None:
            return None
        streams = (handler.request_streaming, handler.response_streaming)
        kwargs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if streams == (False, False):
            return grpc.unary_unary_rpc_method_handler(self._guard(handler.unary_unary), **kwargs)
        if streams == (False, True):
            return grpc.unary_stream_rpc_method_handler(self._guard_stream(handler.unary_stream), **kwargs)
        if streams == (True, False):
            return grpc.stream_unary_rpc_method_handler(self._guard(handler.stream_unary), **kwargs)
        return grpc.stream_stream_rpc_method_handler(self._guard(handler.stream_stream), **kwargs)

    async def _abort(self, context: Any, error: Exception) -> None:
        self._ended_calls.count(error)
        if isinstance(error, InvalidFieldError | TooManyCallsError):
            await asyncio.sleep(REJECTION_S)
        try:
            await context.abort(*_status_of(error))
        except grpc.aio.AbortError:
            raise
        except Exception as gone:  # gRPC's own kind, which it does not export
            log.debug("the call had ended before %r could: %s", error, gone)

    def _guard(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                result = behaviour(request, context)
                if hasattr(result, "__aiter__"):  # a standard service written as a generator
                    async for message in result:
                        await context.write(message)
                    return None
                return await result
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await self._abort(context, error)

        return guarded

    def _guard_stream(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                result = behaviour(request, context)
                if not hasattr(result, "__aiter__"):
                    await result
                    return
                async for message in result:
                    yield message
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await self._abort(context, error)

        return guarded
