"""Pools of threads that are all there from the beginning."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def start_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads run already. By itself a pool starts each when it first needs one more, hours into
    a service that seldom does: its memory and threads then seem to leak."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    all_run = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_run.wait)
    all_run.wait()
    return pool
