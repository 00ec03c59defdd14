"""`bench-heads`: sessions side by side over a shape with random weights, as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu_check.shape import SHAPE_TOY
from benchmarks.gpu_check.stage import Setting
from benchmarks.heads.service import CLOUD_ONLY
from benchmarks.heads.sessions import compare, shape_service

pytest.importorskip("transformers")


def test_sessions_over_a_random_shape_are_measured_by_every_source() -> None:
    service = shape_service(Setting(is_rehearsal=True, limit_s=60.0), replace(SHAPE_TOY, num_layers=2))
    found = dict(compare(service, (1, 3), num_new=6, num_turns=1))
    assert list(found) == [(count, source) for count in (1, 3) for source in (CLOUD_ONLY, "medusa")]
    assert {each["tokens_a_step"] for (_, source), each in found.items() if source == CLOUD_ONLY} == {1.0}
    assert all(each["tokens_s"] > 0 and each["tokens_a_step"] >= 1 for each in found.values())
