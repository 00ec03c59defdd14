"""`rel.bf16` and `rel.exact_cost`: texts in bfloat16 with exact rows, and what exact rows cost.

The embedded target in bfloat16 writes texts by cloud-only, each alone; then speculatively, alone and four at
once, with a KV pool so small that prompts are found in the prefix cache, or evicted and computed again.
Two controls plant a product that sums in another order at the number of rows of a verification: before the
check at the start, which must leave that number out, and after it, where texts must differ.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.planted import plant
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.common.types import SamplingParams
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.models import EMBEDDED

NUM_TOGETHER = 4
NUM_NEW = 32
PROMPT_TOKENS = (20, 90)  # longer than a chunk of a prompt
KV_TOKENS = 512  # four of the longest sessions; what earlier ones left in the prefix cache is evicted
CONTEXT = 200
MAX_COST = 1.25
# Name → sequences, tokens that each feeds, tokens before these.
FORWARDS = {"1": (1, 1, CONTEXT), "5": (1, 5, CONTEXT), "40": (8, 5, CONTEXT), "512": (1, 512, 0)}


class Settings(Protocol):
    """Says how much to do."""

    def pick(self, long: Any, short: Any, smoke: Any = None) -> Any:
        """Returns the value for the long form, the short one, or a test."""


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found so far, each time all of it."""
    measures, details = measure_texts(settings.pick(200, 24, 4))
    yield measures, details
    dtypes = ["float32", *(["bfloat16"] if has_bfloat16() else [])]
    for dtype in dtypes:
        more, costs = measure_costs(dtype, settings.pick(200, 40, 3))
        measures, details = [*measures, *more], details | costs
        yield measures, details


def has_bfloat16() -> bool:
    """Returns whether this processor multiplies in bfloat16."""
    import torch

    cpu = torch.cpu.get_capabilities()
    return any(cpu.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def measure_texts(num_texts: int) -> Found:
    """Returns the texts unlike cloud-only's, and whether both controls were caught."""
    prompts, samplings = make_prompts(num_texts)

    def count(backend: TransformersBackend, num_together: int) -> int:
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


def _load(exact_rows: str) -> TransformersBackend:
    return load_target(EMBEDDED / "target", dtype="bfloat16", kv_tokens=KV_TOKENS, exact_rows=exact_rows)


def _is_left_out() -> bool:
    """Returns whether the check at the start leaves out the count at which a product was planted."""
    backend = _load("off")
    plant(backend, 5)
    use_exact_rows(backend, "on")
    plan = backend.row_plan
    return plan is not None and 5 not in plan.counts and len(plan.counts) > 1


def _plant(backend: TransformersBackend, count: Callable[[TransformersBackend, int], int]) -> int:
    assert backend.row_plan is not None
    plant(backend, backend.row_plan.fit(5))
    try:
        return count(backend, 1)
    finally:
        plant(backend, 0)


def measure_costs(dtype: str, num_turns: int) -> Found:
    """Returns a forward's median time with exact rows : without, forwards alternating."""
    backends = [
        load_target(EMBEDDED / "target", dtype=dtype, kv_tokens=8192, exact_rows=exact_rows)
        for exact_rows in ("off", "on")
    ]
    ratios, times = {}, {}
    for name, (num_sequences, num_fed, context) in FORWARDS.items():
        steps = [_stepper(backend, num_sequences, num_fed, context) for backend in backends]
        num = max(3, num_turns // 8) if num_fed > 100 else num_turns
        taken = [[step() for step in steps] for _ in range(num)]
        off, on = (statistics.median(column) for column in zip(*taken, strict=True))
        ratios[name], times[name] = on / off, {"off_ms": off * 1e3, "on_ms": on * 1e3}
    worst = max(ratios, key=lambda name: ratios[name])
    what = f"forward of 1, 5, 40 rows and 512 prefilled, {dtype}, exact rows : without, worst (of {worst})"
    measure: Measure = judged(f"rel.exact_cost_{dtype}", what, ratios[worst], "ratio", at_most(MAX_COST))
    rounded = {
        name: {key: round(value, 3) for key, value in (each | {"ratio": ratios[name]}).items()}
        for name, each in times.items()
    }
    return [measure], {f"exact_cost_{dtype}": rounded}


def _stepper(
    backend: TransformersBackend, num_sequences: int, num_fed: int, context: int
) -> Callable[[], float]:
    """Returns a function that runs one forward, undoes it and returns its seconds."""
    text = [(31 * i * i + 7 * i + 1) % backend.num_tokens for i in range(context + num_fed)]
    sequences = [backend.new_sequence() for _ in range(num_sequences)]
    if context:
        for sequence in sequences:
            backend.forward([ForwardItem(sequence, text[:context], 0)])

    def step(fed: Sequence[int] = text[context:]) -> float:
        num_rows = 1 if context == 0 else num_fed
        items = [ForwardItem(sequence, fed, num_rows) for sequence in sequences]
        begin_s = time.perf_counter()
        backend.forward(items)
        taken_s = time.perf_counter() - begin_s
        for sequence in sequences:
            backend.truncate(sequence, context)
        return taken_s

    step()
    return step
