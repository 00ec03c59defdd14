"""Rounds whose drafts are trees, from the edge: cloud-only's text, whatever is drafted, falls out or gets lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge.engine_link import Chances, EngineConnection, EngineLink
from support.edge.telling_draft import HARD_PLACE, HARD_TOKEN, every, make_gate
from support.matrices import one_of
from test_pipelined_rounds import PROMPT, decode, make_backend, reference
from test_same_text_everywhere import FAULTS

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.tree import Tree, has_path, is_chain, main_path
from outrider.common.types import (
    Draft,
    Method,
    Origin,
    SamplingParams,
    SessionResponse,
    Signals,
    StopParams,
    Verdict,
)
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.round_pipeline import RoundPipeline
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.gate.gate import GateUse

BUDGETS = {1: TreeBudget(1, 4, 2), 4: TreeBudget(4, 4, 3), 16: TreeBudget(16, 6, 3)}
STOP = StopParams(50, ignore_eos=True)


def check_same_text(
    tree: TreeBudget, faults: Chances, seed: int, stop: StopParams = STOP, window: int = 1, **run: Any
) -> EngineLink:
    link = EngineLink(make_backend(), faults, seed=seed)
    result = decode(link, window=window, seed=seed, stop=stop, tree=tree, **run)
    sampling = SamplingParams(temperature=run.get("temperature", 0.8), seed=seed)
    assert [*PROMPT, *result.token_ids] == reference(sampling, stop)
    assert result.num_unverified_tokens == 0
    return link


@pytest.mark.parametrize(
    ("budget", "window", "temperature"), one_of(2, BUDGETS.values(), [1, 3], [0.0, 0.8]), ids=str
)
def test_trees_write_cloud_onlys_text_under_every_fault(
    budget: TreeBudget, window: int, temperature: float
) -> None:
    """One round at a time and several in flight, on other paths than the likeliest too."""
    for seed, faults in enumerate(FAULTS.values(), start=5):
        second = 0.6 if seed % 2 else None
        check_same_text(
            budget, faults, seed, window=window, temperature=temperature, accuracy=0.6, second=second
        )


def test_pipelined_trees_build_on_the_likeliest_path_and_on_others() -> None:
    ahead, guessed, num_rounds = 0, 0, 0
    for seed in range(6):
        link = EngineLink(make_backend(), Chances(ripe=0.2), seed=seed)
        tree = TreeBudget(12, 2, 3)
        result = decode(link, window=4, seed=seed, tree=tree, accuracy=0.8, second=0.9)
        sampling = SamplingParams(temperature=0.8, seed=seed)
        assert [*PROMPT, *result.token_ids] == reference(sampling, STOP)
        ahead += sum(each.pipelined_hit is True for each in result.stats.rounds)
        guessed += result.stats.num_guess_hits
        num_rounds += len(result.stats.rounds)
    assert ahead > 10 and guessed > 3, (ahead, guessed, num_rounds)


def test_rounds_are_trees_and_take_paths_beside_the_likeliest() -> None:
    taken = Counter[str]()
    for seed in range(8):
        link = check_same_text(BUDGETS[16], Chances(), seed, accuracy=0.5, second=0.9)
        verdicts = [each for each in link.replies if isinstance(each, Verdict)]
        for request, verdict in zip(link.sent, verdicts, strict=True):
            taken["trees"] += not is_chain(request.parents)
            nodes = verdict.accepted_nodes
            taken["beside"] += bool(nodes) and list(nodes) != list(range(len(nodes)))
            assert len(request.draft_tokens) <= 16
            assert max(Tree(request.parents).depths, default=0) < 6
            assert not request.q_token_probs
    assert taken["trees"] > 50 and taken["beside"] > 20


def test_records_tell_nodes_and_what_the_likeliest_path_came_to() -> None:
    result = decode(EngineLink(make_backend()), window=1, tree=BUDGETS[16], accuracy=0.5, second=0.9)
    rounds = [each for each in result.stats.rounds if each.num_draft_tokens]
    assert sum(each.num_accepted_tokens for each in rounds) == result.origins.count(Origin.ACCEPTED)
    assert any(each.num_draft_tokens == 16 for each in rounds)
    for each in rounds:
        assert each.main_path is not None
        accepted, length = each.main_path
        assert 0 <= accepted <= min(length, each.num_accepted_tokens)
        assert each.as_chain == each.main_path
    assert any(each.num_accepted_tokens > each.as_chain[0] for each in rounds)


def test_with_a_gate_records_tell_confidences_and_hard_tokens_of_the_likeliest_path() -> None:
    gate, tell = make_gate(GateUse.STOP), every(7, HARD_TOKEN)
    link = EngineLink(make_backend())
    result = decode(link, window=1, tree=BUDGETS[16], accuracy=0.5, second=0.9, gate=gate, tell=tell)
    trees = [each for each in result.stats.rounds if each.main_path is not None]
    assert len(trees) > 5
    for each in trees:
        assert each.main_path is not None
        length = each.main_path[1]
        assert len(each.confidences) == length
        assert each.hard_ratio in (0.0, 1 / length) and each.escalated is (each.hard_ratio > 0)


def test_the_end_of_the_context_and_of_the_text_bound_a_tree() -> None:
    for max_new in (3, 9, 80):
        check_same_text(BUDGETS[16], Chances(), 3, StopParams(max_new, ignore_eos=True), accuracy=0.9)
    check_same_text(BUDGETS[16], Chances(), 4, StopParams(50, stop_token_ids=(9, 4, 11)), accuracy=0.9)


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_what_is_kept_of_a_lost_tree_is_its_likeliest_path(policy: OnTimeout) -> None:
    link = EngineLink(make_backend(), Chances(lose_answer=0.3, outage=0.2), seed=4)
    result = decode(link, window=1, seed=4, tree=BUDGETS[16], accuracy=1.0, on_timeout=policy)
    kept = [o for o in result.origins if not o.is_verified]
    assert kept, "no answer was lost: the test shows nothing"
    # The draft is always right, so what was kept is the target's text all the same.
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=4), STOP)


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_kept_tokens_are_judged_again_between_trees(policy: OnTimeout) -> None:
    for seed in range(6):
        faults = Chances(lose_answer=0.2, outage=0.1, delay_answer=0.1)
        run = {"gate": make_gate(GateUse.STOP), "tell": every(4, HARD_TOKEN)} if seed % 2 else {}
        check_same_text(BUDGETS[4], faults, seed, accuracy=0.7, on_timeout=policy, is_reverified=True, **run)


@pytest.mark.parametrize("signals", [HARD_PLACE, HARD_TOKEN], ids=["place", "token"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_stop_gate_ends_every_path_of_a_tree_and_the_text_is_the_same_under_every_fault(
    signals: Signals, window: int
) -> None:
    num_ended = 0
    for seed, faults in enumerate(FAULTS.values(), start=5):
        link = check_same_text(
            BUDGETS[16],
            faults,
            seed,
            window=window,
            accuracy=0.8,
            second=0.6 if seed % 2 else None,
            gate=make_gate(GateUse.STOP),
            tell=every(4, signals),
        )
        for request in link.sent:
            tree = Tree(request.parents or range(-1, len(request.draft_tokens) - 1))
            start = request.base_position + len(request.committed_tokens)
            is_hard = [(start + depth) % 4 == 0 for depth in tree.depths]
            assert not any(is_hard[parent] for parent in tree.parents if parent >= 0), "a path goes on"
            assert signals is HARD_TOKEN or not any(is_hard), "a node is drafted in doubt"
            mask = int.from_bytes(request.hard_mask, "little")
            assert [bool(mask >> node & 1) for node in range(len(tree))] == is_hard
            num_ended += len(tree) > 0
    assert num_ended > 20


def test_a_gate_that_allows_some_hard_tokens_counts_them_on_each_path_by_itself() -> None:
    sizes = []
    for ratio in (0.0, 0.5, 1.0):
        gate = make_gate(GateUse.STOP, ratio)
        link = check_same_text(BUDGETS[16], Chances(), 3, accuracy=0.8, gate=gate, tell=every(3, HARD_PLACE))
        sizes.append(sum(len(request.draft_tokens) for request in link.sent) / len(link.sent))
    assert sizes[0] < sizes[1] < sizes[2], sizes
    ungated = check_same_text(BUDGETS[16], Chances(), 3, accuracy=0.8)
    assert sizes[2] == sum(len(request.draft_tokens) for request in ungated.sent) / len(ungated.sent)


def test_log_probabilities_come_once_a_token() -> None:
    chain = decode(EngineLink(make_backend()), window=1, num_logprobs=2)
    tree = decode(
        EngineLink(make_backend()), window=1, num_logprobs=2, tree=BUDGETS[16], accuracy=0.5, second=0.9
    )
    assert tree.token_ids == chain.token_ids
    assert tree.logprobs == chain.logprobs and None not in tree.logprobs


class GarbledConnection(EngineConnection):
    """Verdicts name other nodes, now and then."""

    def receive(self, timeout_s: float) -> SessionResponse | None:
        reply = super().receive(timeout_s)
        if isinstance(reply, Verdict) and len(reply.accepted_nodes) > 1 and reply.round_id % 3 == 0:
            return dataclasses.replace(reply, accepted_nodes=(*reply.accepted_nodes[1:], 99))
        return reply


class Garbled(EngineLink):
    def connect(self, timeout_s: float) -> EngineConnection:
        return GarbledConnection(self)


def test_nodes_that_are_no_path_of_the_tree_are_a_disagreement_and_the_text_is_right() -> None:
    link = Garbled(make_backend())
    result = decode(link, window=1, tree=BUDGETS[16], accuracy=0.7, second=0.9)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), STOP)
    assert result.stats.num_rebuilds > 0


def test_a_verifier_without_trees_gets_chains() -> None:
    backend = make_backend()
    backend.max_tree_nodes = 0
    link = EngineLink(backend)
    result = decode(link, window=1, tree=BUDGETS[16])
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), STOP)
    assert all(not each.parents for each in link.sent)


def test_a_tree_of_one_leaf_is_no_longer_than_a_chain_may_be() -> None:
    link = EngineLink(make_backend(), config=ServeConfig(max_draft_tokens=4))
    result = decode(link, window=1, tree=TreeBudget(16, 16, 1), accuracy=0.9)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), STOP)
    assert max(len(each.draft_tokens) for each in link.sent) == 4


@pytest.mark.parametrize("policy, accuracy", [(OnTimeout.FIRST_TOKEN, 0.9), (OnTimeout.EDGE_ONLY, 0.8)])
def test_what_is_kept_of_a_pipelined_tree_goes_on_from_what_the_bonus_took(
    policy: OnTimeout, accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_others = 0

    def time_out(pipeline: RoundPipeline) -> Draft:
        nonlocal num_others
        oldest, chain = pipeline._rounds[0].request, pipeline._state.tokens.chain.token_ids
        known, left = chain[pipeline._rounds[0].start :], original(pipeline)
        assert not left.token_ids or has_path(oldest.draft_tokens, oldest.parents, (*known, *left.token_ids))
        num_others += not has_path(main_path(oldest.draft_tokens, oldest.parents), (), known)
        return left

    original = RoundPipeline.time_out
    monkeypatch.setattr(RoundPipeline, "time_out", time_out)
    for seed in range(12):
        link = EngineLink(make_backend(), Chances(lose_answer=0.3), seed=seed)
        tree = TreeBudget(16, 2, 3)
        decode(link, window=3, seed=seed, tree=tree, accuracy=accuracy, second=0.9, on_timeout=policy)
    assert num_others, "no bonus took another child"


def test_typical_takes_trees_too() -> None:
    result = decode(
        EngineLink(make_backend()),
        window=1,
        tree=BUDGETS[16],
        method=Method.TYPICAL,
        accuracy=0.7,
        second=0.9,
    )
    assert len(result.token_ids) == 50 and result.num_unverified_tokens == 0


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_greedy_sparse_trees_write_cloud_onlys_text_under_every_fault(
    budget: TreeBudget, window: int
) -> None:
    """At temperature 0 every exact method writes the same text."""
    num_trees = 0
    for seed, faults in enumerate(FAULTS.values(), start=5):
        link = check_same_text(
            budget,
            faults,
            seed,
            window=window,
            temperature=0.0,
            accuracy=0.6,
            second=0.9,
            method=Method.SPARSE,
        )
        for request in link.sent:
            num_trees += not is_chain(request.parents)
            tree = Tree(request.parents or range(-1, len(request.draft_tokens) - 1))
            assert len(request.q_support) == len(tree.internal) * bool(request.draft_tokens)
    assert num_trees > 5 or budget.num_nodes == 1


@pytest.mark.parametrize("window", [1, 3])
def test_sampled_sparse_trees_end_their_text_under_every_fault(window: int) -> None:
    for seed, faults in enumerate(FAULTS.values(), start=5):
        link = EngineLink(make_backend(), faults, seed=seed)
        result = decode(
            link, window=window, seed=seed, tree=BUDGETS[16], accuracy=0.6, second=0.9, method=Method.SPARSE
        )
        assert len(result.token_ids) == 50 and result.num_unverified_tokens == 0


def test_a_verifier_without_trees_gets_sparse_chains() -> None:
    backend = make_backend()
    backend.max_tree_nodes = 0
    link = EngineLink(backend)
    result = decode(link, window=1, tree=BUDGETS[16], temperature=0.0, method=Method.SPARSE)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(temperature=0.0, seed=1), STOP)
    assert all(not each.parents and len(each.q_support) == len(each.draft_tokens) for each in link.sent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    budget=st.builds(TreeBudget, st.integers(1, 16), st.integers(1, 8), st.integers(1, 5)),
    faults=st.sampled_from(list(FAULTS.values())),
    seed=st.integers(0, 10**6),
    window=st.integers(1, 5),
    run=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.8, 1.0]),
            "accuracy": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
            "second": st.sampled_from([None, 0.0, 0.6, 1.0]),
            "draft_context": st.sampled_from([10, 1000]),
            "tell": st.sampled_from([None, every(3, HARD_PLACE), every(4, HARD_TOKEN)]),
        }
    ),
    max_hard_ratio=st.sampled_from([0.0, 0.5]),
)
def test_no_combination_of_many_leaves_a_trace(
    budget: TreeBudget,
    faults: Chances,
    seed: int,
    window: int,
    run: dict[str, Any],
    max_hard_ratio: float,
) -> None:
    gate = None if run["tell"] is None else make_gate(GateUse.STOP, max_hard_ratio)
    check_same_text(budget, faults, seed, window=window, gate=gate, **run)
