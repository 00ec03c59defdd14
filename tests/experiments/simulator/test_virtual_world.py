"""Tasks in virtual time: order, waiting, and the clock, threads and pools that product code is given."""

from __future__ import annotations

import concurrent.futures
import queue
import secrets
import sys
import threading
import time
import types
from queue import Empty

import pytest
from played_systems import edges, system

from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.run import play
from outrider.experiments.simulator.world.standins import VirtualClock, VirtualPool, virtual_threads
from outrider.experiments.simulator.world.world import VirtualQueue, Waiting, World


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def test_tasks_sleep_in_virtual_time_and_events_of_one_moment_keep_their_order(world):
    heard = []

    def sleeper(name, seconds):
        world.sleep(seconds)
        heard.append((name, world.now_s))

    hour_s = 3600.0  # longer than a test may take: in real time it would be cut
    for name, seconds in (("late", 2 * hour_s), ("first", hour_s), ("second", hour_s)):
        world.start(sleeper, name, seconds)
    world.run()
    assert heard == [("first", hour_s), ("second", hour_s), ("late", 2 * hour_s)]


def test_a_run_stops_at_its_end_and_goes_on_from_there(world):
    heard = []
    world.call_at(1.0, heard.append, "a")
    world.call_at(3.0, heard.append, "b")
    world.run(2.0)
    assert heard == ["a"] and world.now_s == 2.0
    world.run(4.0)
    assert heard == ["a", "b"] and world.now_s == 4.0


def test_an_error_in_a_task_ends_the_run_with_it(world):
    def fail():
        world.sleep(1.0)
        raise ValueError("a bug")

    world.start(fail)
    with pytest.raises(ValueError, match="a bug"):
        world.run()


def test_closing_a_world_unwinds_its_tasks_and_their_cleanup_may_not_wait(world):
    left = []

    def task():
        try:
            world.sleep(100.0)
        finally:
            left.append("cleaned up")
            world.sleep(1.0)
            left.append("never")

    world.start(task)
    world.run(1.0)
    world.close()
    assert left == ["cleaned up"]


@pytest.mark.parametrize("put_at_s, expected", [(0.5, ("item", 0.5)), (2.0, (None, 1.0))])
def test_a_queue_gives_what_comes_in_time(world, put_at_s, expected):
    queue, heard = VirtualQueue(world), []

    def read():
        try:
            heard.append((queue.get(timeout=1.0), world.now_s))
        except Empty:
            heard.append((None, world.now_s))

    world.start(read)
    world.call_at(put_at_s, queue.put, "item")
    world.run()
    assert heard == [expected]


def test_a_later_wait_is_not_ended_by_the_timer_of_an_earlier_one(world):
    waiting, heard = Waiting(world), []

    def task():
        heard.append((waiting.wait(1.0), world.now_s))  # woken at 0.5
        heard.append((waiting.wait(2.0), world.now_s))  # until 2.5, though a timer rings at 1.0
        heard.append((waiting.wait(0.1), world.now_s))

    world.start(task)
    world.call_at(0.5, waiting.wake)
    world.run()
    assert heard == [(True, 0.5), (False, 2.5), (False, pytest.approx(2.6))]


def test_a_pool_works_on_as_many_calls_at_once_as_it_has_workers(world):
    pool, heard = VirtualPool(world, max_workers=2), []

    def work(number):
        world.sleep(1.0)
        return number, world.now_s

    world.start(lambda: heard.extend(pool.map(work, range(4))))
    world.run()
    assert heard == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


def test_threads_are_tasks_that_share_events_and_queues(world):
    threads, heard = virtual_threads(world), []
    event, numbers = threads.event(), threads.queue()

    def finish():
        world.sleep(1.0)
        numbers.put(7)
        event.set()

    def task():
        threads.start(finish, "finish")
        heard.append((event.wait(0.5), event.wait(5.0), numbers.get(), world.now_s))

    world.start(task)
    world.run()
    assert heard == [(False, True, 7, 1.0)]


def test_a_clock_gives_way_only_where_there_is_time_to_wait(world):
    clock, heard = VirtualClock(world), []

    def task():
        for seconds in (0.0, -1.0, 2.0):
            clock.sleep(seconds)
            heard.append((seconds, clock.now()))

    world.start(task)
    world.start(lambda: heard.append(("another task", clock.now())))
    world.run()
    assert heard == [(0.0, 0.0), (-1.0, 0.0), ("another task", 0.0), (2.0, 2.0)]


MACHINE = (time, threading, queue, secrets, concurrent.futures)


def _bindings():
    """Returns, by name, the identity of everything that the machine's and the product's modules, their functions'
    defaults and their classes hold."""
    product = [each for name, each in sys.modules.items() if name.startswith("outrider.")]
    found = {}
    for module in (*MACHINE, *product):
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = id(value)
            members = vars(value) if isinstance(value, type) and value.__module__ == module.__name__ else {}
            for member, held in (("", value), *members.items()):
                if isinstance(held, types.FunctionType):
                    defaults = [*(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
                    found[module.__name__, name, member] = (id(held), *map(id, defaults))
    return found


def test_a_run_patches_nothing():
    description = system(edges(requests=1), edges(edge={"mode": "co-located"}, requests=1))
    play(load_system(description))  # imports what the product imports when first used
    before, during = _bindings(), []
    play(load_system(description), on_request=lambda log: during.append(_bindings()))
    assert len(during) == 2 and len(before) > 1000
    for after in (*during, _bindings()):
        assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
