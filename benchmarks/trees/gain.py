"""Trees of 64 nodes beside the best chain of any length, tokens a round, on every trained pair of the bank.

`make pair-bank` builds the bank. Values are fitted and judged as in `draft`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.controller.record_bank import read_prompts
from benchmarks.results_file import Found
from benchmarks.trees.texts import chain, figures, play, play_fitted
from outrider.cloud_verifier.backends.loading import load_target
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.experiments.shared.results import at_least, judged
from outrider.training.bank.pairs import BANK, RUN, BankDraft, BankFolder
from outrider.training.judge.target_text import WrittenText, written_texts

NUM_PROMPTS, NUM_NEW = 16, 160
TEMPERATURE = 0.8
CHAINS = (2, 4, 8, 16, 32)
BUDGET = TreeBudget(64, 16, 6)


def run() -> Found:
    """Returns the worst pair's ratio. Raises `UsageError` where the bank is not built."""
    pairs = dict(_pairs())
    worst = min(pairs, key=lambda name: pairs[name]["ratio"])
    what = ", ".join(f"{name} {found['ratio']:.2f}" for name, found in pairs.items())
    measure = judged(
        "tree.gain",
        f"trees of 64 nodes : best chain, tokens a round, T = 0.8, the worst of {what}",
        pairs[worst]["ratio"],
        "ratio",
        at_least(1.35),
    )
    return [measure], {"pairs": pairs}


def _pairs() -> Iterator[tuple[str, dict[str, float]]]:
    for target in BANK:
        folder = BankFolder(RUN, target)
        prompts = read_prompts(folder, NUM_PROMPTS)
        texts = list(written_texts(load_target(folder.target_dir), prompts, TEMPERATURE, NUM_NEW))
        for draft in target.drafts:
            if is_trained(draft):
                name = f"{target.name}/{draft.name}"
                with OnnxDraftModel.open(folder.draft_dir(draft)) as model:
                    yield name, compare(model, texts)
                print(f"  {name} done", flush=True)


def is_trained(draft: BankDraft) -> bool:
    """Returns whether a draft of the bank has weights that were trained as a draft."""
    return draft.strategy == "model" and not draft.first_layers and (draft.tokens > 0 or not draft.size)


def compare(model: OnnxDraftModel, texts: list[WrittenText]) -> dict[str, float]:
    """Returns tokens a round of each way, and the tree's over the best chain's."""
    chains = {f"chain {length}": play(model, texts, chain(length)) for length in CHAINS}
    trees = play_fitted(model, texts, BUDGET)
    tokens = {name: figures(each)["tokens_per_round"] for name, each in (chains | {"tree 64": trees}).items()}
    return {
        **tokens,
        "ratio": round(trees.tokens_a_round / max(c.tokens_a_round for c in chains.values()), 3),
    }
