"""Answers of a streaming call, and a client that goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from outrider.cloud_verifier.engine.delivery import Delivery
from outrider.cloud_verifier.rpc.answers import Answers, UnreadError


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


async def write_two(context: Context, on_written: Callable[[], object] | None = None) -> None:
    answers = Answers(1000, Delivery())
    for message in (b"one", b"two"):
        answers.put(message)
    answers.end()
    await answers.write_to(context, on_written)


def test_a_client_that_is_gone_ends_the_call_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    context = Context(is_over=True)
    with caplog.at_level(logging.INFO, "outrider"):
        asyncio.run(write_two(context))
    assert context.written == [b"one"] and not caplog.records
    with pytest.raises(RuntimeError):
        asyncio.run(write_two(Context(is_over=False)))


def test_each_message_that_was_written_is_told_of() -> None:
    context, told = Context(is_over=True), list[int]()
    asyncio.run(write_two(context, lambda: told.append(len(context.written))))
    assert told == [1], "the second was not"


class StuckContext:
    """Is of a call whose client does not read."""

    async def write(self, message: bytes) -> None:
        await asyncio.get_running_loop().create_future()


def test_a_call_that_is_cut_off_holds_no_answers_while_its_client_does_not_take_its_error() -> None:
    async def cut_off() -> Answers:
        answers = Answers(1000, Delivery())
        for _ in range(3):
            answers.put(b"unread" * 50)
        asyncio.get_running_loop().call_soon(answers.cut_off, UnreadError("not read"))
        with pytest.raises(UnreadError):
            await answers.write_to(StuckContext())
        return answers

    assert not asyncio.run(cut_off())._messages
