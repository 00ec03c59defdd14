"""Trees of the INT4 draft: each node is what its path would be as a chain, and a path's KV is kept."""

from __future__ import annotations

import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from draft_dirs import make_chains_only, make_hf_dir

from outrider.common.tree import ROOT, Tree, check_parents
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.base import ProposesTrees
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.pool import SequencePool
from outrider.edge_client.drafting.rows.tree import TreeKv
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.thresholds import GateThresholds

SAMPLED = SamplingParams(temperature=0.8, seed=11)
GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, top_k=40)
PROMPT = [5, 9, 200, 17, 33, 8, 120]
BUDGET = TreeBudget(num_nodes=24, max_depth=6, max_width=4)
CONTEXT = 256
FLOAT32_ACTIVATIONS = 1


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draft")
    # In float32: int8 activations round other last bits to other codes, whatever shares a run (design.md §10).
    hf_dir = make_hf_dir(root / "hf", "qwen3", num_tokens=500)
    export_draft(hf_dir, root / "onnx", accuracy_level=FLOAT32_ACTIVATIONS)
    add_dropout(root / "onnx")
    return root / "onnx"


@pytest.fixture(scope="module")
def model(draft_dir: Path) -> Iterator[OnnxDraftModel]:
    with OnnxDraftModel.open(draft_dir) as model:
        yield model


@pytest.fixture(scope="module")
def old_model(draft_dir: Path) -> Iterator[OnnxDraftModel]:
    """The same weights in a graph exported before trees."""
    old = Path(shutil.copytree(draft_dir, draft_dir.parent / "old"))
    make_chains_only(old)
    with OnnxDraftModel.open(old) as model:
        assert not model.spec.takes_trees
        yield model


def start(model: OnnxDraftModel, text: list[int], sampling: SamplingParams = SAMPLED) -> OnnxDraftSequence:
    sequence = model.sequence(sampling, num_prompt_tokens=len(PROMPT))
    sequence.commit(text)
    return sequence


def tree_after(model: OnnxDraftModel, text: list[int], sampling: SamplingParams = SAMPLED) -> TreeDraft:
    return start(model, text, sampling).propose_tree(BUDGET, NodeValues())


def logits_after(model: OnnxDraftModel, text: list[int]) -> np.ndarray:
    """As a plain reference: fed at once, without a tree."""
    return start(model, text).parts[0].feed(text, 0).logits[0].copy()


def random_paths(rng: random.Random, num_levels: int) -> list[list[tuple[int, ...]]]:
    """Paths of a random tree of distinct siblings, those of one level together."""
    levels: list[list[tuple[int, ...]]] = [[()]]
    for _ in range(num_levels):
        children = {(*rng.choice(levels[-1]), rng.randrange(500)) for _ in range(rng.randrange(1, 6))}
        levels.append(sorted(children))
    return levels[1:]


def test_each_node_of_a_random_tree_has_the_logits_of_its_path_as_a_chain(model: OnnxDraftModel) -> None:
    rng = random.Random(5)
    for _ in range(5):
        sequence = start(model, PROMPT)
        sequence.feed_root()
        for level in random_paths(rng, 4):
            found = [rows.logits[0].copy() for rows, _ in sequence.feed_paths(level)]
            for path, logits in zip(level, found, strict=True):
                assert np.abs(logits - logits_after(model, [*PROMPT, *path])).max() < 1e-4
        sequence.check_integrity()


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_a_drawn_tree_has_the_supports_of_chains(sampling: SamplingParams, model: OnnxDraftModel) -> None:
    sequence = model.sequence(sampling, num_prompt_tokens=len(PROMPT), num_support=16)
    sequence.commit(PROMPT)
    draft = sequence.propose_tree(BUDGET, NodeValues())
    tree = Tree(draft.parents)
    assert len(draft.token_ids) == BUDGET.num_nodes and len(tree.runs) > 1
    sequence.check_integrity()
    for node, support in zip(tree.internal, draft.supports, strict=True):
        path = [draft.token_ids[each] for each in tree.path(node)]
        chain = model.sequence(sampling, num_prompt_tokens=len(PROMPT), num_support=16)
        chain.commit([*PROMPT, *path])
        (alone,) = chain.propose(1).supports
        shares = [dict(zip(each.token_ids, each.weights, strict=True)) for each in (support, alone)]
        both = shares[0].keys() & shares[1].keys()  # the last may differ by rounding
        assert len(both) >= 15 and all(abs(shares[0][i] - shares[1][i]) <= 4 for i in both)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, PENALISED], ids=["sampled", "greedy", "penalised"])
def test_the_likeliest_path_is_what_is_proposed_as_a_chain(
    sampling: SamplingParams, model: OnnxDraftModel
) -> None:
    for length in range(3, 8):
        draft = tree_after(model, PROMPT[:length], sampling)
        check_parents(draft.parents, draft.token_ids, BUDGET.num_nodes)
        assert len(draft.token_ids) == BUDGET.num_nodes
        assert draft.draft_probs == ()
        tree = Tree(draft.parents)
        assert max(tree.depths) < BUDGET.max_depth
        main = [draft.token_ids[node] for node in tree.runs[0]]
        assert main == list(start(model, PROMPT[:length], sampling).propose(len(main)).token_ids)


