"""Measures the embedded target's forwards: one process, no network."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.timing import alternate, median_ratio, time_s
from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.models import EMBEDDED

ROW_COUNTS = (1, 5, 9)
PROMPT_TOKENS = 128
NUM_TURNS = 21


def measure_forwards(num_threads: int) -> dict[str, Any]:
    """Times forwards that feed and score so many rows after a prompt of `PROMPT_TOKENS`, in float32.

    Returns `forward_ms`, the median ms by number of rows, and `forward_ratio`, the same : one row.
    """
    import torch

    from outrider.cloud_verifier.backends.loading import load_target

    torch.set_num_threads(num_threads)
    backend = load_target(EMBEDDED / "target", dtype="float32")
    seconds = alternate({str(n): partial(_forward_s, backend, n) for n in ROW_COUNTS}, NUM_TURNS)
    return {
        "num_threads": num_threads,
        "prompt_tokens": PROMPT_TOKENS,
        "forward_ms": {name: round(1e3 * median(each), 3) for name, each in seconds.items()},
        "forward_ratio": {n: round(median_ratio(each, seconds["1"]), 3) for n, each in seconds.items()},
    }


def _forward_s(backend: TargetBackend, num_rows: int) -> float:
    prompt = [(97 * i + 13) % backend.num_tokens for i in range(PROMPT_TOKENS)]
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, prompt, 0)])
    seconds = []
    for _ in range(9):
        item = ForwardItem(sequence, prompt[:num_rows], num_rows)
        seconds.append(time_s(partial(backend.forward, [item])))
        backend.truncate(sequence, len(prompt))
    backend.close(sequence)
    return median(seconds)
