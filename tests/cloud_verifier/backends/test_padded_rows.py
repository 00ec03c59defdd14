"""The row counts of forwards without exact rows: few, however the sizes of steps vary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.products.row_plan import padded_rows

TEXT = [(37 * i + 11) % 300 for i in range(90)]


class ProductSizes(TorchDispatchMode):
    """Notes over how many rows oneDNN computes products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.found.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_steps_of_all_sizes_compute_the_same_over_few_sizes_of_products(
    target_of: Callable[[str], Path],
) -> None:
    backend = load_target(target_of("qwen3"), kv_tokens=1024, exact_rows="off")

    def logits_of(num_tokens: int) -> Any:
        sequence = backend.new_sequence()
        logits = backend.forward([ForwardItem(sequence, TEXT[:num_tokens], num_tokens)])
        backend.close(sequence)
        return logits

    whole = logits_of(len(TEXT))
    with ProductSizes() as sizes:
        for num_tokens in range(2, len(TEXT) + 1):
            np.testing.assert_allclose(logits_of(num_tokens), whole[:num_tokens], atol=2e-4)
    by_our_kernel = range(1, backend.decoder.most_own_rows + 1)
    assert sizes.found == {*range(2, 33), *range(34, 65, 2), *range(68, 93, 4)}.difference(by_our_kernel)


def test_rows_are_padded_by_at_most_a_sixteenth_to_one_of_16_sizes_between_powers_of_two() -> None:
    padded = {num_rows: padded_rows(num_rows) for num_rows in range(1, 4097)}
    assert all(num_rows <= more <= num_rows * 17 / 16 for num_rows, more in padded.items())
    assert len(set(padded.values())) == 32 + 16 * 7
