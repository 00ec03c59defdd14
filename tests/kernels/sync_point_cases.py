"""How often a verify step waits for a GPU, as `make bench-gpu-paths` counts it: its kernels are interpreted.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

from __future__ import annotations

from benchmarks.gpu_paths import sync_points
from outrider.common.types import Method


def steps_of(found: sync_points.Verifier) -> list[dict[str, int]]:
    return [dict(each) for of_steps in found.steps.values() for each in of_steps]


def test_a_whole_step_has_one_upload_and_one_download() -> None:
    found = sync_points.count_steps(sync_points.PENALIZED, (Method.BLOCK,))
    assert steps_of(found) == [{"upload": 1, "download": 1}] * 7


def test_what_is_more_is_counted() -> None:
    with sync_points.reading_a_number(), sync_points.moving_at_once():
        planted = steps_of(sync_points.count_steps(sync_points.GREEDY, (Method.COUPLED,)))
    read = [each.pop("aten._local_scalar_dense.default") for each in planted]
    assert read == [1, 1, 1, 2, 2, 1, 2], "of each round"
    assert [each.pop("upload") for each in planted] == [1, 1, 1, 1, 1, 3, 1], "after the tree"
    assert planted == [{"download": 1}] * 7
