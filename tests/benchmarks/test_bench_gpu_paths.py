"""What `make bench-gpu-paths` counts in a verify step."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from benchmarks.gpu_paths import dispatch
from outrider.kernels import paged_attention


def test_a_step_has_two_launches_a_layer_however_many_sessions_it_has() -> None:
    kernels = paged_attention._attend_split, paged_attention._combine
    (measure,), details = dispatch.run()
    counts = details["counts"]
    assert counts["lean"]["launches"] == counts["transformers"]["launches"] == 2 * 28
    assert measure.value == counts["lean"]["calls"] < 64 * 28, (
        "some calls are made for each session of each layer"
    )
    assert (paged_attention._attend_split, paged_attention._combine) == kernels
