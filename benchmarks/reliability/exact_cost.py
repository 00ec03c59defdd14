"""`rel.exact_cost`: what exact rows cost a forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.models import EMBEDDED

CONTEXT = 200
MAX_COST = 1.25
# Name → sequences, tokens that each feeds, tokens before these.
FORWARDS = {"1": (1, 1, CONTEXT), "5": (1, 5, CONTEXT), "40": (8, 5, CONTEXT), "512": (1, 512, 0)}


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found."""
    measures: list[Measure] = []
    details: dict[str, object] = {}
    for dtype in ("float32", *(["bfloat16"] if has_bfloat16() else [])):
        more, costs = measure_costs(dtype, settings.pick(200, 40, 3))
        measures, details = [*measures, *more], details | costs
    yield measures, details


def has_bfloat16() -> bool:
    """Returns whether this processor multiplies in bfloat16."""
    import torch

    cpu = torch.cpu.get_capabilities()
    return any(cpu.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


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


def _stepper(backend: PagedBackend, num_sequences: int, num_fed: int, context: int) -> Callable[[], float]:
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
