"""Rounds of sources against texts of a target, as sessions play them: each text learns its own chances."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.results_file import ROOT
from benchmarks.trees.texts import accepted_nodes
from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.common.errors import UsageError
from outrider.common.tree import Tree
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.drafting.base import DraftModel, ProposesTrees, Remembers, UsesValues
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import CopyModel, TokenizerFacts
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.drafting.union import UnionModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED
from outrider.training.judge.target_text import WrittenText, texts_after

BUDGETS = {
    16: TreeBudget(16, 12, 4, max_copied_depth=16),
    64: TreeBudget(64, 12, 6, max_copied_depth=64),
}
DATA = Path(os.environ.get("PROMPTS_DIR", ROOT / ".." / "shared" / "data"))  # humaneval.jsonl and others


@dataclass(slots=True)
class Played:
    """Counts rounds, and what drafting them took."""

    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_runs: int = 0
    draft_s: float = 0.0

    @property
    def tokens_a_round(self) -> float:
        """Returns the committed tokens of a round."""
        return self.num_tokens / self.num_rounds

    def figures(self) -> dict[str, float]:
        """Returns means over rounds."""
        each = {"nodes": self.num_nodes, "runs": self.num_runs, "draft_ms": 1e3 * self.draft_s}
        means = {f"{name}_a_round": round(value / self.num_rounds, 3) for name, value in each.items()}
        return {"tokens_a_round": round(self.tokens_a_round, 3), **means, "num_rounds": self.num_rounds}


def play(
    model: DraftModel, texts: Sequence[WrittenText], budget: TreeBudget | int, *, is_remembered: bool = False
) -> Played:
    """Returns the rounds of all texts, trees of a budget or chains of a length. `is_remembered`: each text is kept for
    those after it."""
    played = Played()
    for text in texts:
        sequence = model.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
        values = NodeValues()
        if isinstance(sequence, UsesValues):
            sequence.use_values(values)
        sequence.commit([*text.prompt, text.new[0]])  # the opening brings the first token
        done = 1
        while done < len(text.new):
            start_s = time.perf_counter()
            if isinstance(budget, int):
                draft = sequence.propose(budget)
            else:
                assert isinstance(sequence, ProposesTrees)
                draft = sequence.propose_tree(budget, values)
            played.draft_s += time.perf_counter() - start_s
            left = text.new[done:]
            parents = draft.parents or range(-1, len(draft.token_ids) - 1)
            accepted = accepted_nodes(Tree(parents), draft.token_ids, left)
            if isinstance(draft, TreeDraft):
                values.observe(draft, accepted, left[len(accepted)] if len(accepted) < len(left) else None)
                played.num_runs += draft.num_runs
            committed = left[: len(accepted) + 1]
            start_s = time.perf_counter()
            sequence.commit(committed)
            played.draft_s += time.perf_counter() - start_s
            done += len(committed)
            played.num_rounds += 1
            played.num_tokens += len(committed)
            played.num_nodes += len(draft.token_ids)
        if is_remembered and isinstance(sequence, Remembers):
            sequence.remember([*text.prompt, *text.new], len(text.prompt))
        sequence.close()
    return played


@cache
def target() -> TargetBackend:
    """Returns the embedded target."""
    return load_target(EMBEDDED / "target", num_threads=1)


@cache
def draft_model() -> OnnxDraftModel:
    """Returns the embedded draft."""
    return OnnxDraftModel.open(EMBEDDED / "draft")


def facts() -> TokenizerFacts:
    """Returns what copies know of the embedded tokenizer."""
    return TokenizerFacts.read(EMBEDDED / "draft")


def suffix_model() -> SuffixModel:
    """Returns a suffix model that remembers nothing yet."""
    known = facts()
    return SuffixModel(known, TextsByOwner(known.fingerprint, 100_000))


def union(*copies: CopyModel) -> UnionModel:
    """Returns the embedded draft with copies."""
    return UnionModel(draft_model(), copies)


@cache
def tokenizer() -> EdgeTokenizer:
    """Returns the embedded tokenizer."""
    return EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")


def prompt_ids(name: str, limit: int | None = None) -> list[TokenIds]:
    """Returns the prompts of a set, encoded: `embedded`, or a file of the data folder. Raises `UsageError`."""
    path = None if name == "embedded" else DATA / f"{name}.jsonl"
    if path is not None and not path.is_file():
        raise UsageError(f"there is no {path}: set PROMPTS_DIR to a folder with {name}.jsonl")
    return [tuple(tokenizer().encode(each.text)) for each in load_prompts(path)][:limit]


def write(
    prompts: Sequence[TokenIds], temperature: float, num_new: int, first_seed: int = 0
) -> list[WrittenText]:
    """Returns the target's texts after each prompt, each with a seed of its own."""
    params = [SamplingParams(temperature=temperature, seed=first_seed + i) for i in range(len(prompts))]
    return list(texts_after(target(), list(zip(prompts, params, strict=True)), num_new))


def best(model: DraftModel, texts: Sequence[WrittenText]) -> tuple[float, dict[str, dict[str, float]]]:
    """Returns the most tokens a round of both budgets, and the figures of each."""
    found = {f"{nodes} nodes": play(model, texts, budget) for nodes, budget in BUDGETS.items()}
    figures = {name: each.figures() for name, each in found.items()}
    return max(each.tokens_a_round for each in found.values()), figures
