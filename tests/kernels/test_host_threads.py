"""Helpers of one thread: what they compute has the same bits, and they are waited for only while they compute."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.kernels.host.product import PanelProduct
from outrider.kernels.host.threads import _NUM_INSIDE, _NUM_SLEEPING, Helpers


@pytest.fixture(scope="module")
def helpers() -> Helpers:
    found = Helpers(5)  # of which the caller wakes two
    assert found.num_helpers == 5
    return found


class Product:
    def __init__(self, num_rows: int = 24, num_inputs: int = 300, num_outputs: int = 1000) -> None:
        rng = np.random.default_rng(num_rows)
        self._rows = rng.standard_normal((num_rows, num_inputs), np.float32)
        self._product = PanelProduct(rng.standard_normal((num_outputs, num_inputs), np.float32), 512)
        self._num_outputs = num_outputs

    def by(self, helpers: Helpers) -> NDArray[np.float32]:
        out = np.full((len(self._rows), self._num_outputs), np.nan, np.float32)
        self._product.multiply(self._rows.ctypes.data, len(self._rows), out.ctypes.data, helpers)
        return out


def wait_until_asleep(helpers: Helpers) -> None:
    deadline = time.monotonic() + 60
    while helpers._pool[_NUM_SLEEPING] < helpers.num_helpers:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_with_helpers_and_alone_the_bits_are_the_same(helpers: Helpers) -> None:
    product = Product()
    expected = product.by(Helpers(0))
    for index in range(300):
        if index % 50 == 0:
            wait_until_asleep(helpers)
        assert np.array_equal(product.by(helpers), expected)
    assert helpers._pool[_NUM_INSIDE] == 0


def cpu_ns(helpers: Helpers) -> int:
    """What helpers have used of the processors."""
    tasks = (Path(f"/proc/self/task/{each.native_id}/schedstat") for each in helpers._threads)
    return sum(int(each.read_text().split()[0]) for each in tasks)


def test_helpers_do_take_part(helpers: Helpers) -> None:
    """Of a product that takes long enough that a thread which slept is there before its end."""
    product = Product(2000, 1000, 4000)
    before = cpu_ns(helpers)
    product.by(helpers)
    wait_until_asleep(helpers)
    assert cpu_ns(helpers) - before > 1e6


def test_helpers_that_wait_sleep() -> None:
    """Also one that was about to sleep when it was called: after pauses of about as long as it spins."""
    helpers, product, chance = Helpers(1), Product(4, 20, 200), random.Random(0)
    for _ in range(20_000):
        product.by(helpers)
        end = time.perf_counter() + chance.random() * 2e-4
        while time.perf_counter() < end:
            pass
    wait_until_asleep(helpers)
    assert helpers._pool[_NUM_SLEEPING] == helpers.num_helpers
    before = cpu_ns(helpers)
    time.sleep(0.3)
    assert cpu_ns(helpers) - before < 1e7


def test_two_threads_that_call_at_once_get_their_own_products(helpers: Helpers) -> None:
    wrong = list[int]()

    def multiply(seed: int) -> None:
        product = Product(seed)
        expected = product.by(Helpers(0))
        wrong.extend(i for i in range(200) if not np.array_equal(product.by(helpers), expected))

    threads = [threading.Thread(target=multiply, args=(seed,)) for seed in (5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("end", ["", "os.fork() or multiply()"])
def test_a_process_with_helpers_ends_and_its_fork_computes_alone(end: str) -> None:
    program = f"""
import os, numpy as np
from outrider.kernels.host.product import PanelProduct
from outrider.kernels.host.threads import helpers
rows, out = np.ones((3, 40), np.float32), np.zeros((3, 70), np.float32)
product = PanelProduct(np.ones((70, 40), np.float32), 512)
def multiply():
    out[:] = 0
    product.multiply(rows.ctypes.data, 3, out.ctypes.data, helpers(3))
    assert (out == 40).all()
multiply()
{end}
"""
    for _ in range(3):
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert found.returncode == 0 and not found.stderr
