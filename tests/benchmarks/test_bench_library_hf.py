"""`lib.hf` on two prompts."""

from __future__ import annotations

import pytest

from benchmarks.library import hf


@pytest.mark.slow
def test_texts_of_custom_generate_are_those_of_run() -> None:
    (measure,), details = hf.run(num_prompts=2)
    assert (measure.id, measure.value, measure.met) == ("lib.hf", 2, True)
    assert details["origins"]["accepted"] > 0
