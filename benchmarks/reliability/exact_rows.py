"""`rel.bf16`: texts in bfloat16 with exact rows.

The embedded target in bfloat16 writes texts by cloud-only, each alone; then speculatively, alone and four at
once, with a KV pool so small that prompts are found in the prefix cache, or evicted and computed again.
Two controls plant a product that sums in another order at the number of rows of a verification: before the
check at the start, which must leave that number out, and after it, where texts must differ.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.planted import plant
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.types import SamplingParams
from outrider.experiments.shared.results import at_most, judged
from outrider.models import EMBEDDED

NUM_TOGETHER = 4
NUM_NEW = 32
PROMPT_TOKENS = (20, 90)  # longer than a chunk of a prompt
KV_TOKENS = 512  # four of the longest sessions; what earlier ones left in the prefix cache is evicted


class Settings(Protocol):
    """Says how much to do."""

    def pick(self, long: Any, short: Any, smoke: Any = None) -> Any:
        """Returns the value for the long form, the short one, or a test."""


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found."""
    yield measure_texts(settings.pick(200, 24, 4))


def measure_texts(num_texts: int) -> Found:
    """Returns the texts unlike cloud-only's, and whether both controls were caught."""
    prompts, samplings = make_prompts(num_texts)

    def count(backend: PagedBackend, num_together: int) -> int:
        texts = write_texts(
            backend, prompts, samplings, NUM_NEW, expected=expected, num_together=num_together
        )
        return sum(text != wanted for text, wanted in zip(texts, expected, strict=True))

    backend = _load("on")
    expected = write_texts(backend, prompts, samplings, NUM_NEW)
    unlike = {"alone": count(backend, 1), "beside others": count(backend, NUM_TOGETHER)}
    num_evicted = backend.kv_usage.num_evicted
    off = _load("off")
    unlike_off = count(off, 1)
    is_caught = {"by the check": _is_left_out(), "by the texts": _plant(backend, count) > 0}
    details = {
        "num_texts": num_texts,
        "unlike": unlike,
        "unlike_with_exact_rows_off": unlike_off,
        "num_evicted_blocks": num_evicted,
        "planted_product_caught": is_caught,
    }
    what = f"bfloat16 texts unlike cloud-only's, of {num_texts} alone and {num_texts} beside three others"
    measures = [
        judged("rel.bf16", what, sum(unlike.values()), "texts", at_most(0)),
        judged(
            "rel.bf16_missed",
            "planted products that the check or the texts did not catch",
            list(is_caught.values()).count(False),
            "of 2",
            at_most(0),
        ),
    ]
    return measures, details


def make_prompts(num_texts: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns prompts of ids, every second the continuation of the one before, and greedy or sampled."""
    numbers = random.Random(18)
    prompts: list[list[int]] = []
    for number in range(num_texts):
        begin = prompts[-1][:40] if number % 2 else []
        length = numbers.randint(*PROMPT_TOKENS)
        prompts.append((begin + [numbers.randrange(1, 8000) for _ in range(length)])[:length])
    temperatures = itertools.cycle((0.8, 0.0, 1.0))
    samplings = [
        SamplingParams(temperature=temperature, seed=number)
        for number, temperature in zip(range(num_texts), temperatures, strict=False)
    ]
    return prompts, samplings


def _load(exact_rows: str) -> PagedBackend:
    return load_target(EMBEDDED / "target", dtype="bfloat16", kv_tokens=KV_TOKENS, exact_rows=exact_rows)


def _is_left_out() -> bool:
    """Returns whether the check at the start leaves out the count at which a product was planted."""
    backend = _load("off")
    plant(backend, 5)
    use_exact_rows(backend, "on")
    plan = backend.row_plan
    return plan is not None and 5 not in plan.counts and len(plan.counts) > 1


def _plant(backend: PagedBackend, count: Callable[[PagedBackend, int], int]) -> int:
    assert backend.row_plan is not None
    plant(backend, backend.row_plan.fit(5))
    try:
        return count(backend, 1)
    finally:
        plant(backend, 0)