def test_every_child_continues_its_own_path(model: OnnxDraftModel) -> None:
    """Penalties and noise are those of the node's own place: its first child is the chain's next token there."""
    draft = tree_after(model, PROMPT, PENALISED)
    tree = Tree(draft.parents)
    for node in range(len(draft.token_ids)):
        if not draft.continuations[node + 1]:
            continue
        path = [draft.token_ids[each] for each in tree.path(node)]
        sequence = start(model, PROMPT, PENALISED)
        sequence.commit(path)
        (told,) = draft.continuations[node + 1]
        assert told.token_ids[0] == sequence.propose(1).token_ids[0]


@pytest.mark.parametrize("name", ["entropy", "margin", "nll"])
def test_a_stop_gate_ends_the_likeliest_path_where_it_ends_a_chain_and_the_others_by_their_own_signals(
    name: str, model: OnnxDraftModel
) -> None:
    signals = start(model, PROMPT).propose(40).signals
    field = {"entropy": "entropy_bits"}.get(name, name)
    thresholds = GateThresholds(**{name: statistics.median(getattr(each, field) for each in signals)})
    gate = Gate(GateSettings(GateUse.STOP, thresholds, max_hard_ratio=0.3))
    num_ended = num_left = 0
    for length in range(2, 8):
        text = PROMPT[:length]
        draft = start(model, text).propose_tree(BUDGET, NodeValues(), gate.node_rule(text))
        tree = Tree(draft.parents)
        main = tree.runs[0] if draft.token_ids else range(0)
        chain = start(model, text).propose(BUDGET.max_depth, gate.stop_rule(text))
        assert [draft.token_ids[node] for node in main] == list(chain.token_ids[: len(main)])
        if draft.doubted is not None:
            assert chain.doubted is not None and len(main) == len(chain.token_ids)
            assert draft.doubted.nll == pytest.approx(chain.doubted.nll, abs=1e-3)
        num_ended += len(chain.token_ids) < BUDGET.max_depth
        num_left += len(draft.token_ids)
        assert len(draft.signals) == len(draft.token_ids)
        for node in range(len(tree)):
            path = [draft.token_ids[each] for each in tree.path(node)]
            alone = start(model, [*text, *path[:-1]]).propose(1).signals[0]
            assert alone.entropy_bits == pytest.approx(draft.signals[node].entropy_bits, abs=1e-3)
            assert alone.margin == pytest.approx(draft.signals[node].margin, abs=1e-4)
            hard = [thresholds.is_hard(draft.signals[each]) for each in tree.path(node)[:-1]]
            assert all(sum(hard[:n]) <= 0.3 * n for n in range(1, len(hard) + 1)), "a path goes on"
        if draft.token_ids:
            assert draft.signals[0].nll == pytest.approx(chain.signals[0].nll, abs=1e-3)
    assert num_ended and num_left


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, PENALISED], ids=["sampled", "greedy", "penalised"])
def test_a_graph_from_before_trees_proposes_the_same_tree(
    sampling: SamplingParams, model: OnnxDraftModel, old_model: OnnxDraftModel
) -> None:
    ours, theirs = start(model, PROMPT, sampling), start(old_model, PROMPT, sampling)
    values = NodeValues()
    for _ in range(4):
        draft, same = ours.propose_tree(BUDGET, values), theirs.propose_tree(BUDGET, values)
        assert (draft.token_ids, draft.parents) == (same.token_ids, same.parents)
        assert draft.num_runs <= BUDGET.max_depth < same.num_runs
        for sequence in (ours, theirs):
            sequence.commit([*draft.token_ids[:2], 3])
            sequence.check_integrity()


def test_of_a_given_shape_each_node_is_that_choice_of_the_draft_after_its_path(model: OnnxDraftModel) -> None:
    shape = ((1,), (0,), (1, 2), (0, 0), (0, 3), (1, 2, 0), (0, 0, 1))
    sequence = start(model, PROMPT)
    draft = sequence.propose_tree(TreeBudget(7, 3, 8, shape=shape), NodeValues())
    tree = Tree(draft.parents)
    ranks: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(draft.parents):
        (told,) = draft.continuations[parent + 1]
        ranks[node] = (*ranks[parent], told.token_ids.index(draft.token_ids[node]))
    assert {ranks[node] for node in range(len(tree))} == set(shape)
    assert draft.num_runs == 3
    sequence.commit([draft.token_ids[each] for each in tree.path(4)])
    sequence.check_integrity()


def test_the_kv_of_any_committed_path_is_kept(model: OnnxDraftModel) -> None:
    rng = random.Random(1)
    sequence, text = start(model, PROMPT), list(PROMPT)
    for round_ in range(12):
        draft = sequence.propose_tree(BUDGET, NodeValues())
        tree = Tree(draft.parents)
        nodes = tree.path(rng.randrange(len(draft.token_ids)))
        path = [draft.token_ids[node] for node in nodes]
        num_fed = sum(bool(draft.continuations[node + 1]) for node in nodes)
        cut = rng.randrange(len(path) + 1) if round_ % 2 else len(path)
        for part in (path[:cut], path[cut:], [rng.randrange(500)]):
            sequence.commit(part)
            sequence.check_integrity()
        text += path
        assert list(sequence.cached_token_ids[: len(text)]) == text[: len(text) - len(path) + num_fed]
        text.append(sequence._text[-1])
        assert sequence._text == text
        found = sequence.feed_root().logits[0]
        assert np.abs(found - logits_after(model, text)).max() < 1e-4


def test_a_path_that_was_assumed_wrongly_is_given_up_and_never_contradicts_the_text(
    model: OnnxDraftModel,
) -> None:
    sequence = start(model, PROMPT)
    draft = sequence.propose_tree(BUDGET, NodeValues())
    other = next(node for node, parent in enumerate(draft.parents) if parent == ROOT and node)
    sequence.commit(draft.token_ids[:2])
    sequence.truncate(len(PROMPT))
    sequence.check_integrity()
    sequence.commit([draft.token_ids[other], 4])
    sequence.check_integrity()
    expected = start(model, [*PROMPT, draft.token_ids[other], 4]).propose_tree(BUDGET, NodeValues())
    assert sequence.propose_tree(BUDGET, NodeValues()).token_ids == expected.token_ids
    sequence.check_integrity()


def test_a_chain_after_a_tree_and_a_tree_after_a_chain_are_those_of_a_fresh_sequence(
    model: OnnxDraftModel,
) -> None:
    sequence = start(model, PROMPT)
    sequence.propose(5)
    assert sequence.propose_tree(BUDGET, NodeValues()).token_ids == tree_after(model, PROMPT).token_ids
    assert sequence.propose(5).token_ids == start(model, PROMPT).propose(5).token_ids
    sequence.check_integrity()


def test_at_the_end_of_the_context_trees_get_small_and_then_empty(model: OnnxDraftModel) -> None:
    rng = random.Random(3)
    for room in (9, 3, 1, 0):
        draft = tree_after(model, [rng.randrange(500) for _ in range(CONTEXT - room)])
        depths = Tree(draft.parents).depths
        assert max(depths, default=-1) < room
        assert bool(draft.token_ids) == bool(room)
        num_fed = sum(bool(told.token_ids) for each in draft.continuations for told in each)
        assert num_fed <= room + 1  # one slot a node, beside the last token's


def test_the_variant_for_dropout_proposes_the_same_trees_and_still_tells_variance(draft_dir: Path) -> None:
    with OnnxDraftModel.open(draft_dir, has_variance=True) as varied:
        sequence = start(varied, PROMPT)
        first = sequence.propose(2)
        draft = sequence.propose_tree(BUDGET, NodeValues())
        again = sequence.propose(2)
        assert again.token_ids == first.token_ids
        assert again.signals[0].variance == pytest.approx(first.signals[0].variance, rel=1e-3)
    with OnnxDraftModel.open(draft_dir) as plain:
        assert draft.token_ids == tree_after(plain, PROMPT).token_ids


def test_trees_pass_the_drafter_and_the_pool(model: OnnxDraftModel) -> None:
    drafter = Drafter(SequencePool(model, 1 << 30).lease(), SAMPLED, len(PROMPT))
    assert drafter.can_propose_trees
    drafter.warm_up(PROMPT)
    draft, _ = drafter.propose_tree(PROMPT, BUDGET, NodeValues(), assumed=(7, 8))
    assert draft.token_ids == tree_after(model, [*PROMPT, 7, 8]).token_ids
    draft, _ = drafter.propose_tree([*PROMPT, 7], BUDGET, NodeValues())
    assert draft.token_ids == tree_after(model, [*PROMPT, 7]).token_ids
    assert isinstance(model.sequence(SAMPLED), ProposesTrees)


def test_a_stretched_draft_takes_its_time_once_a_run(model: OnnxDraftModel) -> None:
    class Counting:
        time_s = 0.0

        def now(self) -> float:
            return self.time_s

        def sleep(self, seconds: float) -> None:
            self.time_s += seconds

    clock = Counting()
    drafter = Drafter(model, SAMPLED, len(PROMPT), min_draft_s=2.0, clock=clock)
    draft, took_ms = drafter.propose_tree(PROMPT, BUDGET, NodeValues())
    assert took_ms == 2000 * draft.num_runs


def test_slots_are_found_by_path_and_only_those_of_what_comes_after_a_descent_are_kept() -> None:
    kv = TreeKv(10)
    kv.add([(1,), (2,)])
    bias = kv.add([(2, 5), (1, 6), (2, 7)])
    assert (bias == 0).tolist() == [
        [False, True, True, False, False],
        [True, False, False, True, False],
        [False, True, False, False, True],
    ]
    assert kv.follow([2, 7, 9]) == (11, 14)
    assert kv.follow([3]) == ()
    kv.descend((2,))
    assert kv.follow([7]) == (14,)
    assert kv.follow([6]) == ()
    kv.check_integrity()
