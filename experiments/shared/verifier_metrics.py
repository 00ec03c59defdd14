"""Reads what a verifier's admin port says of it: `/metrics` as numbers by name, and its memory's peaks."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.common.errors import LinkError

PREFIX = "outrider_verifier_"
TIMEOUT_S = 5.0
_SAMPLE = re.compile(rf"^{PREFIX}(\w+(?:\{{[^}}]*\}})?) (\S+)$", re.MULTILINE)


def read_metrics(admin_url: str) -> dict[str, float]:
    """Returns every sample by its name without the prefix, labels as they are printed: `kv_blocks{state="used"}`.

    Raises `LinkError` naming the address where it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{admin_url.rstrip('/')}/metrics", timeout=TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (OSError, ValueError) as error:
        raise LinkError(f"no metrics from the admin port at {admin_url}: {error}") from error
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Holds the most memory that a verifier used since it started. Without a GPU its own are None."""

    kv_tokens: int  # that sessions held at once
    kv_share: float  # of the pool
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None

    @property
    def line(self) -> str:
        """Returns the peaks for a person."""
        text = f"verifier's peaks: {self.kv_tokens} tokens of KV, {self.kv_share:.1%} of the pool"
        if self.gpu_allocated_bytes is None or self.gpu_reserved_bytes is None:
            return text
        allocated_gb, reserved_gb = self.gpu_allocated_bytes / 1e9, self.gpu_reserved_bytes / 1e9
        return f"{text}; GPU {allocated_gb:.2f} GB allocated, {reserved_gb:.2f} GB reserved"


def memory_peaks(metrics: Mapping[str, float]) -> MemoryPeaks:
    """Returns the peaks among what `read_metrics` found."""
    gpu = [metrics.get(f'gpu_memory_peak_bytes{{kind="{kind}"}}') for kind in ("allocated", "reserved")]
    return MemoryPeaks(
        int(metrics["kv_peak_blocks"] * metrics["kv_block_tokens"]),
        round(metrics["kv_peak_share"], 6),
        *(None if value is None else int(value) for value in gpu),
    )
