"""What `make bench-gpu-paths` counts in a verify step."""

from __future__ import annotations

import importlib.util
import json
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
