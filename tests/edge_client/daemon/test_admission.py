"""Turns: first come, first served, bounded, and given back in every way a request can end."""

from __future__ import annotations

import asyncio

import pytest

from outrider.edge_client.daemon.admission import Admission, Room
from outrider.edge_client.daemon.http import server
from outrider.edge_client.daemon.openai.errors import ApiError


async def hold_in(
    room: Room, admission: Admission, name: str, order: list[str], until: asyncio.Event
) -> None:
    async with admission.turn(room):
        order.append(name)
        await until.wait()


async def hold(admission: Admission, name: str, order: list[str], until: asyncio.Event) -> None:
    with admission.room(1) as room:
        await hold_in(room, admission, name, order, until)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_turns_come_in_order_and_what_exceeds_the_queue_is_refused() -> None:
    async def run() -> None:
        admission, order, done = Admission(1, 2), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, name, order, done)) for name in "abc"]
        await settle()
        assert (admission.num_running, admission.num_waiting, order) == (1, 2, ["a"])
        with pytest.raises(ApiError) as caught:
            await hold(admission, "d", order, done)
        assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
        done.set()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"] and admission.num_running == 0
        admission.check_integrity()

    asyncio.run(run())


def test_who_leaves_the_queue_or_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def run() -> None:
        admission, order, done = Admission(1, 9), [], asyncio.Event()
        first, second, third, fourth = (
            asyncio.create_task(hold(admission, name, order, done)) for name in "abcd"
        )
        await settle()
        second.cancel()
        await settle()
        assert admission.num_waiting == 2
        first.cancel()  # its turn goes to the third, which leaves before it can take it
        await asyncio.sleep(0)
        third.cancel()
        await settle()
        assert order == ["a", "d"] and admission.num_running == 1
        done.set()
        await asyncio.gather(first, second, third, fourth, return_exceptions=True)
        await admission.idle()
        admission.check_integrity()

    asyncio.run(run())


def test_more_room_lets_those_who_wait_in_and_a_stop_sends_them_away() -> None:
    async def run() -> None:
        admission, order, done = Admission(1, 9), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, name, order, done)) for name in "abcd"]
        await settle()
        admission.set_bounds(2, 9)
        await settle()
        assert order == ["a", "b"]
        admission.stop()
        done.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(each, "status", None) for each in ended] == [None, None, 503, 503]
        with pytest.raises(ApiError):
            await hold(admission, "e", order, done)
        admission.check_integrity()

    asyncio.run(run())


def test_room_that_was_kept_for_a_requests_texts_is_nobody_elses() -> None:
    async def run() -> None:
        admission, order, done = Admission(2, 2), [], asyncio.Event()
        with admission.room(3) as room:
            tasks = [asyncio.create_task(hold(admission, "a", order, done))]
            await settle()
            assert (admission.num_running, admission.num_waiting) == (1, 3)
            with pytest.raises(ApiError):
                await hold(admission, "b", order, done)
            tasks += [asyncio.create_task(hold_in(room, admission, name, order, done)) for name in "cd"]
            await settle()
            assert order == ["a", "c"] and admission.num_waiting == 2
            done.set()
            await asyncio.gather(*tasks)
        assert admission.num_waiting == 0
        admission.check_integrity()

    asyncio.run(run())


def test_a_stop_lets_the_other_texts_of_a_request_run_that_has_begun() -> None:
    async def run() -> None:
        admission, order, done = Admission(1, 9), [], asyncio.Event()
        with admission.room(3) as room:
            tasks = [asyncio.create_task(hold_in(room, admission, name, order, done)) for name in "ab"]
            other = asyncio.create_task(hold(admission, "x", order, done))
            await settle()
            admission.stop()
            # It waited for the first until now.
            tasks.append(asyncio.create_task(hold_in(room, admission, "c", order, done)))
            idle = asyncio.create_task(admission.idle())
            await settle()
            assert isinstance(other.exception(), ApiError)
            done.set()
            await asyncio.gather(*tasks)
        await idle
        assert order == ["a", "b", "c"]
        admission.check_integrity()

    asyncio.run(run())


def test_memory_is_given_back_once_the_last_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    async def run() -> None:
        admission, done = Admission(2, 2), asyncio.Event()
        monkeypatch.setattr(server, "give_back", lambda: freed.append(admission.num_running))
        freeing = asyncio.create_task(server.give_back_when_idle(admission, idle_s=0.0))
        await settle()
        assert not freed  # nothing has run yet
        tasks = [asyncio.create_task(hold(admission, name, [], done)) for name in "ab"]
        await settle()
        assert not freed
        done.set()
        await asyncio.gather(*tasks)
        async with asyncio.timeout(10.0):
            while not freed:
                await asyncio.sleep(0.001)
        freeing.cancel()

    asyncio.run(run())
    assert freed == [0]
