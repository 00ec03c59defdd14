"""Pools whose threads are all there from the beginning."""

from __future__ import annotations

import threading

from outrider.common.process.thread_pool import start_pool


def test_a_pool_has_all_of_its_threads_before_it_is_used() -> None:
    pool = start_pool(3, "early")
    try:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("early")]
        assert len(names) == 3
        assert pool.submit(lambda: 5).result() == 5
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("early")] == names
    finally:
        pool.shutdown()
