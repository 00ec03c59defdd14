"""`outrider.connect_async`: the same texts, in tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest
from support.calls import eventually

import outrider
from outrider.cloud_verifier.server.server import VerifierServer

PROMPT = "class Reader:\n"
ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True}


def test_tasks_write_what_the_other_client_does(client: outrider.Client, address: str) -> None:
    async def work() -> list[outrider.Result]:
        async with outrider.connect_async(address, max_new_tokens=24) as made:
            assert made.model is not None and client.model is not None
            assert made.model.target_fingerprint == client.model.target_fingerprint
            return await asyncio.gather(*(made.generate(PROMPT, seed=seed) for seed in (1, 2, 1)))

    first, second, again = asyncio.run(work())
    assert first.text == again.text == client.generate(PROMPT, seed=1).text
    assert second.text == client.generate(PROMPT, seed=2).text


def test_a_stream_has_every_token_and_then_the_end(address: str) -> None:
    async def work() -> tuple[list[outrider.SessionEvent], outrider.Result]:
        made = outrider.connect_async(address, max_new_tokens=24)
        async with made.stream(PROMPT, seed=2) as stream:
            events = [event async for event in stream]
            result = await stream.result()
        await made.close()
        with pytest.raises(outrider.ClosedError):
            await made.generate(PROMPT)
        return events, result

    events, result = asyncio.run(work())
    ids = [event.token_id for event in events if isinstance(event, outrider.TokenEvent)]
    assert ids == list(result.ids) and isinstance(events[-1], outrider.EndEvent)


@pytest.mark.parametrize("way", ["with", "drop", "cancel", "close"])
def test_leaving_early_ends_the_generation_at_the_verifier(
    address: str, verifier: VerifierServer, way: str
) -> None:
    async def work() -> None:
        made = outrider.connect_async(address, **ENDLESS)  # type: ignore[arg-type]
        stream = made.stream(PROMPT)
        if way == "cancel":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.generate(PROMPT), 0.2)
        elif way == "with":
            async with stream:
                await anext(stream)
            assert (await stream.result()).finish_reason == "cancelled"
        else:
            await anext(stream)
        if way == "close":
            await made.close(cancel=True)
            assert (await stream.result()).finish_reason == "cancelled"
        del stream
        await made.close()

    asyncio.run(work())
    assert eventually(lambda: verifier.engine.num_sessions == 0)


def test_errors_are_those_of_the_other_client(address: str) -> None:
    with pytest.raises(outrider.ConfigError, match="did you mean temperature"):
        outrider.connect_async(address, temprature=1)

    async def ask(verifier: str, **sampling: object) -> None:
        async with outrider.connect_async(verifier) as made:
            await made.generate(PROMPT, **sampling)

    with pytest.raises(outrider.LinkError, match=r"127\.0\.0\.1:9"):
        asyncio.run(ask("127.0.0.1:9"))
    with pytest.raises(outrider.ConfigError, match="max_new_tokens"):
        asyncio.run(ask(address, max_tokens=3))


class SlowConnection:
    """Is open once `may_open` is set."""

    made: ClassVar[list[SlowConnection]] = []
    may_open = threading.Event()

    def __init__(self, *arguments: object) -> None:
        self.made.append(self)
        self.is_closed = False
        assert self.may_open.wait(30)

    def close(self, cancel: bool) -> None:
        self.is_closed = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowConnection]:
    monkeypatch.setattr("outrider.edge_client.library.async_client.Connection", SlowConnection)
    SlowConnection.made.clear()
    SlowConnection.may_open.clear()
    return SlowConnection


def test_what_was_opened_for_a_task_that_gave_up_is_closed(slow: type[SlowConnection]) -> None:
    async def enter() -> None:
        async with outrider.connect_async("127.0.0.1:9"):
            pass

    async def work() -> None:
        entering = asyncio.create_task(enter())
        while not slow.made:
            await asyncio.sleep(0.01)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert [each.is_closed for each in slow.made] == [False]
        slow.may_open.set()
        async with asyncio.timeout(30):
            while not slow.made[0].is_closed:
                await asyncio.sleep(0.01)

    asyncio.run(work())


def test_another_task_gets_what_the_first_one_did_not_wait_for(slow: type[SlowConnection]) -> None:
    async def work() -> None:
        made = outrider.connect_async("127.0.0.1:9")
        first, second = (asyncio.create_task(made.connected()) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        slow.may_open.set()
        assert await second is slow.made[0]  # type: ignore[comparison-overlap]
        await made.close()
        assert first.cancelled() and [each.is_closed for each in slow.made] == [True]

    asyncio.run(work())
