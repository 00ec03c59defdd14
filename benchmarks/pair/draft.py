"""Measures what a drafted token costs beside the bare onnxruntime run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.timing import median_ratio, time_s
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence

TOKENS_A_ROUND = 8
NUM_ROUNDS = 200
CONTEXT = 256  # tokens before the first drafted ones; twice as many before the last
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "sampled": SamplingParams(temperature=0.8, seed=1),
}


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Holds medians over rounds; the parts of a ratio were timed alternately in one loop."""

    run_ms: float  # onnxruntime alone, one token
    token_ms: float  # one drafted token: run, sampling, signals, bookkeeping
    ratio: float  # token_ms : run_ms, median of the rounds' own ratios (`real.draft`)
    sample_us: float  # sampling and signals alone
    noise_us: float  # of one token, made before its turn, while a round is in flight: not in token_ms


def measure_draft(directory: Path) -> dict[str, DraftFigures]:
    """Returns the figures by name of `PARAMS`. Raises `ModelError` for no exported draft."""
    with OnnxDraftModel.open(directory) as model:
        return {name: _measure(model, params) for name, params in PARAMS.items()}


def _measure(model: OnnxDraftModel, params: SamplingParams) -> DraftFigures:
    sequence = model.sequence(params)
    sequence.commit(np.random.default_rng(0).integers(0, model.num_tokens, CONTEXT).tolist())
    sequence.propose(TOKENS_A_ROUND)
    runner, sampler = sequence.parts
    rows = runner.feed([1], CONTEXT)
    runs, again, tokens, samples, noise = [], [], [], [], []
    for _ in range(NUM_ROUNDS):
        start = sequence.position
        noise.append(time_s(partial(_prepare, sequence)) / TOKENS_A_ROUND)
        runs.append(time_s(runner.run_again, TOKENS_A_ROUND))
        tokens.append(time_s(partial(sequence.propose, TOKENS_A_ROUND)) / TOKENS_A_ROUND)
        again.append(time_s(runner.run_again, TOKENS_A_ROUND))
        samples.append(time_s(partial(sampler.sample, rows, start), TOKENS_A_ROUND))
        sequence.commit(sequence.cached_token_ids[start:])
        if sequence.position >= 2 * CONTEXT:
            sequence.truncate(CONTEXT)
    both = [(first + second) / 2 for first, second in zip(runs, again, strict=True)]
    return DraftFigures(
        run_ms=statistics.median(both) * 1e3,
        token_ms=statistics.median(tokens) * 1e3,
        ratio=median_ratio(tokens, both),
        sample_us=statistics.median(samples) * 1e6,
        noise_us=statistics.median(noise) * 1e6,
    )


def _prepare(sequence: OnnxDraftSequence) -> None:
    for _ in sequence.prepare(TOKENS_A_ROUND):
        pass
