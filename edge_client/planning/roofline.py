"""The time of a forward from a model's size and a machine's memory bandwidth and compute (roofline model)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.common.config.units import show_scaled


@dataclass(frozen=True, slots=True)
class Roofline:
    """Predicts the forwards of one model on one machine (Williams et al. 2009).

    A forward of n rows (tokens) reads every weight once and computes two operations per weight and row:

        seconds(n) = max(num_params * bytes_per_param / bandwidth, 2 * num_params * n / flops)

    Up to `compute_bound_rows` rows cost as much as one, so verifying a draft of fewer tokens is free. Left
    out: attention over the KV cache, kernel launches, and that machines reach some 60 to 90 % of either
    bound.
    """

    num_params: float
    bytes_per_param: float
    bandwidth: float  # of memory, bytes a second
    flops: float  # operations a second

    @property
    def weights_s(self) -> float:
        """Returns the seconds to read all weights once."""
        return self.num_params * self.bytes_per_param / self.bandwidth

    @property
    def row_s(self) -> float:
        """Returns the seconds to compute one row."""
        return 2 * self.num_params / self.flops

    def forward_s(self, num_rows: int) -> float:
        """Returns the seconds of a forward of `num_rows`."""
        return max(self.weights_s, num_rows * self.row_s)

    @property
    def compute_bound_rows(self) -> int:
        """Returns the fewest rows whose compute takes at least as long as reading the weights."""
        return max(1, math.ceil(self.weights_s / self.row_s))

    def __str__(self) -> str:
        size = f"{show_scaled(self.num_params)} parameters of {self.bytes_per_param:g} bytes".replace(
            "G par", "B par"
        )
        machine = f"{show_scaled(self.bandwidth, 'B/s')}, {show_scaled(self.flops, 'FLOPS')}"
        return f"{size}, {machine}; compute-bound from {self.compute_bound_rows} rows on"
