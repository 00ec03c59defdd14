"""What the draft's trees bring, before any network: coverage, tokens a round, and what a run of several rows
costs. Values are fitted on half of the texts and judged on the other half, and the reverse."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.results_file import Found
from benchmarks.timing import alternate, median_ratio, time_s
from benchmarks.trees.coverage import coverages
from benchmarks.trees.texts import Rounds, chain, figures, play, play_fitted, tree
from outrider.cloud_verifier.backends.loading import load_target
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED
from outrider.training.judge.target_text import WrittenText, written_texts

NUM_NEW = 160
TEMPERATURES = {0.8: 2, 0.0: 1}  # → texts of each prompt
CHAINS = (8, 16)
BUDGETS = {16: TreeBudget(16, 12, 4), 64: TreeBudget(64, 12, 6)}
COVERED = (0.77, 0.90, 0.94, 0.96)  # the targets, by number of children
TOKENS = {16: (5.1, 1.17), 64: (7.0, 1.5)}  # the targets: tokens a round, and : a chain of 16
NUM_ROWS = 8
CONTEXT = 256  # tokens before the timed runs
NUM_TURNS, RUNS_A_TURN = 200, 8


def run() -> Found:
    """Returns the measures of the embedded pair."""
    backend = load_target(EMBEDDED / "target")
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        prompts = embedded_prompts()
        texts = {
            temperature: list(written_texts(backend, prompts, temperature, NUM_NEW, num_seeds))
            for temperature, num_seeds in TEMPERATURES.items()
        }
        sampled = texts[0.8]
        covered = coverages(backend, model, sampled)
        rounds = {f"T={temperature:g}": tokens_a_round(model, its) for temperature, its in texts.items()}
        times = run_times(model)
    measures = [
        *_coverage_measures(covered),
        *_token_measures(rounds["T=0.8"]),
        judged(
            "tree.run_ms",
            f"a draft run of {NUM_ROWS} rows : of one row ({times['one_ms']:.3f} ms; A/A {times['again']:.3f})",
            times["ratio"],
            "ratio",
            at_most(3.5),
        ),
    ]
    details = {
        "num_positions": sum(len(text.new) for text in sampled),
        "coverage": covered,
        "rounds": {
            name: {way: figures(found) for way, found in ways.items()} for name, ways in rounds.items()
        },
        "run": times,
    }
    return measures, details


def embedded_prompts() -> list[TokenIds]:
    """Returns the ids of the prompts that no training saw."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    return [tuple(tokenizer.encode(prompt.text)) for prompt in load_prompts()]


def tokens_a_round(model: OnnxDraftModel, texts: Sequence[WrittenText]) -> dict[str, Rounds]:
    """Returns the rounds of chains and trees on the same texts, by way."""
    found = {f"chain {length}": play(model, texts, chain(length)) for length in CHAINS}
    for num_nodes, budget in BUDGETS.items():
        found[f"tree {num_nodes}"] = play_fitted(model, texts, budget)
        found[f"tree {num_nodes}, prior"] = play(model, texts, tree(budget, NodeValues()))
    return found


def _coverage_measures(covered: dict[str, list[float]]) -> list[Measure]:
    others = {name: covered[name] for name in ("blind", "rejection")}
    return [
        judged(
            f"tree.coverage{count}",
            f"target's token among {count} by draft score and noise, T = 0.8 (by probability alone "
            f"{others['blind'][count - 1]:.2f}, rejection {others['rejection'][count - 1]:.2f})",
            covered["noise"][count - 1],
            "share",
            at_least(bound),
        )
        for count, bound in enumerate(COVERED, start=1)
    ]


def _token_measures(rounds: dict[str, Rounds]) -> list[Measure]:
    base = rounds["chain 16"].tokens_a_round
    measures = []
    for num_nodes, (bound, factor) in TOKENS.items():
        found = rounds[f"tree {num_nodes}"]
        nodes = f"trees of {num_nodes} nodes, {found.num_runs / found.num_rounds:.1f} draft runs"
        tokens = found.tokens_a_round
        measures += [
            judged(
                f"tree.tokens{num_nodes}",
                f"tokens a round, {nodes}, T = 0.8",
                tokens,
                "tokens",
                at_least(bound),
            ),
            judged(
                f"tree.vs_chain{num_nodes}",
                f"tokens a round, {nodes} : chain of 16 ({base:.2f}), the same texts",
                tokens / base,
                "ratio",
                at_least(factor),
            ),
        ]
    return measures


def run_times(model: OnnxDraftModel) -> dict[str, float]:
    """Returns the times of a bare run of one row and of `NUM_ROWS` siblings, in turn."""
    sequence = model.sequence(SamplingParams(temperature=0.8, seed=1))
    sequence.commit(np.random.default_rng(0).integers(0, model.num_tokens, CONTEXT).tolist())
    sequence.propose(1)
    runner, _ = sequence.parts
    bias = np.zeros((NUM_ROWS, NUM_ROWS), np.float32)
    ids, positions = list(range(NUM_ROWS)), [CONTEXT] * NUM_ROWS
    one = partial(time_s, partial(runner.feed, [1], CONTEXT), RUNS_A_TURN)
    many = partial(time_s, partial(runner.feed_nodes, ids, positions, bias, CONTEXT), RUNS_A_TURN)
    times = alternate({"one": one, "many": many, "again": one}, NUM_TURNS)
    both = [(first + second) / 2 for first, second in zip(times["one"], times["again"], strict=True)]
    return {
        "one_ms": statistics.median(both) * 1e3,
        "many_ms": statistics.median(times["many"]) * 1e3,
        "ratio": median_ratio(times["many"], both),
        "again": median_ratio(times["again"], times["one"]),
    }
