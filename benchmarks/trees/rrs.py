"""Trees and chains of `sparse`, tokens a round: each on texts that it writes itself, since their texts differ.

A round counts with the tokens that are expected of its draft: the chances of all nodes, given the target's rows, and
the one after them. Which of them come is then drawn, so that the texts go on as they do in use. The draft learns from
each verdict, text by text, as a session does; its first guesses come from this pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.results_file import Found
from benchmarks.trees.draft import embedded_prompts
from benchmarks.trees.texts import Rounds, figures
from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.verification.methods.base import RoundInput
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.methods.supports import Remainder
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.tree import ROOT, Tree, supports_by_row
from outrider.common.types import Draft, Method, MethodParams, SamplingParams, TokenIds
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.models import EMBEDDED

NUM_NEW, TEMPERATURE = 160, 0.8
CHAINS = (4, 8, 16)
BUDGETS = {16: TreeBudget(16, 12, 4), 64: TreeBudget(64, 12, 8)}
SUPPORT_SIZES = (16, 32, 64)

Propose = Callable[[OnnxDraftSequence], Draft]


def run() -> Found:
    """Returns the measure of the embedded pair."""
    backend, prompts = load_target(EMBEDDED / "target"), embedded_prompts()
    rounds: dict[str, Rounds] = {}
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        for size in SUPPORT_SIZES:
            for name, proposing in _ways():
                played = Rounds()
                for number, prompt in enumerate(prompts):
                    sampling = SamplingParams(temperature=TEMPERATURE, seed=1 + number)
                    _play(_Text(backend, model, prompt, sampling, size), proposing(), played)
                rounds[f"{name}, {size} ids"] = played
                print(f"{name}, {size} ids: {figures(played)}", flush=True)
    return [], {"rounds": {name: figures(each) for name, each in rounds.items()}}


class _Learning:
    """Proposes drafts of one text."""

    def __init__(self, budget: TreeBudget | int) -> None:
        self.values, self._budget = NodeValues(), budget

    def propose(self, sequence: OnnxDraftSequence) -> Draft:
        if isinstance(self._budget, int):
            return sequence.propose(self._budget)
        return sequence.propose_tree(self._budget, self.values)


def _ways() -> Iterator[tuple[str, Callable[[], _Learning]]]:
    for length in CHAINS:
        yield f"chain {length}", lambda length=length: _Learning(length)
    for num_nodes, budget in BUDGETS.items():
        yield f"tree {num_nodes}", lambda budget=budget: _Learning(budget)


class _Text:
    def __init__(
        self,
        backend: TargetBackend,
        model: OnnxDraftModel,
        prompt: TokenIds,
        sampling: SamplingParams,
        num_support: int,
    ) -> None:
        self.sampling, self.backend = sampling, backend
        self.prompt, self.token_ids = prompt, list(prompt)
        sequence = model.sequence(sampling, num_prompt_tokens=len(prompt), num_support=num_support)
        assert isinstance(sequence, OnnxDraftSequence)
        self.draft = sequence
        self.kv = backend.new_sequence()

    def judge(self, draft: Draft) -> tuple[float, RoundInput]:
        pass


def _play(text: _Text, learning: _Learning, rounds: Rounds) -> None:
    backend, sampling = text.backend, text.sampling
    method = create_method(Method.SPARSE)
    while len(text.token_ids) - len(text.prompt) < NUM_NEW:
        text.draft.commit(text.token_ids[text.draft.position :])
        draft = learning.propose(text.draft)
        parents = draft.parents or tuple(range(-1, len(draft.token_ids) - 1))
        tree = Tree(parents)
        start = len(text.token_ids)
        fed = [*text.token_ids[text.kv.length :], *draft.token_ids]
        item = ForwardItem(text.kv, fed, len(draft.token_ids) + 1, parents)
        logits = np.asarray(backend.forward([item]))
        supports = supports_by_row(tree, draft.supports)
        step = StepRound(sampling, start, (), (), draft.token_ids, tree, supports)
        rows = HostRows(logits, step, backend.eos_token_ids, backend.num_tokens)
        round_input = RoundInput(
            rows,
            KeyedDraws(sampling.seed, start),
            start,
            draft.token_ids,
            (),
            supports,
            frozenset(backend.eos_token_ids),
            MethodParams(),
            tree=tree,
        )
        expected = 1 + sum(_chances(round_input, tree))
        outcome = method.verify(round_input)
        backend.keep(text.kv, start, outcome.accepted_nodes)
        new = [draft.token_ids[node] for node in outcome.accepted_nodes]
        is_over = outcome.correction_kind == "none"
        if isinstance(draft, TreeDraft):
            learning.values.observe(draft, outcome.accepted_nodes, None if is_over else outcome.correction)
        if not is_over:
            new.append(outcome.correction)
        text.token_ids += new
        rounds.num_rounds += 1
        rounds.num_tokens += expected
        rounds.num_nodes += len(draft.token_ids)
        rounds.num_runs += draft.num_runs if isinstance(draft, TreeDraft) else len(draft.token_ids)
        if new[-1] in backend.eos_token_ids:
            break
    text.draft.close()
    backend.close(text.kv)


def _chances(round_input: RoundInput, tree: Tree) -> list[float]:
    """Returns the chance of each node to be accepted."""
    chances = {ROOT: 1.0}
    for node in tree.internal:
        remainder, reach = Remainder(round_input, node + 1), chances[node]
        for child in tree.children(node):
            token_id = round_input.draft_tokens[child]
            chances[child] = reach * min(1.0, remainder.ratio(token_id))
            reach -= chances[child]
            remainder.reject(token_id)
    del chances[ROOT]
    return list(chances.values())
