"""The message of a call that brings one: handlers of such calls begin before it has come.

gRPC starts a handler of a unary call with the call's message. A client that never sends it has a call open that no
limit counts and nobody ends; so these calls are served as streams, which are the same on the wire.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from outrider.cloud_verifier.rpc.stream import IdleError
from outrider.common.errors import InvalidFieldError

SILENT_S = 30.0  # a call says something by then: an edge begins one with its first message


async def read_message(context: Any, silent_s: float) -> bytes:
    """Returns the call's message. Raises `IdleError` where it has not come after `silent_s` seconds, and
    `InvalidFieldError` where the call ends without."""
    try:
        async with asyncio.timeout(silent_s):
            content = await context.read()
    except TimeoutError as error:
        raise IdleError(f"the call was idle for {silent_s:.0f} s: its message has not come") from error
    if content is grpc.aio.EOF:
        raise InvalidFieldError("body", "the call has no message")
    return bytes(content)
