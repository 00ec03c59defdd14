"""`lib.overhead`: a decoder in this process beside co-located mode of a verifier process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import outrider
from benchmarks.library.prompts import prompt_ids
from benchmarks.results_file import Found
from benchmarks.timing import alternate, median_ratio
from outrider import SpeculativeConfig, SpeculativeDecoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import Measure, at_least, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW, NUM_TURNS, CHAIN = 8, 96, 7, 4


def run() -> Found:
    """Returns the ratio of tokens a second at temperature 1, chains of four, one text at a time, and what the same
    thing gives against itself."""
    prompts = prompt_ids(NUM_PROMPTS)
    texts: dict[str, list[list[int]]] = {}
    with running_verifier("--log-level", "error") as verifier, SpeculativeDecoder() as decoder:
        decoder.setup(EMBEDDED / "target", SpeculativeConfig(adaptive_depth=False), device="cpu")
        settings = {"mode": "co-located", "num_speculative_tokens": CHAIN, "temperature": 1.0}
        with outrider.connect(verifier.address, **settings) as client:  # type: ignore[arg-type]

            def here(prompt: list[int], seed: int) -> list[int]:
                return decoder.decode_step(prompt, NUM_NEW, seed=seed)[0]

            def there(prompt: list[int], seed: int) -> list[int]:
                return list(client.generate(prompt, max_new_tokens=NUM_NEW, seed=seed).ids)

            def rate(name: str, decode: Callable[[list[int], int], list[int]]) -> float:
                start_s = time.perf_counter()
                texts[name] = [decode(prompt, seed) for seed, prompt in enumerate(prompts)]
                return sum(map(len, texts[name])) / (time.perf_counter() - start_s)

            ways = {
                "in process": here,
                "co-located": there,
                "in process again": here,
                "co-located again": there,
            }
            rates = alternate({name: partial(rate, name, way) for name, way in ways.items()}, NUM_TURNS)
    assert len({str(each) for each in texts.values()}) == 1, "both write the same texts"
    what = f"tokens/s, chains of {CHAIN}: SpeculativeDecoder in process : co-located in a verifier's"
    ratio = median_ratio(rates["in process"], rates["co-located"])
    same = median_ratio(rates["co-located again"], rates["co-located"])
    again = Measure("lib.overhead.same", "co-located against itself in that run", round(same, 4), "ratio")
    found = {name: [round(each, 1) for each in values] for name, values in rates.items()}
    return [judged("lib.overhead", what, ratio, "ratio", at_least(0.95)), again], {"tokens_per_s": found}
