"""Times what a GPU is given to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

FLUSHED_BYTES = 2**28  # more than any GPU's second cache
NUM_WARMUP = 2


def device_ms(run: Callable[[], object], device: torch.device, num_turns: int) -> float:
    """Returns the median time of some operations on a GPU whose caches hold nothing of theirs.

    Before each turn other memory is read, not written: to write changed lines of the cache back takes time of the turn
    (5 µs of a product of 15, on an H100). That takes longer than to launch a few kernels, so launches are not timed.
    """
    new_event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)
    events = [(new_event(), new_event()) for _ in range(num_turns)]
    with torch.cuda.device(device):
        other = torch.zeros(FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
        for _ in range(NUM_WARMUP):
            run()
        for begin, end in events:
            other.sum()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events))
