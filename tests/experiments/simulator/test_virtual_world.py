"""Tasks in virtual time: order, waiting, what stands in for threads and pools, and taking it all back."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

import pytest

import outrider.common.clock
import outrider.edge_client.transport.threads
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.simulator.world.product import product_in
from outrider.experiments.simulator.world.standins import (
    SeededSecrets,
    VirtualEvent,
    VirtualPool,
    VirtualThreading,
)
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

    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        world.start(sleeper, name, seconds)
    start_s = time.perf_counter()
    world.run()
    assert heard == [("first", 1.0), ("second", 1.0), ("late", 2.0)]
    assert time.perf_counter() - start_s < 2.0, "real time passed"


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


def test_threads_and_events_are_tasks(world):
    heard, event = [], VirtualEvent(world)
    thread = VirtualThreading(world).Thread(target=lambda: (world.sleep(1.0), event.set()), daemon=True)

    def task():
        thread.start()
        heard.append((event.wait(0.5), event.wait(5.0), world.now_s))
        thread.join()
        heard.append(thread.is_alive())

    world.start(task)
    world.run()
    assert heard == [(False, True, 1.0), False]


def test_secrets_are_the_same_for_the_same_seed():
    assert SeededSecrets(3).token_bytes(16) == SeededSecrets(3).token_bytes(16)
    assert SeededSecrets(3).token_bytes(16) != SeededSecrets(4).token_bytes(16)


def test_the_product_lives_in_virtual_time_inside_and_in_real_time_after(world):
    clock = RemoteVerifier.__init__.__kwdefaults__["clock"]
    with product_in(world, 1, lambda *_: None, lambda *_: None):
        assert clock.now() == world.now_s == 0.0
        assert outrider.common.clock.time.monotonic() == 0.0
        assert outrider.edge_client.transport.threads.SimpleQueue is not SimpleQueue
    assert clock.now() > 0.0
    assert outrider.common.clock.time is time
    assert outrider.edge_client.transport.threads.SimpleQueue is SimpleQueue
