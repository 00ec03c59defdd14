"""What `make bench-gpu-paths` counts in a verify step."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu_paths.fake_device import FakeDevice
from benchmarks.results_file import ROOT

COUNT = """
import json
from benchmarks.gpu_paths import dispatch

def kernels():
    return [vars(module)[name] for module, name in dispatch.KERNELS]

before = kernels()
(measure,), details = dispatch.run()
assert kernels() == before, "a stand-in was left in place"
print(json.dumps([measure.value, details["counts"]]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_a_step_has_few_calls_a_layer_however_many_sessions_it_has() -> None:
    run = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True)
    value, counts = json.loads(run.stdout)
    assert counts["lean"]["launches"] == counts["transformers"]["launches"] == 2 * 28
    assert counts["cuda"]["launches"] == 6 * 28 + 1
    assert value == counts["cuda"]["calls"] <= 400 and counts["lean"]["calls"] < 64 * 28


SYNC_POINTS = """
import json
from benchmarks.gpu_paths import sync_points
from outrider.common.types import Method

def steps_of(found):
    return [each for of_steps in found.steps.values() for each in of_steps]

found = sync_points.count_steps(sync_points.PENALIZED, (Method.BLOCK,))
with sync_points.reading_a_number(), sync_points.moving_at_once():
    planted = sync_points.count_steps(sync_points.GREEDY, (Method.COUPLED,))
print(json.dumps([steps_of(found), steps_of(planted)]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_a_whole_step_has_one_upload_and_one_download_and_what_is_more_is_counted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SYNC_POINTS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    steps, planted = json.loads(run.stdout)
    assert steps == [{"upload": 1, "download": 1}] * 7
    read = [each.pop("aten._local_scalar_dense.default") for each in planted]
    assert read == [1, 1, 1, 2, 2, 1, 2], "of each round"
    assert [each.pop("upload") for each in planted] == [1, 1, 1, 1, 1, 3, 1], "after the tree"
    assert planted == [{"download": 1}] * 7


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
