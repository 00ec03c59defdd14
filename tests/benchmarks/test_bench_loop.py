"""The stand-ins of `benchmarks.loop` make the text that they know, in rounds of both kinds."""

from __future__ import annotations

from benchmarks.loop import STRETCH, round_us


def test_a_texts_stretches_of_rounds_each_have_a_figure() -> None:
    found = round_us(num_tokens=10 * STRETCH)
    assert found and all(each > 0 for each in found)
