"""Staged drafts: the model's own chain, in fewer runs; unions and owners through the pool that sessions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.sources.two_rows import TwoRowModel
from outrider.common.types import SamplingParams
from outrider.edge_client.config.run_config import default_draft_dir, run_config
from outrider.edge_client.daemon.http.keys import owner_of
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import TokenizerFacts
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.staged import StagedModel, StagedSequence
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.drafting.union import UnionModel
from outrider.edge_client.session.factory import create_edge
from outrider.edge_client.session.shared_edge import SharedEdge


@pytest.fixture(scope="module")
def model() -> Iterator[OnnxDraftModel]:
    with OnnxDraftModel.open(default_draft_dir()) as opened:
        yield opened


def stage(model: DraftModel) -> StagedModel:
    facts = TokenizerFacts.read(default_draft_dir())
    return StagedModel(model, [SuffixModel(facts, TextsByOwner("", 10_000))])


@pytest.mark.parametrize("kind", [OnnxDraftModel, TwoRowModel])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_spare_runs_and_the_chain_is_the_models(
    kind: type[OnnxDraftModel], temperature: float
) -> None:
    """A text that the model wrote before, word for word: few runs are left. A row alone differs in the last digits
    from a row beside others, so that now and then a token may be another; with two rows in every run none is."""
    model = kind.open(default_draft_dir())
    sampling = SamplingParams(temperature=temperature, seed=3)
    prompt = list(range(300, 330))
    plain = model.sequence(sampling)
    plain.commit(prompt)
    text = plain.propose(60).token_ids
    staged = stage(model)
    (copy,) = staged.copies
    assert isinstance(copy, SuffixModel)
    copy.remember([*prompt, *text], len(prompt))
    found, num_runs, equal = staged.sequence(sampling), 0, 0
    plain = model.sequence(sampling)
    for sequence in (found, plain):
        sequence.commit(prompt)
    for start in range(0, 56, 7):
        draft, wanted = found.propose(7), plain.propose(7)
        assert isinstance(draft, TreeDraft) and len(draft.token_ids) == len(draft.signals) == 7
        equal += sum(a == b for a, b in zip(draft.token_ids, wanted.token_ids, strict=True))
        num_runs += draft.num_runs
        for sequence in (found, plain):
            sequence.commit(text[start : start + 7])
            sequence.check_integrity()
    assert equal >= (56 if kind is TwoRowModel else 54) and num_runs <= 28


def test_wrong_guesses_cost_rows_and_change_nothing(model: OnnxDraftModel) -> None:
    sampling = SamplingParams(temperature=0.0, seed=3)
    staged, plain = stage(model).sequence(sampling), model.sequence(sampling)
    for sequence in (staged, plain):
        sequence.commit([7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 11, 12])
    for _ in range(4):
        draft, wanted = staged.propose(5), plain.propose(5)
        assert draft.token_ids == wanted.token_ids
        for sequence in (staged, plain):
            sequence.commit(wanted.token_ids[:2])
            sequence.truncate(sequence.position - 1)
            sequence.check_integrity()
    budget = TreeBudget(8, 4, 3)
    ours, theirs = (each.propose_tree(budget, NodeValues()) for each in (staged, plain))
    assert (ours.token_ids, ours.parents) == (theirs.token_ids, theirs.parents)


def test_a_model_without_rows_beside_each_other_takes_no_guess(model: OnnxDraftModel) -> None:
    sequence = stage(model).sequence(SamplingParams(seed=1), num_prompt_tokens=3)
    assert isinstance(sequence, StagedSequence)
    sequence.commit([1, 2, 3])
    assert sequence.propose(1).num_runs == 1 and sequence.write_alone(4).token_ids


def test_sessions_of_a_union_share_the_models_kv_and_no_owner_anothers_texts() -> None:
    for strategy in ("model+suffix", "staged", "staged+suffix"):
        edge = create_edge(run_config(draft_strategy=strategy, mode="edge-only", max_new_tokens=6))
        shared = SharedEdge(edge, 1 << 24)
        reused = []
        for owner in ("one", "one", "two"):
            prepared = shared.prepare("def main():\n    return", edge.config, owner=owner)
            for _ in prepared.session.generate():
                pass
            reused.append(len(prepared.session.result.token_ids))
        shared.check_integrity()
        assert min(reused) > 0
        draft = edge.draft
        assert isinstance(draft, UnionModel)
        texts = [draft.of_owner(owner) for owner in ("one", "three")]
        known = [bool(next(iter(each.copies)).others()) for each in texts]
        assert known == [True, False], strategy
        shared.close()


def test_an_owner_is_a_key_and_a_user_of_it() -> None:
    owners = [owner_of(*each) for each in (("", ""), ("k", ""), ("k", "u"), ("l", "u"), ("", "u"))]
    assert len(set(owners)) == 5 and owners[0] == "" and not any("k" == each[:1] for each in owners)
