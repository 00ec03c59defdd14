"""`lib.overhead`: a decoder in its process beside co-located mode of a verifier process of its own.

Both have a session of the operating system for themselves, as every verifier that is started here: Linux shares busy
cores between sessions (autogroup), so that a decoder in that of other work would have a part of its share alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from statistics import median

import outrider
from benchmarks.library.texts import take_turns
from benchmarks.results_file import Found
from benchmarks.timing import median_ratio
from outrider import SpeculativeConfig, SpeculativeDecoder
from outrider.experiments.shared.leash import end_with_parent
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import Measure, at_least, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW, NUM_TURNS, CHAIN = 8, 96, 12, 4
Timed = tuple[list[int], float]  # a text and its seconds


def run() -> Found:
    """Returns the measures, made by a process in a session of its own."""
    with get_context("spawn").Pool(1, initializer=_begin) as pool:
        return pool.apply(measure)


def _begin() -> None:
    os.setsid()
    end_with_parent()


def measure() -> Found:
    """Returns the ratio of tokens a second at temperature 1, chains of four, one text at a time, and what co-located
    mode gives against itself: medians over texts."""
    settings = {"mode": "co-located", "num_speculative_tokens": CHAIN, "temperature": 1.0}
    with running_verifier("--log-level", "error") as verifier, SpeculativeDecoder() as decoder:
        decoder.setup(EMBEDDED / "target", SpeculativeConfig(adaptive_depth=False), device="cpu")
        with outrider.connect(verifier.address, **settings) as client:  # type: ignore[arg-type]

            def here(prompt: list[int], seed: int) -> list[int]:
                return decoder.decode_step(prompt, NUM_NEW, seed=seed)[0]

            def there(prompt: list[int], seed: int) -> list[int]:
                return list(client.generate(prompt, max_new_tokens=NUM_NEW, seed=seed).ids)

            ways = {"in process": here, "co-located": there, "co-located again": there}
            timed = {name: partial(_timed, way) for name, way in ways.items()}
            found = take_turns(timed, NUM_PROMPTS, NUM_TURNS)
    texts = {name: [text for text, _ in each] for name, each in found.items()}
    assert texts["in process"] == texts["co-located"] == texts["co-located again"], "the same texts"
    seconds = {name: [each for _, each in values] for name, values in found.items()}
    what = f"tokens/s, chains of {CHAIN}: SpeculativeDecoder in process : co-located in a verifier's"
    ratio = median_ratio(seconds["co-located"], seconds["in process"])
    same = median_ratio(seconds["co-located again"], seconds["co-located"])
    again = Measure("lib.overhead.same", "co-located against itself in that run", round(same, 4), "ratio")
    ms = {name: round(median(each) * 1e3, 1) for name, each in seconds.items()}
    return [judged("lib.overhead", what, ratio, "ratio", at_least(0.95)), again], {"ms_of_a_text": ms}


def _timed(write: Callable[[list[int], int], list[int]], prompt: list[int], seed: int) -> Timed:
    start_s = time.perf_counter()
    return write(prompt, seed), time.perf_counter() - start_s
