"""What `make bench-gpu-paths` counts in a verify step; copies and waits are in tests/kernels/sync_point_cases.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu_paths.fake_device import FakeDevice


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_a_step_has_few_calls_a_layer_however_many_sessions_it_has() -> None:
    from benchmarks.gpu_paths import dispatch

    def kernels() -> list[object]:
        return [vars(module)[name] for module, name in dispatch.KERNELS]

    before = kernels()
    with torch.random.fork_rng():
        (measure,), details = dispatch.run()
    assert kernels() == before, "a stand-in was left in place"
    counts = details["counts"]
    assert counts["transformers"]["launches"] == 2 * 28
    assert counts["cuda"]["launches"] == 6 * 28 + 1
    assert measure.value == counts["cuda"]["calls"] <= 400


def write(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows[ids, ids] = 1.0  # CUDA copies the number, and waits
    return rows


CALLS: list[tuple[Callable[[torch.Tensor, torch.Tensor], Any], dict[str, int]]] = [
    (lambda rows, ids: rows[ids, ids] + 1, {}),
    (lambda rows, ids: rows[:, 1].fill_(2), {}),
    (lambda rows, ids: rows.index_copy_(0, ids, rows * 2), {}),
    (lambda rows, ids: torch.tensor([1], device=rows.device), {"upload": 1}),
    (lambda rows, ids: torch.tensor(1, device=rows.device), {"upload": 1}),
    (lambda rows, ids: rows[[1, 0]], {"upload": 1}),
    (lambda rows, ids: rows[1, [2, 0]], {"upload": 1}),
    (lambda rows, ids: rows[torch.tensor([1])], {"upload": 1}),
    (write, {"upload": 1}),
    (lambda rows, ids: rows.tolist(), {"download": 1}),
    (lambda rows, ids: rows.cpu(), {"download": 1}),
    (lambda rows, ids: rows[0, 0].item(), {"aten._local_scalar_dense.default": 1}),
    (lambda rows, ids: rows[rows > 1], {"aten.index.Tensor": 1}),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_the_fake_device_computes_and_counts_what_cuda_copies_or_waits_for(number: int) -> None:
    call, expected = CALLS[number]

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(6.0).view(2, 3), torch.tensor([0, 1])

    with FakeDevice(()) as device:
        found = call(*map(device.put, make()))
        assert device.counts == expected
        values = found.tolist() if isinstance(found, torch.Tensor) else found
    on_host = call(*make())
    assert values == (on_host.tolist() if isinstance(on_host, torch.Tensor) else on_host)
