"""What `make bench-gpu-paths` counts in a verify step."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks.results_file import ROOT

COUNT = """
import json
from benchmarks.gpu_paths import dispatch

def kernels():
    return [vars(module)[name] for module, names in dispatch.KERNELS.items() for name in names]

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

counts = [sync_points.count_round(method, sync_points.PENALIZED) for method in (Method.BLOCK, Method.CANDIDATES)]
with sync_points.reading_a_number():
    counts.append(sync_points.count_round(Method.COUPLED, sync_points.SAMPLED))
print(json.dumps(counts))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_a_step_has_one_upload_and_one_download_and_a_number_that_is_read_is_counted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SYNC_POINTS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    *steps, planted = json.loads(run.stdout)
    assert steps == [{"upload": 1, "download": 1}] * 2, run.stderr
    assert planted == {"upload": 1, "download": 1, "aten._local_scalar_dense.default": 2}
