"""Fixed calibrated trees (`training/calibrate_tree.py`) beside trees that grow best first, tokens a round on the same
texts. Shapes and node values are fitted on half of the texts and judged on the other half, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.results_file import Found
from benchmarks.trees.draft import BUDGETS, NUM_NEW, TEMPERATURES, embedded_prompts
from benchmarks.trees.texts import Rounds, figures, over_halves, play, play_fitted, tree
from outrider.cloud_verifier.backends.loading import load_target
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, TreeBudget
from outrider.experiments.shared.results import Measure
from outrider.models import EMBEDDED
from outrider.training.calibrate_tree import accuracies, best_shape, choices_taken
from outrider.training.judge.target_text import WrittenText, written_texts

TEMPERATURE = 0.8


def run() -> Found:
    """Returns the measures of the embedded pair."""
    backend, num_seeds = load_target(EMBEDDED / "target", num_threads=1), TEMPERATURES[TEMPERATURE]
    texts = list(written_texts(backend, embedded_prompts(), TEMPERATURE, NUM_NEW, num_seeds))
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        for num_nodes, budget in BUDGETS.items():
            grown = play_fitted(model, texts, budget)
            fixed = play_calibrated(model, texts, budget)
            details[f"{num_nodes} nodes"] = {"best first": figures(grown), "calibrated": figures(fixed)}
            measures.append(_measure(num_nodes, fixed, grown))
    return measures, details


def play_calibrated(model: OnnxDraftModel, texts: Sequence[WrittenText], budget: TreeBudget) -> Rounds:
    """Returns the rounds of fixed trees with as many nodes and levels, each half's calibrated on the other."""

    def play_half(fitted: Sequence[WrittenText], judged_on: Sequence[WrittenText]) -> Rounds:
        taken = [choices_taken(model, text) for text in fitted]
        shape, _ = best_shape(accuracies(taken, budget.max_depth), budget.num_nodes)
        fixed = replace(budget, max_width=MAX_CONTINUATIONS, shape=shape)
        return play(model, judged_on, tree(fixed, NodeValues()))

    return over_halves(texts, play_half)


def _measure(num_nodes: int, fixed: Rounds, grown: Rounds) -> Measure:
    ratio = fixed.tokens_a_round / grown.tokens_a_round
    what = (
        f"tokens a round, T = {TEMPERATURE:g}, calibrated tree of {num_nodes} nodes ({fixed.tokens_a_round:.2f}, "
        f"{fixed.num_runs / fixed.num_rounds:.1f} draft runs) : best first ({grown.tokens_a_round:.2f}, "
        f"{grown.num_runs / grown.num_rounds:.1f})"
    )
    return Measure(f"tree.calibrated{num_nodes}", what, round(ratio, 4), "ratio")
