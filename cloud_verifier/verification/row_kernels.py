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
    """The functions of `outrider.kernels.reference`, which says what each gives."""

    def survey(self, row: NDArray[np.float32], temperature: float, edge: float, /) -> tuple[float, float]: ...

    def scan(
        self, row: NDArray[np.float32], temperature: float, edge: float, key: NDArray[np.uint64], /
    ) -> tuple[int, float, float]: ...

    def scan_draft(
        self,
        rows: NDArray[np.float32],
        num_tokens: int,
        first: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        position: int,
        drafted: NDArray[np.int64],
        /,
    ) -> NDArray[np.float64]: ...

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

    def find_edge(
        self, row: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, /
    ) -> float: ...


@functools.cache
def load_row_kernels() -> RowKernels:
    """The kernels of this process. The first call compiles or loads them: seconds, so make it at start."""
    from outrider.kernels import reference

    try:
        from outrider.kernels import host

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


def has_device_kernels(device: str, vocab_size: int, num_tokens: int) -> bool:
    """Whether `outrider.kernels.device` gives there what the reference gives. Compiles it, for rows of this shape."""
    try:
        _check_device(device, vocab_size, num_tokens)
    except Exception as error:  # no Triton, no compiler behind it, a GPU it does not know
        log.warning("logits are verified on the CPU, not on %s: %s", device, error)
        return False
    return True


def _check_device(device: str, vocab_size: int, num_tokens: int) -> None:
    """Raises RuntimeError where a sample or a sum differs from the reference's."""
    import torch

    from outrider.kernels import device as kernels
    from outrider.kernels import reference

    rows = np.sin(np.arange(2 * vocab_size, dtype=np.float32) * 12.9898).reshape(2, vocab_size) * 6
    logits = torch.from_numpy(rows).to(device)[:, :num_tokens]
    key = np.array([2**64 - 1, 0, 77, 0], np.uint64)
    bits = torch.from_numpy(key.view(np.int64)).to(device)
    edge = float(np.float32(2.0)) if num_tokens > 1000 else -math.inf
    scanned = kernels.scan(logits, logits.new_full((2,), 0.5), logits.new_full((2,), edge), bits.repeat(2, 1))
    for row in range(2):  # of different alignment, which may be compiled differently
        one = rows[row, :num_tokens]
        token_id, top, log_sum = reference.scan(one, 0.5, edge, key)
        changed = np.full((1, kernels.MAX_CHANGED), kernels.NO_CHANGE, np.int32)
        changed[0, 0] = token_id
        weights = torch.full(changed.shape, -math.inf, dtype=torch.float64, device=device)
        tops, log_sums = torch.tensor([[top], [log_sum]], dtype=torch.float64, device=device)
        picked = kernels.sample(
            logits[row : row + 1],
            logits.new_full((1,), 0.5),
            logits.new_full((1,), edge),
            bits[None],
            tops,
            log_sums,
            torch.from_numpy(changed).to(device),
            weights,
        )
        expected_pick = reference.sample(
            one, 0.5, edge, key, top, log_sum, changed[0, :1].astype(np.int64), np.array([-math.inf])
        )
        got = int(scanned.token_ids[row]), int(picked[0]), float(scanned.log_sums[row])
        expected = token_id, expected_pick, log_sum
        if got[:2] != expected[:2] or not math.isclose(got[2], log_sum, rel_tol=1e-4, abs_tol=1e-4):
            raise RuntimeError(f"the kernels give {got} instead of {expected}")
