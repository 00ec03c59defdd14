"""The choice of kernels for a verifier's rows: compiled ones, or the reference where those fail a check."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)


class RowKernels(Protocol):
    """Declares the functions of `outrider.kernels.reference`, whose docstrings specify them."""

    def logsumexp(
        self, row: NDArray[np.float32], temperature: float, threshold: float, /
    ) -> tuple[float, float]:
        """Computes `outrider.kernels.reference.logsumexp`."""

    def gumbel_argmax(
        self, row: NDArray[np.float32], temperature: float, threshold: float, key: NDArray[np.uint64], /
    ) -> tuple[int, float, float]:
        """Computes `outrider.kernels.reference.gumbel_argmax`."""

    def gumbel_argmax_draft(
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
    ) -> NDArray[np.float64]:
        """Computes `outrider.kernels.reference.gumbel_argmax_draft`."""

    def sample(
        self,
        row: NDArray[np.float32],
        temperature: float,
        threshold: float,
        key: NDArray[np.uint64],
        top: float,
        log_sum: float,
        changed_ids: NDArray[np.int64],
        changed_weights: NDArray[np.float64],
        /,
    ) -> int:
        """Computes `outrider.kernels.reference.sample`."""

    def entropy(
        self, row: NDArray[np.float32], temperature: float, threshold: float, top: float, log_sum: float, /
    ) -> float:
        """Computes `outrider.kernels.reference.entropy`."""

    def truncation_threshold(
        self, row: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, /
    ) -> float:
        """Computes `outrider.kernels.reference.truncation_threshold`."""

    def mask_scores(self, scores: NDArray[np.float32], words: NDArray[np.int32], /) -> None:
        """Computes `outrider.kernels.reference.mask_scores`."""


@functools.cache
def load_row_kernels() -> RowKernels:
    """Returns the kernels of this process.

    The first call compiles or loads them for seconds: make it at start.
    """
    from outrider.kernels import reference

    try:
        from outrider.kernels.host import rows as host

        _check(host, reference)
    except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
        log.warning("verification is not compiled, and ten times slower over large vocabularies: %s", error)
        return reference
    return host


def _check(kernels: RowKernels, reference: RowKernels) -> None:
    """Raises RuntimeError where the two disagree on a row."""
    row = np.sin(np.arange(3001, dtype=np.float32) * 12.9898) * np.float32(6)
    key = np.array([2**64 - 1, 0, 77, 0], np.uint64)
    expected, got = reference.gumbel_argmax(row, 0.5, 2.0, key), kernels.gumbel_argmax(row, 0.5, 2.0, key)
    if got[:2] != expected[:2] or not math.isclose(got[2], expected[2], rel_tol=1e-5):
        raise RuntimeError(f"the compiled kernels give {got} instead of {expected}")


def has_device_kernels(device: str, vocab_size: int, num_tokens: int) -> bool:
    """Compiles `outrider.kernels.device` and returns whether it agrees with the reference on such rows."""
    try:
        _check_device(device, vocab_size, num_tokens)
    except Exception as error:  # no Triton, no compiler for it, a GPU that it does not support
        log.warning("logits are verified on the CPU, not on %s: %s", device, error)
        return False
    return True


def _check_device(device: str, vocab_size: int, num_tokens: int) -> None:
    """Raises RuntimeError where a threshold, a sample or a sum differs from the reference's."""
    import torch

    from outrider.kernels import device as kernels
    from outrider.kernels import reference
    from outrider.kernels.device_truncation import truncation_thresholds

    # Of different alignment, which may be compiled differently.
    rows = np.sin(np.arange(2 * vocab_size, dtype=np.float32) * 12.9898).reshape(2, vocab_size) * 6
    keys = np.array([[2**64 - 1, 0, 77, 0]] * 2, np.uint64)
    temperatures, top_k, top_p = np.full(2, 0.5, np.float32), num_tokens // 2, 0.9
    cuts = (np.arange(2), np.full(2, top_k, np.int32), np.full(2, top_p), np.full(2, -math.inf))

    def on_device(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    logits = on_device(rows)[:, :num_tokens]
    thresholds = truncation_thresholds(logits, on_device(temperatures), *map(on_device, cuts))
    arguments = logits, on_device(temperatures), thresholds, on_device(keys.view(np.int64))
    found = kernels.gumbel_argmax(*arguments)
    changed = np.full((2, kernels.MAX_CHANGED), kernels.NO_CHANGE, np.int32)
    changed[:, 0] = found.token_ids.cpu().numpy()
    weights = on_device(np.full(changed.shape, -math.inf))
    changes = kernels.Changes(
        on_device(cuts[0]), found.tops.double(), found.log_sums, on_device(changed), weights
    )
    picked = kernels.sample(*arguments, changes).tolist()
    for row, one in enumerate(rows[:, :num_tokens]):
        threshold = reference.truncation_threshold(one, 0.5, top_k, top_p, 0.0)
        got = float(thresholds[row]), int(found.token_ids[row]), picked[row], float(found.log_sums[row])
        token_id, top, log_sum = reference.gumbel_argmax(one, 0.5, threshold, keys[row])
        without = changed[row, :1].astype(np.int64), np.array([-math.inf])
        other = reference.sample(one, 0.5, threshold, keys[row], top, log_sum, *without)
        expected = threshold, token_id, other, log_sum
        if got[:3] != expected[:3] or not math.isclose(got[3], log_sum, rel_tol=1e-4, abs_tol=1e-4):
            raise RuntimeError(f"the kernels give {got} instead of {expected}")
