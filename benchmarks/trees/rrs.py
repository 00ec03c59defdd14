"""Trees and chains of `sparse`, tokens a round: each way writes texts of its own, by its own rounds.

A round counts with the tokens that are expected of it, given its draft and the target's rows: the chances of all nodes
and one. Which come is then drawn, so that the text goes on as it does in use. Values of nodes are learned from the
verdicts on the texts before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.results_file import Found
from benchmarks.trees.draft import embedded_prompts
from outrider.cloud_verifier.backends.base import ForwardItem, KVSequence, TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.methods.supports import Remainder
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.methods import DEFAULT_SUPPORT_SIZE, MAX_SUPPORT_SIZE
from outrider.common.tree import ROOT, Tree, supports_by_row
from outrider.common.types import CorrectionKind, Draft, Method, MethodParams, SamplingParams, TokenIds
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED

NUM_NEW, NUM_SEEDS, TEMPERATURE = 160, 8, 0.8
CHAINS, NODES = (4, 8, 16), 16
BUDGET = TreeBudget(NODES, 16, 4)
SUPPORT_SIZES = (DEFAULT_SUPPORT_SIZE, MAX_SUPPORT_SIZE)

Propose = Callable[[OnnxDraftSequence, NodeValues], Draft]
WAYS: dict[str, Propose] = {
    **{f"chain {n}": lambda sequence, _, n=n: sequence.propose(n) for n in CHAINS},  # type: ignore[misc]
    f"tree {NODES}": lambda sequence, values: sequence.propose_tree(BUDGET, values),
}


class Played(NamedTuple):
    """Holds what the rounds of one way came to."""

    tokens_per_round: float  # expected of each, meaned
    runs_per_round: float  # of the draft
    ids_per_node: float  # in supports, which are most of a round's bytes
    num_rounds: int


def run() -> Found:
    """Returns the measure of the embedded pair."""
    backend, prompts = load_target(EMBEDDED / "target"), embedded_prompts() * NUM_SEEDS
    found: dict[str, dict[str, Played]] = {}
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        for size in SUPPORT_SIZES:
            found[f"{size} ids"] = {
                name: play(backend, model, prompts, propose, size) for name, propose in WAYS.items()
            }
            print(size, found[f"{size} ids"], flush=True)
    ratios = {size: _ratio(ways) for size, ways in found.items()}
    name = f"{DEFAULT_SUPPORT_SIZE} ids"
    tree = found[name][f"tree {NODES}"].tokens_per_round
    what = (
        f"sparse, supports of {name}, T = {TEMPERATURE}, tokens a round, trees of {NODES} nodes ({tree:.2f}) : the "
        f"best chain of at most as many (with {MAX_SUPPORT_SIZE} ids {ratios[f'{MAX_SUPPORT_SIZE} ids']:.2f})"
    )
    details = {size: {way: each._asdict() for way, each in ways.items()} for size, ways in found.items()}
    return [judged("tree.rrs", what, ratios[name], "ratio", at_least(1.10))], details


def _ratio(ways: dict[str, Played]) -> float:
    best = max(ways[f"chain {length}"].tokens_per_round for length in CHAINS)
    return ways[f"tree {NODES}"].tokens_per_round / best


def play(
    backend: TargetBackend,
    model: OnnxDraftModel,
    prompts: Sequence[TokenIds],
    propose: Propose,
    num_support: int,
) -> Played:
    """Returns what the rounds of all texts came to: up to `NUM_NEW` tokens after each prompt, each with a seed of its
    own."""
    values = NodeValues()
    expected, num_runs, num_ids, num_nodes = list[float](), 0, 0, 0
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=TEMPERATURE, seed=1 + number)
        sequence = model.sequence(sampling, num_prompt_tokens=len(prompt), num_support=num_support)
        kv, text = backend.new_sequence(), list(prompt)
        while len(text) - len(prompt) < NUM_NEW and text[-1] not in backend.eos_token_ids:
            sequence.commit(text[sequence.position :])
            draft = propose(sequence, values)
            round_input = _verify_input(backend, kv, text, draft, sampling)
            expected.append(1 + sum(chances(round_input)))
            outcome = create_method(Method.SPARSE).verify(round_input)
            backend.keep(kv, len(text), outcome.accepted_nodes)
            text += _committed(draft, outcome)
            num_runs += draft.num_runs if isinstance(draft, TreeDraft) else len(draft.token_ids)
            num_ids += sum(len(support.token_ids) for support in draft.supports)
            num_nodes += len(draft.token_ids)
            if isinstance(draft, TreeDraft):
                is_over = outcome.correction_kind is CorrectionKind.NONE
                values.observe(draft, outcome.accepted_nodes, None if is_over else outcome.correction)
        sequence.close()
        backend.close(kv)
    count = len(expected)
    return Played(
        round(sum(expected) / count, 3), round(num_runs / count, 2), round(num_ids / num_nodes, 2), count
    )


def _verify_input(
    backend: TargetBackend, kv: KVSequence, text: list[int], draft: Draft, sampling: SamplingParams
) -> RoundInput:
    """Feeds a draft to the target; a chain as the tree that it is."""
    parents = draft.parents or tuple(range(ROOT, len(draft.token_ids) - 1))
    tree = Tree(parents)
    supports, position = supports_by_row(tree, draft.supports), len(text)
    item = ForwardItem(kv, [*text[kv.length :], *draft.token_ids], len(draft.token_ids) + 1, parents)
    logits = np.asarray(backend.forward([item]))
    each = StepRound(sampling, position, (), (), draft.token_ids, tree, supports)
    return RoundInput(
        rows=HostRows(logits, each, backend.eos_token_ids, backend.num_tokens),
        draws=KeyedDraws(sampling.seed, position),
        position=position,
        draft_tokens=draft.token_ids,
        draft_probs=(),
        supports=supports,
        stop_ids=frozenset(backend.eos_token_ids),
        method_params=MethodParams(),
        tree=tree,
    )


def chances(round_input: RoundInput) -> list[float]:
    """Returns the chance of each node to be accepted, given the draft and the target's rows."""
    tree = round_input.tree
    assert tree is not None, "a chain is fed as a tree"
    found = {ROOT: 1.0}
    for node in tree.internal:
        remainder, reach = Remainder(round_input, node + 1), found[node]
        for child in tree.children(node):
            token_id = round_input.draft_tokens[child]
            found[child] = reach * min(1.0, remainder.ratio(token_id))
            reach -= found[child]
            remainder.reject(token_id)
    return [found[node] for node in range(len(tree))]


def _committed(draft: Draft, outcome: Outcome) -> list[int]:
    accepted = [draft.token_ids[node] for node in outcome.accepted_nodes]
    return accepted if outcome.correction_kind is CorrectionKind.NONE else [*accepted, outcome.correction]
