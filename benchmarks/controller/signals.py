"""What the draft's signals cost: entropy, NLL, margin beside every token, MC-dropout variance on demand.

With and without are timed alternately in one loop, a few tokens each; a cost is the median of the
differences, beside that of the same thing against itself.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.pair.draft import EMBEDDED_DRAFT, GREEDY, SAMPLED, TOKENS_A_ROUND, make_sequence
from benchmarks.pair.random_draft import export_random_draft
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.onnx import sampler
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.experiments.shared.results import Measure, at_most, judged

CONTEXT = 256
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}
SHAPE = "qwen2-0.5b"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one drafted token, medians; the parts were timed alternately in one loop."""

    plain_ms: float  # a token without
    extra_ms: float  # with : without, the median of the differences
    aa_ms: float  # without : without, the same median of the absolute differences

    @property
    def ratio(self) -> float:
        return (self.plain_ms + self.extra_ms) / self.plain_ms


def signals_cost(model: OnnxDraftModel, params: SamplingParams, num_rounds: int) -> Cost:
    """Entropy, NLL and margin, against a draft that computes none."""
    sequence = make_sequence(model, params, CONTEXT)
    return _compare(sequence, sequence, _without_signals, num_rounds)


def dropout_cost(
    plain: OnnxDraftModel, variant: OnnxDraftModel, params: SamplingParams, num_rounds: int
) -> Cost:
    """The variant's step against the plain draft's, both with the other signals."""
    with_it, without = (make_sequence(model, params, CONTEXT) for model in (variant, plain))
    return _compare(with_it, without, nullcontext, num_rounds)


def _without_signals() -> AbstractContextManager[Any]:
    return mock.patch.object(sampler, "draft_signals", lambda *_: (0.0, 0.0, 0.0))


def _compare(
    with_it: OnnxDraftSequence,
    without: OnnxDraftSequence,
    setting: Callable[[], AbstractContextManager[Any]],
    num_rounds: int,
) -> Cost:
    """`setting` makes the context in which `without` drafts."""
    plain, extra, again = [], [], []
    for _ in range(num_rounds):
        with setting():
            first = _token_ms(without)
        measured = _token_ms(with_it)
        with setting():
            second = _token_ms(without)
        plain += [first, second]
        extra.append(measured - (first + second) / 2)
        again.append(abs(second - first))
    return Cost(statistics.median(plain), statistics.median(extra), statistics.median(again))


def _token_ms(sequence: OnnxDraftSequence) -> float:
    start_s = time.perf_counter()
    sequence.propose(TOKENS_A_ROUND)
    return (time.perf_counter() - start_s) / TOKENS_A_ROUND * 1e3


def measure_draft(directory: Path, num_rounds: int) -> dict[str, Cost]:
    """By what was measured: `signals greedy`, `signals sampled`, `dropout greedy`, `dropout sampled`."""
    with (
        OnnxDraftModel.open(directory) as plain,
        OnnxDraftModel.open(directory, has_variance=True) as variant,
    ):
        costs = {f"signals {name}": signals_cost(plain, p, num_rounds) for name, p in PARAMS.items()}
        for name, params in PARAMS.items():
            costs[f"dropout {name}"] = dropout_cost(plain, variant, params, num_rounds)
    return costs


def signals_measures(
    num_rounds: int = 300, num_large_rounds: int = 20
) -> tuple[list[Measure], dict[str, Any]]:
    """`ctl.signals` and what MC dropout takes, on the embedded draft and at a 0.5B shape (random weights,
    about 1.3 GB in the temporary directory)."""
    found: dict[str, dict[str, Cost]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        embedded = Path(shutil.copytree(EMBEDDED_DRAFT, Path(scratch) / "embedded"))
        add_dropout(embedded)
        found["embedded draft"] = measure_draft(embedded, num_rounds)
        large = export_random_draft(Path(scratch), SHAPE)
        add_dropout(large)
        found[f"{SHAPE} shape, random weights"] = measure_draft(large, num_large_rounds)
    for name, costs in found.items():
        print_costs(name, costs)
    small, at_half_b = found.values()
    return make_measures(small, at_half_b), {
        name: {what: asdict(cost) for what, cost in costs.items()} for name, costs in found.items()
    }


def print_costs(name: str, costs: dict[str, Cost]) -> None:
    print(f"\n{name}\n{'':18}{'plain ms':>10}{'extra us':>10}{'A/A us':>10}{'ratio':>8}")
    for what, cost in costs.items():
        extra_us, aa_us = cost.extra_ms * 1e3, cost.aa_ms * 1e3
        print(f"{what:18}{cost.plain_ms:10.3f}{extra_us:10.1f}{aa_us:10.1f}{cost.ratio:8.3f}")


def make_measures(small: dict[str, Cost], large: dict[str, Cost]) -> list[Measure]:
    measures = []
    for name, most_us in (("greedy", 50), ("sampled", 100)):
        cost = small[f"signals {name}"]
        text = f"entropy, NLL and margin of a drafted token, embedded draft, {name}"
        measures.append(judged(f"ctl.signals_{name}", text, cost.extra_ms * 1e3, "us", at_most(most_us)))
    worst = max((large[f"signals {name}"] for name in PARAMS), key=lambda cost: cost.ratio)
    text = f"entropy, NLL and margin : a step without, {SHAPE} shape with random weights"
    share = worst.extra_ms / worst.plain_ms
    measures.append(judged("ctl.signals", text, share, "ratio", at_most(0.10)))
    for label, costs in (("embedded draft", small), (f"{SHAPE} shape", large)):
        cost = costs["dropout sampled"]
        suffix = "" if costs is small else "_large"
        text = f"a token of the variant with MC dropout : of the plain draft, {label}"
        measures.append(Measure(f"ctl.mc_dropout{suffix}", text, round(cost.ratio, 3), "ratio"))
        text = f"MC dropout's part of a drafted token, {label}"
        measures.append(Measure(f"ctl.mc_dropout{suffix}_ms", text, round(cost.extra_ms, 3), "ms"))
    return measures
