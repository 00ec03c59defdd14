"""Fixed shapes of 16 nodes for the shipped heads: calibrated on the target's texts of half of the prompts, replayed on
those of the other half, beside the best cartesian tree and that of two choices a head."""

from __future__ import annotations

from typing import Any

from benchmarks.heads.embedded import load_prompt_ids
from benchmarks.heads.service import NUM_NODES
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.loading import load_target
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED
from outrider.training.calibrate_tree import best_shape, path_accuracies
from outrider.training.heads.directory import read_heads
from outrider.training.heads.figures import HeadsJudge
from outrider.training.heads.rounds import Choices, cartesian_shape, cartesian_widths, replayed_tokens_a_round
from outrider.training.judge.target_text import WrittenText, written_texts

KINDS = ("medusa", "hydra")
NUM_NEW = 96
NUM_SEEDS = {0.0: 1, 0.8: 4}  # texts of a prompt, by temperature
TWO_CHOICES = (2, 2, 2)  # 14 nodes


def run() -> Found:
    """Returns the measures."""
    backend = load_target(EMBEDDED / "target", num_threads=1)
    prompts = load_prompt_ids(40)

    def write(half: int, temperature: float) -> list[WrittenText]:
        return list(written_texts(backend, prompts[half::2], temperature, NUM_NEW, NUM_SEEDS[temperature]))

    known = [text for temperature in NUM_SEEDS for text in write(0, temperature)]
    others = {temperature: write(1, temperature) for temperature in NUM_SEEDS}
    judge = HeadsJudge(EMBEDDED / "target")
    details: dict[str, Any] = {}
    for kind in KINDS:
        heads, _ = read_heads(EMBEDDED / "heads" / kind)
        shapes = _shapes([judge.choices(heads, text) for text in known], heads.shape.num_heads)
        for temperature, texts in others.items():
            choices = [judge.choices(heads, text) for text in texts]
            details[f"{kind}, T={temperature:g}"] = {
                name: round(replayed_tokens_a_round(choices, shape), 3) for name, shape in shapes.items()
            }
    measures = []
    for kind in KINDS:
        found = details[f"{kind}, T=0"]
        ratio = found["calibrated"] / found["cartesian"]
        plain = found["calibrated"] / found["two choices a head"]
        what = f"{kind}: calibrated : best cartesian tree of {NUM_NODES} nodes, temperature 0 "
        what += f"(: two choices of each of three heads {plain:.2f})"
        measures.append(judged(f"heads.calibrated_{kind}", what, ratio, "ratio", at_least(1.1)))
    return measures, details


def _shapes(known: list[Choices], num_heads: int) -> dict[str, Any]:
    accuracies = path_accuracies((path for choices in known for path in choices), num_heads)
    return {
        "calibrated": best_shape(accuracies, NUM_NODES)[0],
        "cartesian": cartesian_shape(cartesian_widths(accuracies, NUM_NODES)),
        "two choices a head": cartesian_shape(TWO_CHOICES),
    }
