"""What a drafted token costs beside the bare onnxruntime run: `python -m benchmarks.pair.draft`."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.models import EMBEDDED

EMBEDDED_DRAFT = EMBEDDED / "draft"
TOKENS_A_ROUND = 8
GREEDY = SamplingParams(temperature=0.0, seed=1)
SAMPLED = SamplingParams(temperature=0.8, seed=1)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Medians over rounds; the parts of a ratio were timed alternately in one loop."""

    run_ms: float  # onnxruntime alone, one token
    token_ms: float  # one drafted token: run, sampling, signals, bookkeeping
    ratio: float  # token_ms : run_ms, median of the rounds' own ratios (`main.draft_ms`)
    aa_ratio: float  # run_ms : run_ms
    sample_us: float  # sampling and signals alone


@dataclass(frozen=True, slots=True)
class DraftReport:
    num_tokens: int
    context: int  # tokens before the drafted ones
    threads: int
    greedy: DraftFigures
    sampled: DraftFigures
    feed_ms: dict[int, float]  # tokens fed at once → milliseconds


def measure_draft(
    directory: Path, *, threads: int = 1, num_rounds: int = 200, context: int = 256
) -> DraftReport:
    """Raises `ModelError` for a directory that is not an exported draft."""
    with OnnxDraftModel.open(directory, threads=threads) as model:
        return DraftReport(
            num_tokens=model.num_tokens,
            context=context,
            threads=threads,
            greedy=_measure_sampling(model, GREEDY, num_rounds, context),
            sampled=_measure_sampling(model, SAMPLED, num_rounds, context),
            feed_ms=_measure_feeds(model, num_rounds, context),
        )


def _measure_sampling(
    model: OnnxDraftModel, params: SamplingParams, num_rounds: int, context: int
) -> DraftFigures:
    sequence = make_sequence(model, params, context)
    runner, sampler = sequence.parts
    rows = runner.feed([1], context)
    runs, again, tokens, samples = [], [], [], []
    for round_id in range(num_rounds):
        runs.append(_time_s(runner.run_again, TOKENS_A_ROUND))
        tokens.append(_time_s(partial(sequence.propose, TOKENS_A_ROUND)) / TOKENS_A_ROUND)
        again.append(_time_s(runner.run_again, TOKENS_A_ROUND))
        samples.append(_time_s(partial(sampler.sample, rows, context + round_id), TOKENS_A_ROUND))
    both = [(first + second) / 2 for first, second in zip(runs, again, strict=True)]
    return DraftFigures(
        run_ms=statistics.median(both) * 1e3,
        token_ms=statistics.median(tokens) * 1e3,
        ratio=_median_ratio(tokens, both),
        aa_ratio=_median_ratio(again, runs),
        sample_us=statistics.median(samples) * 1e6,
    )


def _measure_feeds(model: OnnxDraftModel, num_rounds: int, context: int) -> dict[int, float]:
    runner, _ = make_sequence(model, GREEDY, context).parts
    times: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: [], 64: []}
    for _ in range(max(5, num_rounds // 4)):
        for num_ids, measured in times.items():
            measured.append(_time_s(partial(runner.feed, [1] * num_ids, context)))
    return {num_ids: statistics.median(measured) * 1e3 for num_ids, measured in times.items()}


def make_sequence(model: OnnxDraftModel, params: SamplingParams, context: int) -> OnnxDraftSequence:
    sequence = model.sequence(params)
    sequence.commit(np.random.default_rng(0).integers(0, model.num_tokens, context).tolist())
    sequence.propose(TOKENS_A_ROUND)
    return sequence


def _time_s(call: Callable[[], object], num_calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def _median_ratio(upper: list[float], lower: list[float]) -> float:
    return statistics.median(u / low for u, low in zip(upper, lower, strict=True))


def print_report(report: DraftReport) -> None:
    size = f"vocabulary {report.num_tokens}, {report.context} tokens before, {report.threads} thread(s)"
    print(f"{size}\n{'':10}{'run ms':>10}{'token ms':>10}{'ratio':>8}{'A/A':>8}{'sample us':>11}{'share':>8}")
    for name, figures in (("greedy", report.greedy), ("sampled", report.sampled)):
        share = figures.sample_us / 1e3 / figures.token_ms
        print(
            f"{name:10}{figures.run_ms:10.3f}{figures.token_ms:10.3f}{figures.ratio:8.2f}"
            f"{figures.aa_ratio:8.2f}{figures.sample_us:11.1f}{share:8.1%}"
        )
    print("fed at once: " + ", ".join(f"{n}: {ms:.3f} ms" for n, ms in report.feed_ms.items()))


def main(argv: list[str] | None = None) -> DraftReport:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", type=Path, default=EMBEDDED_DRAFT, help="an exported draft")
    parser.add_argument("--shape", choices=["qwen2-0.5b"], help="random weights of a shape instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.draft
        if args.shape:
            from benchmarks.pair.random_draft import export_random_draft

            directory = export_random_draft(Path(scratch), args.shape)
        report = measure_draft(directory, threads=args.threads, num_rounds=args.rounds)
    print_report(report)
    return report


if __name__ == "__main__":
    from outrider.common.errors import OutriderError

    try:
        print(asdict(main()))
    except OutriderError as error:
        sys.exit(f"bench_draft: {error}")
