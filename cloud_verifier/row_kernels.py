"""Which kernels a verifier's rows run on: compiled ones, or the plain reference where those do not work."""

from __future__ import annotations

import functools
import logging
import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)


class RowKernels(Protocol):
    """The functions of `kernels.reference`, which says what each gives."""

    def survey(self, row: NDArray[np.float32], temperature: float, edge: float, /) -> tuple[float, float]: ...

    def scan(
        self, row: NDArray[np.float32], temperature: float, edge: float, key: NDArray[np.uint64], /
    ) -> tuple[int, float, float]: ...

    def sample(
        self,
        row: NDArray[np.float32],
        temperature: float,
        edge: float,
        key: NDArray[np.uint64],
        top: float,
        log_sum: float,
        changed_ids: NDArray[np.int64],
        changed_weights: NDArray[np.float64],
        /,
    ) -> int: ...

    def entropy(
        self, row: NDArray[np.float32], temperature: float, edge: float, top: float, log_sum: float, /
    ) -> float: ...

    def nucleus_edge(self, row: NDArray[np.float32], temperature: float, top_p: float, /) -> float: ...


@functools.cache
def load_row_kernels() -> RowKernels:
    """The kernels of this process. The first call compiles or loads them: seconds, so make it at start."""
    from kernels import reference

    try:
        from kernels import host

        _check(host, reference)
    except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
        log.warning("verification is not compiled, and ten times slower over large vocabularies: %s", error)
        return reference
    return host


def _check(kernels: RowKernels, reference: RowKernels) -> None:
    """Raises RuntimeError where the two disagree on a row."""
    row = np.sin(np.arange(3001, dtype=np.float32) * 12.9898) * np.float32(6)
    key = np.array([2**64 - 1, 0, 77, 0], np.uint64)
    expected, got = reference.scan(row, 0.5, 2.0, key), kernels.scan(row, 0.5, 2.0, key)
    if got[:2] != expected[:2] or not math.isclose(got[2], expected[2], rel_tol=1e-5):
        raise RuntimeError(f"the compiled kernels give {got} instead of {expected}")
