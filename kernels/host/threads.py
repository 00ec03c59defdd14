"""Helper threads: they share the work of the thread that calls a compiled function, as long as a core is free.

An OpenMP runtime waits for all of its threads at the end of every product, also for one that has not begun because the
core is in use: milliseconds, where the product takes microseconds. Here a thread is waited for only while it computes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from outrider.kernels.host.compiler import c_function, jit

CALL = types.CPointer(types.int64)  # what a function in C is given: numbers and addresses
# Of a pool of threads: the function and what it is given, whether it may be begun, how many helpers are in it, how many
# calls there were, how many helpers sleep, and what they sleep at.
_FUNCTION, _GIVEN, _IS_OPEN, _NUM_INSIDE, _NUM_CALLS, _NUM_SLEEPING, _SEMAPHORE = range(7)
_POST, _WAIT, _YIELD = range(7, 10)  # addresses of functions of the C library
_IS_OVER = 10  # helpers end
_LEAD = 11  # address of the function that has helpers called
_SIZE = 16
_SEMAPHORE_BYTES = 64  # twice what any C library takes
# A helper spins for so many calls of `sched_yield`, some 180 us, before it sleeps: longer than it takes from a product
# of a forward to the next. Whatever else has to run gets the core in between. With 150 a forward of 24 rows of the
# embedded target took a tenth longer (Zen 5).
_NUM_YIELDS = 300
_INDEX = ir.IntType(64)
_FUNCTION_IN_C = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Helpers:
    """So many threads, which end with the process. Any thread may call; while one does, others compute alone."""

    def __init__(self, num_helpers: int) -> None:
        self._lock = threading.Lock()
        self._pool = np.zeros(_SIZE, np.int64)
        self._pool_at = self._pool.ctypes.data
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._lead, self._end = _FUNCTION_IN_C(_lead.address), _FUNCTION_IN_C(_end.address)
        self._pool[_LEAD] = _lead.address
        self.num_helpers = num_helpers if num_helpers > 0 and self._has_semaphore() else 0
        self._threads = [
            threading.Thread(
                target=_FUNCTION_IN_C(_serve.address),
                args=(self._pool_at,),
                name="outrider-kernels",
                daemon=True,
            )
            for _ in range(self.num_helpers)
        ]
        for thread in self._threads:
            thread.start()
        if self._threads:
            atexit.register(self._close)
            os.register_at_fork(after_in_child=self._forget)

    def _close(self) -> None:
        """Ends the helpers before the interpreter frees what they run."""
        with self._lock:
            self.num_helpers = 0
            self._end(self._pool_at)
        for thread in self._threads:
            thread.join()

    def _forget(self) -> None:
        """In a forked process there are no helpers."""
        self._lock, self.num_helpers, self._threads = threading.Lock(), 0, []

    def _has_semaphore(self) -> bool:
        """Prepares what helpers sleep at; returns whether this system has it."""
        try:
            library = ctypes.CDLL(None)
            used = library.sem_post, library.sem_wait, library.sched_yield
            is_made = bool(library.sem_init(self._semaphore, 0, 0) == 0)
        except (OSError, AttributeError, TypeError):
            return False
        self._pool[_SEMAPHORE] = ctypes.addressof(self._semaphore)
        self._pool[_POST : _YIELD + 1] = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in used]
        return is_made

    def run(self, function_at: int, call_at: int) -> None:
        """Has a function in C (`compiler.c_function`) called by this thread and by helpers, and returns when all of
        these have left it. Both are addresses; each thread takes what is left to do from the call (`take`)."""
        with self.lent() as pool_at:
            if pool_at:
                self._pool[_FUNCTION], self._pool[_GIVEN] = function_at, call_at
                self._lead(pool_at)
            else:
                _in_c(function_at)(call_at)

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        """Yields the address by which a compiled function has parts of its work shared (`share`); 0 where there are no
        helpers, or another thread has them."""
        if not (self.num_helpers and self._lock.acquire(blocking=False)):
            yield 0
            return
        try:
            yield self._pool_at
        finally:
            self._lock.release()


@functools.cache
def helpers(num_threads: int) -> Helpers:
    """Returns those of this process for so many threads, the calling one included."""
    return Helpers(num_threads - 1)


def _atomic(operation: str) -> Any:
    """Returns a function of numbers, an index and a value, done at once for all threads, that returns the number as it
    was."""

    @intrinsic  # type: ignore[untyped-decorator]
    def change(_: Any, numbers: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.atomic_rmw(operation, builder.gep(values[0], [values[1]]), values[2], "seq_cst")

        return types.int64(numbers, types.int64, types.int64), generate

    return change


_add, _exchange = _atomic("add"), _atomic("xchg")


@jit()
def take(numbers: Any) -> Any:
    """Returns the first of the numbers, which is one more from then on: for each thread another."""
    return _add(numbers, 0, 1)


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_: Any, address: Any) -> Any:
    """Returns what lies at an address, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _load(_: Any, numbers: Any, index: Any) -> Any:
    """Returns a number as the last thread wrote it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "seq_cst", 8)

    return types.int64(numbers, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _compare_exchange(_: Any, numbers: Any, index: Any, before: Any, after: Any) -> Any:
    """Changes a number if it is `before`, at once for all threads; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.gep(values[0], [values[1]])
        found = builder.cmpxchg(place, values[2], values[3], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(numbers, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call(_: Any, address: Any, argument: Any) -> Any:
    """Calls the function in C at an address with a number; returns what it does, where that is an int."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [_INDEX])
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])

    return types.int32(types.int64, types.int64), generate


@jit()
def _take_sleeper(pool: Any) -> Any:
    """Takes one off the number of helpers that sleep; returns whether there was one. Who takes one off posts the
    semaphore, unless it is a helper that does not go to sleep after all."""
    num_sleeping = _load(pool, _NUM_SLEEPING)
    while num_sleeping > 0:
        if _compare_exchange(pool, _NUM_SLEEPING, num_sleeping, num_sleeping - 1):
            return True
        num_sleeping = _load(pool, _NUM_SLEEPING)
    return False


@jit()
def _wake(pool: Any) -> None:
    """Wakes two helpers, of which each wakes two: with many cores the caller would be late to its own work."""
    for _ in range(2):
        if _take_sleeper(pool):
            call(pool[_POST], pool[_SEMAPHORE])


@c_function(types.void(CALL))
def _lead(pool: Any) -> None:
    """Calls the function, lets helpers call it meanwhile, and waits until all have left it."""
    _exchange(pool, _IS_OPEN, 1)
    _add(pool, _NUM_CALLS, 1)
    _wake(pool)
    call(pool[_FUNCTION], pool[_GIVEN])
    _exchange(pool, _IS_OPEN, 0)
    while _load(pool, _NUM_INSIDE):
        pass


@c_function(types.void(CALL))
def _end(pool: Any) -> None:
    """Has all helpers end."""
    _exchange(pool, _IS_OVER, 1)
    _add(pool, _NUM_CALLS, 1)
    _wake(pool)


@c_function(types.void(CALL))
def _serve(pool: Any) -> None:
    """Is what a helper does until it is to end: it waits for calls, and calls their functions."""
    seen = 0
    while not _load(pool, _IS_OVER):
        num_yields = 0
        while _load(pool, _NUM_CALLS) == seen and num_yields < _NUM_YIELDS:
            call(pool[_YIELD], 0)
            num_yields += 1
        if _load(pool, _NUM_CALLS) == seen:
            _add(pool, _NUM_SLEEPING, 1)
            if _load(pool, _NUM_CALLS) == seen or not _take_sleeper(pool):
                while call(pool[_WAIT], pool[_SEMAPHORE]):  # until it is posted: a signal interrupts it
                    pass
                _wake(pool)
            continue
        seen = _load(pool, _NUM_CALLS)
        _add(pool, _NUM_INSIDE, 1)
        if _load(pool, _IS_OPEN):  # the caller does not return as long as this one is inside
            call(pool[_FUNCTION], pool[_GIVEN])
        _add(pool, _NUM_INSIDE, -1)


@jit()
def share(pool_at: Any, function_at: Any, call_at: Any) -> None:
    """Is `Helpers.run` for compiled functions: helpers take part where they are lent, and `pool_at` is not 0."""
    if pool_at:
        pool = carray(pointer(pool_at), (_SIZE,), np.int64)
        pool[_FUNCTION], pool[_GIVEN] = function_at, call_at
        call(pool[_LEAD], pool_at)
    else:
        call(function_at, call_at)


def run_c(function: Any, *numbers: int) -> None:
    """Calls a function in C (`compiler.c_function`) with these numbers and addresses."""
    call_c(function, (ctypes.c_int64 * len(numbers))(*numbers))


def call_c(function: Any, given: Any) -> None:
    """Calls a function in C with what lies at an address."""
    _in_c(function.address)(given)


@functools.cache
def _in_c(function_at: int) -> Any:
    return _FUNCTION_IN_C(function_at)
