"""Several processes that train one model: each takes its rows of every batch, and they average gradients once
a step.

Two processes of one thread each keep two cores busier than one process of two, because they meet once a step
and not at every operation; and where something else takes a core they slow down in proportion, while a
two-thread process waits at every operation for the slower thread.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""A worker waits this long for another, which may be suspended; a dead one is noticed at once."""


@dataclass(frozen=True)
class Group:
    """Is this process's place among the workers; the methods are collective, and do nothing for one
    worker."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Returns whether this worker keeps the clock, prints and saves."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the workers."""
        self._reduce(tensors, self.size)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the workers."""
        self._reduce(tensors, 1)

    def follow(self, values: Sequence[float]) -> list[float]:
        """Returns the first worker's values, on every worker."""
        if self.size == 1:
            return list(values)
        message = torch.tensor(values, dtype=torch.float64)
        distributed.broadcast(message, src=0)
        return [float(value) for value in message]

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the rows of all workers, in order of rank: [rows, ...] each, of one shape → [size *
        rows, ...]."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def own(self, num_rows: int) -> slice:
        """Returns this worker's rows of a batch. Raises ValueError where they cannot be shared out evenly."""
        if num_rows % self.size:
            raise ValueError(f"--workers {self.size} does not divide a batch of {num_rows} rows")
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def _reduce(self, tensors: Sequence[Tensor], divisor: int) -> None:
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        flat.div_(divisor)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()


SOLO = Group()
"""A process that trains alone."""


def run_workers(num_workers: int, task: Callable[[Group], T]) -> T:
    """Run `task` in this process and in `num_workers - 1` others, and return what it returned here.

    `task` must pickle (a `functools.partial` of a module's function). With several workers each has one
    thread. The others end with this process. Raises RuntimeError for one that ends before it has begun.
    """
    if num_workers == 1:
        return task(SOLO)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        others: list[BaseProcess] = []
        try:
            for rank in range(1, num_workers):
                ready, is_ready = context.Pipe(duplex=False)
                group = Group(rank, num_workers)
                other = context.Process(target=_run_other, args=(group, store, task, is_ready), daemon=True)
                other.start()
                others.append(other)
                _wait_for(other, ready)
            with _Joined(Group(0, num_workers), store) as group:
                result = task(group)
        finally:
            for process in others:
                process.join(timeout=5)
                process.kill()
    return result


def _wait_for(process: BaseProcess, ready: Connection) -> None:
    """Waits until the worker runs: one that cannot would be waited for at the first meeting, patiently."""
    if process.sentinel in multiprocessing.connection.wait([process.sentinel, ready]):
        process.join()
        raise RuntimeError(
            f"{process.name} of the training ended with {process.exitcode} before it had begun"
        )
    ready.recv()


def _run_other(group: Group, store: Path, task: Callable[[Group], object], is_ready: Connection) -> None:
    from outrider.training.common.runtime import keep_freed_memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first worker decides
    keep_freed_memory()
    is_ready.send(True)
    with _Joined(group, store):
        try:
            task(group)
        except RuntimeError as error:
            if "closed" not in str(error).lower():  # by the first worker, which says why
                raise


class _Joined:
    def __init__(self, group: Group, store: Path) -> None:
        self._group, self._store = group, store

    def __enter__(self) -> Group:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self._store}",
            rank=self._group.rank,
            world_size=self._group.size,
            timeout=_PATIENCE,
        )
        return self._group

    def __exit__(self, *_: object) -> None:
        distributed.destroy_process_group()
