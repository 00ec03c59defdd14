"""Several threads for one compiled function: those of the OpenMP runtime that torch multiplies with.

They wait actively between its products, so that a function on other threads would compete with them for the cores.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Of a function in C, what it is given, how many threads call it, and flags.
Run = Callable[[int, int, int, int], None]
CALL = types.CPointer(types.int64)  # what such a function is given


@functools.cache
def find_runtime() -> Run | None:
    """Returns what has a function called by every thread and waits for all; None where no such runtime is loaded."""
    try:
        run = ctypes.CDLL(None).GOMP_parallel  # GCC's name, which LLVM's and Intel's runtimes have too
    except (OSError, AttributeError, TypeError):
        return None
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run.restype = None
    return run


@intrinsic  # type: ignore[untyped-decorator]
def take(_: Any, numbers: Any, index: Any) -> Any:
    """Returns numbers[index], which is one more from then on: for each thread another."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), ir.IntType(64)(1), "monotonic")

    return types.int64(numbers, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_: Any, address: Any) -> Any:
    """Returns what lies at an address, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate
