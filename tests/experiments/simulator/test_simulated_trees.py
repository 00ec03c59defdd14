"""Trees in virtual time: what their rounds take and bring, in every way that the product has to use them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from played_systems import DRAFT, VERIFIER, edges, seen, system

from outrider.common.errors import UsageError
from outrider.edge_client.controller.tree_policy import tree_tokens
from outrider.edge_client.drafting.base import ProposesTrees
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, NO_RANK, TextTrace
from outrider.experiments.simulator.parts import text
from outrider.experiments.simulator.parts.drafts import TracedText, create_sequence
from outrider.experiments.simulator.parts.times import DraftTimes

RTT_MS = 50
PROMPT = 3
RANKS = (0, 1, 0, 3, NO_RANK, 0, 0, 2)
GAPS = (0.0, 0.2, 0.5, 0.9)


def traced() -> TracedText:
    """Returns a text whose draft tells four continuations everywhere."""
    runs = [1, 0, 1, 0, 0, 2, 1, 0]
    gaps = np.full((len(RANKS), 8), np.inf, np.float32)
    gaps[:, : len(GAPS)] = GAPS
    nothing = np.zeros((len(RANKS), 0), np.float32)
    ranks = np.array(RANKS, np.uint8)
    return TracedText(TextTrace(np.array(runs, np.uint8), nothing, ranks=ranks, rank_gaps=gaps))


def proposed(index: int, budget: TreeBudget) -> tuple[TreeDraft, list[float]]:
    """Returns a tree drafted at an index of that text, and what the draft's runs took, in seconds."""
    slept: list[float] = []
    times = DraftTimes(token_ms=2.0, tree_row_ms=0.5)
    sequence = create_sequence(times, slept.append, traced(), PROMPT)
    sequence.commit(range(PROMPT + 1 + index))
    sequence.num_read = sequence.position
    assert isinstance(sequence, ProposesTrees)
    return sequence.propose_tree(budget, NodeValues()), slept


def accepted(draft: TreeDraft, position: int) -> int:
    """Returns how many nodes the text accepts after `position` tokens."""
    node, num_accepted = -1, 0
    while True:
        right = text.TEXT[position + num_accepted]
        found = [i for i, p in enumerate(draft.parents) if p == node and draft.token_ids[i] == right]
        if not found:
            return num_accepted
        node, num_accepted = found[0], num_accepted + 1


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("index", range(len(RANKS)))
def test_a_tree_of_one_level_has_the_texts_token_where_its_rank_is_below_the_width(index, width):
    draft, _ = proposed(index, TreeBudget(width, 1, width))
    assert accepted(draft, PROMPT + 1 + index) == int(RANKS[index] < width)


def test_deep_trees_follow_the_text_over_ranks_until_one_that_they_do_not_hold():
    draft, _ = proposed(0, TreeBudget(400, 5, 4))
    assert accepted(draft, PROMPT + 1) == 4  # ranks 0, 1, 0, 3, then none
    assert accepted(proposed(0, TreeBudget(5, 5, 1))[0], PROMPT + 1) == 1


def test_a_run_takes_its_rows():
    draft, slept = proposed(0, TreeBudget(8, 4, 4))
    rows = [round((seconds * 1e3 - 2.0) / 0.5) + 1 for seconds in slept]
    assert rows[0] == 1 and rows[1:] == [2] * (draft.num_runs - 1)


def test_rounds_of_trees_take_draft_trip_and_forward_of_their_nodes():
    verifier = {"times": {**VERIFIER, "node_ms": 0.25}}
    found = seen(system(edges(requests=1, acceptance=0.6, edge={"tree": 16}), verifier=verifier))
    rounds = found.logs[0].result.stats.rounds[:-5]  # the last ones are shorter
    for gap_s, record in zip(found.gaps_s, rounds, strict=False):
        nodes = record.num_draft_tokens
        verify_ms = VERIFIER["step_ms"] + (nodes + 1) * VERIFIER["token_ms"] + nodes * 0.25
        assert record.main_path is not None and nodes == 16
        assert 0 < record.draft_ms <= 12 * DRAFT["token_ms"]
        assert gap_s * 1e3 == pytest.approx(record.draft_ms + RTT_MS + verify_ms, abs=1e-6)


def test_drawn_trees_bring_what_the_cost_model_expects_of_them():
    for alpha, nodes in ((0.6, 16), (0.6, 64), (0.8, 16)):
        group = edges(count=4, requests=4, acceptance=alpha, edge={"tree": nodes, "tree_depth": 32})
        total = seen(system(group)).outcome.total
        assert total.num_tree_rounds > 0.9 * total.num_rounds
        expected = tree_tokens((alpha,), nodes)[nodes]
        assert total.tokens_per_round == pytest.approx(expected, rel=0.1)


def test_recorded_trees_bring_more_than_the_chain_of_as_many_tokens():
    def tokens_per_round(**edge):
        group = edges(count=4, requests=8, acceptance="embedded T=0.8", output_tokens=100, edge=edge)
        return seen(system(group)).outcome.total.tokens_per_round

    chain, tree = tokens_per_round(num_speculative_tokens=16), tokens_per_round(tree=16)
    assert tokens_per_round(tree=64) > 1.2 * tree > 1.2 * chain


@pytest.mark.parametrize(
    "edge",
    [
        {"tree": "auto"},
        {"tree": 64, "pipeline": "on"},
        {"tree": 16, "method": "typical"},
        {"tree": 16, "mode": "co-located"},
        {"tree": "auto", "mode": "auto", "pipeline": "off"},
    ],
)
def test_every_way_to_use_trees_plays_and_writes_the_one_text(edge):
    slow = {"times": {"step_ms": 60.0}}  # no stream of the target is as fast
    found = seen(system(edges(count=2, requests=2, acceptance=0.7, edge=edge), verifier=slow))
    assert found.outcome.total.num_finished == 4 and found.outcome.total.num_tree_rounds > 0
    for log in found.logs:
        start = log.ask.num_prompt_tokens
        assert list(log.result.token_ids) == text.TEXT[start : start + log.num_tokens]


def test_a_busy_verifier_gets_smaller_trees_than_an_idle_one():
    def nodes(count):
        group = edges(count=count, requests=4, acceptance=0.7, link={"rtt_ms": 100}, edge={"tree": "auto"})
        return seen(system(group, verifier={"times": {"step_ms": 10.0, "token_ms": 0.5}})).outcome.total

    assert nodes(24).draft_tokens_per_round < nodes(1).draft_tokens_per_round


def test_traces_without_ranks_are_refused_by_name_where_trees_are_wanted():
    group = edges(requests=1, acceptance="embedded/prompt-lookup T=1", edge={"tree": 16})
    with pytest.raises(UsageError, match="'embedded/prompt-lookup T=1' was recorded without what trees need"):
        seen(system(group))


def test_a_tree_without_branches_is_accepted_as_far_as_its_chain():
    """A verdict names no nodes then: such rounds counted as rejected, and `--tree auto` took the draft for bad."""
    found = seen(system(edges(requests=1, acceptance=1.0, edge={"tree": 16})))
    paths = [each.main_path for each in found.logs[0].result.stats.rounds]
    assert paths[:3] == [(12, 12)] * 3


def test_gates_judge_no_simulated_trees():
    gated = {"tree": 16, "gate": "stop", "gate_entropy": 1.0}
    with pytest.raises(UsageError, match=r"edges\[0\]: edge: gate: judges no simulated trees"):
        seen(system(edges(requests=1, acceptance="embedded T=0.8", edge=gated)))


def test_trees_with_supports_are_not_simulated():
    with pytest.raises(
        UsageError, match=r"edge: tree: simulated trees go with coupled or typical, not with sparse"
    ):
        seen(system(edges(requests=1, acceptance=0.7, edge={"tree": 16, "method": "sparse"})))


def test_a_tree_of_a_given_shape_plays(tmp_path):
    shape = tmp_path / "tree.json"
    shape.write_text(json.dumps({"choices": [[0], [1], [0, 0], [0, 1]]}))
    found = seen(system(edges(requests=1, acceptance=0.7, edge={"tree": 4, "tree_shape": str(shape)})))
    rounds = found.logs[0].result.stats.rounds[:-3]
    assert {each.num_draft_tokens for each in rounds} == {4}
    assert {each.num_accepted_tokens for each in rounds} == {0, 1, 2}


def test_drafts_longer_than_a_trace_is_deep_have_its_last_rank():
    group = edges(requests=1, acceptance=1.0, edge={"tree": 64, "tree_depth": MAX_DEPTH}, output_tokens=200)
    assert seen(system(group)).outcome.total.num_finished == 1
