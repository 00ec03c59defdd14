"""Answers of a streaming call, and a client that goes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.cloud_verifier.engine.delivery import Delivery
from outrider.cloud_verifier.rpc.answers import Answers


class Context:
    """Fails to write its second message, where the call `is_over` as gRPC has it."""

    def __init__(self, is_over: bool) -> None:
        self.written: list[bytes] = []
        self._is_over = is_over

    def done(self) -> bool:
        return self._is_over

    async def write(self, message: bytes) -> None:
        if self.written:
            raise RuntimeError("ExecuteBatchError")
        self.written.append(message)


async def write_two(context: Context) -> None:
    answers = Answers(1000, Delivery())
    for message in (b"one", b"two"):
        answers.put(message)
    answers.end()
    await answers.write_to(context)


def test_a_client_that_is_gone_ends_the_call_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    context = Context(is_over=True)
    with caplog.at_level(logging.INFO, "outrider"):
        asyncio.run(write_two(context))
    assert context.written == [b"one"] and not caplog.records
    with pytest.raises(RuntimeError):
        asyncio.run(write_two(Context(is_over=False)))
