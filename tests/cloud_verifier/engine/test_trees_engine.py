"""Rounds whose drafts are trees, through the engine: the target's own text, whatever is drafted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.edge.engine_link import ChanceDraft
from test_colocated_drafts import expected_text
from test_engine import GREEDY, SAMPLED, Harness, round_of

from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.verification.rows import StepRound
from outrider.common.alignment import TokenChain
from outrider.common.codec import decode_verify, encode_verify
from outrider.common.errors import InvalidFieldError
from outrider.common.tree import ROOT, Tree, supports_by_row
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Method,
    MethodParams,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Support,
    Verdict,
    VerifyRequest,
)

PROMPT = (5, 6, 7)
PENALISED = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    bad_words=((9, 3), (4,)),
    seed=6,
)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


def random_tree(
    rng: np.random.Generator, num_nodes: int, right: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids and parents of a random tree; some of its nodes go on along `right`."""
    tokens: list[int] = []
    parents: list[int] = []
    right_nodes = [ROOT]  # the path along `right` so far
    taken = set[tuple[int, int]]()
    while len(tokens) < num_nodes:
        if rng.random() < 0.4 and len(right_nodes) <= len(right):
            parent, token = right_nodes[-1], right[len(right_nodes) - 1]
        else:
            parent, token = int(rng.integers(ROOT, len(tokens))), int(rng.integers(0, 32))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        if (
            parent == right_nodes[-1]
            and len(right_nodes) <= len(right)
            and token == right[len(right_nodes) - 1]
        ):
            right_nodes.append(len(tokens))
        tokens.append(token)
        parents.append(parent)
    return tuple(tokens), tuple(parents)


def accepted(request: VerifyRequest, verdict: Verdict) -> list[int]:
    """The draft tokens that a verdict accepts."""
    nodes = verdict.accepted_indices
    assert len(nodes) == verdict.accepted_len
    return [request.draft_tokens[node] for node in nodes]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("num_nodes", [1, 4, 16])
def test_trees_give_the_targets_own_text(sampling: SamplingParams, num_nodes: int) -> None:
    harness = Harness()
    expected = harness.reference(PROMPT, sampling, 40)
    session_id, opened = harness.open(prompt=PROMPT, sampling=sampling, ignore_eos=True)
    chain = TokenChain([*PROMPT, opened.first_token])
    rng = np.random.default_rng(num_nodes)
    round_id, num_branching = 0, 0
    while (done := chain.position - len(PROMPT)) + num_nodes + 1 <= len(expected):
        round_id += 1
        tokens, parents = random_tree(rng, num_nodes, expected[done:])
        request = round_of(chain, round_id, tokens, parents=parents)
        verdict = harness.ask(session_id, request)
        assert isinstance(verdict, Verdict), verdict
        chain.extend([*accepted(request, verdict), verdict.correction])
        assert chain.token_ids[len(PROMPT) :] == expected[: chain.position - len(PROMPT)]
        assert (verdict.position, verdict.hash) == (chain.position, chain.hash)
        last = verdict.accepted_nodes[-1] if verdict.accepted_nodes else verdict.accepted_len - 1
        kind = CorrectionKind.CORRECTION if Tree(parents).children(last) else CorrectionKind.BONUS
        assert verdict.correction_kind is kind
        num_branching += list(verdict.accepted_nodes) != list(range(verdict.accepted_len))
    assert num_branching or num_nodes < 16, "no round took another path than the first: the test shows little"


def test_a_round_sent_again_and_sent_with_other_parents() -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT)
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=(1, 2), parents=(-1, -1))
    first = harness.ask(session_id, request)
    assert harness.ask(session_id, request) == first
    error = harness.ask(session_id, dataclasses.replace(request, parents=(-1, 0)))
    assert isinstance(error, RoundError) and (error.code, error.field) == (RoundErrorCode.INVALID, "round_id")


@pytest.mark.parametrize(
    ("ranks", "parents", "judged"),
    [
        ((0, 1, 1), (-1, -1, -1), (1, 0)),  # the likeliest path is right; two other beginnings are no misses
        ((0, 0, 1, 1, 1), (-1, 0, 1, 1, 0), (2, 1)),
        ((1, 0, 0), (-1, -1, 1), (0, 1)),  # another path is taken
        ((0, 0, 1, 1, 1, 1), (), (2, 1)),  # a long chain: what follows the first miss was never judged
        ((0, 0, 0), (), (3, 0)),
    ],
)
def test_counted_as_judged_are_the_likeliest_path_and_no_more_than_its_first_miss(
    ranks: tuple[int, ...], parents: tuple[int, ...], judged: tuple[int, int]
) -> None:
    """A rank of 0 is the target's own token at that depth, any other is a wrong one."""
    harness = Harness()
    expected = harness.reference(PROMPT, GREEDY, 8)
    session_id, opened = harness.open(prompt=PROMPT)
    depths = Tree(parents or tuple(range(-1, len(ranks) - 1))).depths
    tokens = tuple(
        (expected[1 + depth] + (number + 1 if rank else 0)) % 32
        for number, (rank, depth) in enumerate(zip(ranks, depths, strict=True))
    )
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=tokens, parents=parents)
    assert isinstance(harness.ask(session_id, request), Verdict)
    counts = harness.engine.observer.num_judged_tokens[Method.COUPLED]
    assert (counts["accepted"], counts["rejected"]) == judged


def test_a_stop_id_ends_the_path_that_is_taken() -> None:
    harness = Harness()
    expected = harness.reference(PROMPT, GREEDY, 4)
    session_id, opened = harness.open(prompt=PROMPT, stop_token_ids=(expected[2],))
    tokens = (99 % 32, expected[1], expected[2], expected[3])
    verdict = harness.ask(
        session_id,
        VerifyRequest(1, opened.position, opened.hash, draft_tokens=tokens, parents=(-1, -1, 1, 2)),
    )
    assert isinstance(verdict, Verdict)
    assert verdict.accepted_nodes == (1, 2)
    assert verdict.correction_kind is CorrectionKind.NONE


def test_log_probabilities_are_those_of_the_path() -> None:
    texts = []
    expected = Harness().reference(PROMPT, SAMPLED, 4)
    drafts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        (tuple(expected[1:3]), ()),
        ((31, expected[1], 30, expected[2]), (-1, -1, 0, 1)),
    ]
    for tokens, parents in drafts:
        harness = Harness()
        session_id, opened = harness.open(prompt=PROMPT, sampling=SAMPLED, num_logprobs=2)
        verdict = harness.ask(
            session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=tokens, parents=parents)
        )
        assert isinstance(verdict, Verdict)
        texts.append(([*expected[1:3], verdict.correction], verdict.logprobs))
    assert texts[0] == texts[1]
    assert len(texts[0][1]) == 3


def test_a_pipelined_tree_begins_with_the_bonus_and_loses_what_does_not() -> None:
    harness = Harness()
    expected = harness.reference(PROMPT, SAMPLED, 8)
    session_id, opened = harness.open(prompt=PROMPT, sampling=SAMPLED)
    chain = TokenChain([*PROMPT, opened.first_token])
    first = round_of(chain, 1, (31, expected[1]), parents=(-1, -1), pipelined=True)
    assumed = TokenChain([*chain.token_ids, expected[1]])
    wrong = (expected[2] + 1) % 32
    second = round_of(
        assumed, 2, (wrong, 1, expected[2], 30, expected[3]), parents=(-1, 0, -1, 2, 2), pipelined=True
    )
    one, two = harness.ask(session_id, first), harness.ask(session_id, second)
    assert isinstance(one, Verdict) and isinstance(two, Verdict), two
    assert (one.accepted_nodes, one.correction) == ((1,), expected[2])
    assert (two.accepted_nodes, two.correction) == ((2, 4), expected[4])
    chain.extend([expected[1], expected[2], expected[3], two.correction])
    third = round_of(TokenChain([*PROMPT, *expected[:4]]), 3, ((expected[4] + 1) % 32, 2), parents=(-1, -1))
    stale = harness.ask(session_id, third)
    assert (isinstance(stale, RoundError) and stale.code is RoundErrorCode.STALE) or expected[4] == 2
    assert two.hash == chain.hash


@pytest.mark.parametrize(
    "method", [each for each in Method if each not in ("coupled", "sparse", "typical", "threshold")]
)
def test_a_method_for_chains_refuses_trees_by_name(method: Method) -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, method=method)
    error = harness.ask(
        session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=(1, 2), parents=(-1, -1))
    )
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "parents")
    assert method in error.message


FORK: dict[str, Any] = {"draft_tokens": (1, 2, 3, 4), "parents": (-1, 0, 0, -1)}
HALVES = (Support((4, 1, 9), (1, 2, 3)), Support((2, 3), (1, 1)))  # of the root and of node 0


@pytest.mark.parametrize(
    ("supports", "what"),
    [
        (HALVES[:1], "has 1 entries; want none or 2"),
        ((*HALVES, *HALVES), "has 4 entries; want none or 2"),
        ((HALVES[1], HALVES[0]), "[0] does not hold the drafted id 1"),
        ((Support((1, 4), (1, 0)), HALVES[1]), "[0] does not hold the drafted id 4"),
    ],
)
def test_supports_that_are_not_the_trees_are_refused_as_they_arrive(
    supports: tuple[Support, ...], what: str
) -> None:
    message = encode_verify(VerifyRequest(1, 9, 0, q_support=supports, **FORK))
    with pytest.raises(InvalidFieldError) as error:
        decode_verify(message, Harness().engine.model.limits)
    assert error.value.field == "q_support" and what in error.value.reason


def test_a_sparse_tree_has_a_support_for_each_node_with_children() -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, method=Method.SPARSE)
    base = VerifyRequest(1, opened.position, opened.hash, **FORK)
    past = (HALVES[0], Support((2, 3, 32), (1, 1, 1)))
    for supports, what in [((), "needs the distribution"), (past, "past the tokenizer's")]:
        error = harness.ask(session_id, dataclasses.replace(base, q_support=supports))
        assert isinstance(error, RoundError) and error.code is RoundErrorCode.INVALID
        assert error.field == "q_support" and what in error.message
    arrived = decode_verify(encode_verify(dataclasses.replace(base, q_support=HALVES)), opened.model.limits)
    assert (arrived.q_support, arrived.parents) == (HALVES, FORK["parents"])
    assert isinstance(harness.ask(session_id, arrived), Verdict)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_sparse_chain_is_judged_alike_as_a_tree_with_a_branch_beside_it(sampling: SamplingParams) -> None:
    """First children have the coins that they have in a chain, where they have the same indices."""
    verdicts = []
    for extra in (0, 1):
        harness = Harness()
        session_id, opened = harness.open(
            prompt=PROMPT, method=Method.SPARSE, sampling=sampling, num_logprobs=1
        )
        right = harness.reference(PROMPT, GREEDY, 4)[1:]
        ids = (*range(20, 28),)
        supports = tuple(Support((token_id, *ids), (40, *(1,) * 8)) for token_id in right)
        verdict = harness.ask(
            session_id,
            VerifyRequest(
                1,
                opened.position,
                opened.hash,
                draft_tokens=(*right, *ids[:extra]),
                parents=(-1, 0, 1, *(1,) * extra),
                q_support=supports,
            ),
        )
        assert isinstance(verdict, Verdict)
        verdicts.append(verdict)
    chain, tree = verdicts
    assert chain.accepted_len != 2, "the sibling had its turn: the two may differ"
    for name in ("accepted_len", "correction", "correction_kind", "logprobs"):
        assert getattr(chain, name) == getattr(tree, name)


def test_a_row_of_a_tree_needs_its_children_and_what_they_were_drawn_from() -> None:
    tree = Tree(FORK["parents"])
    each = StepRound(GREEDY, 5, (), (), FORK["draft_tokens"], tree, supports_by_row(tree, HALVES))
    assert [each.needed_ids(row) for row in range(5)] == [(1, 4, 4, 1, 9), (2, 3, 2, 3), (), (), ()]


@pytest.mark.parametrize("method", [Method.TYPICAL, Method.THRESHOLD])
def test_approximate_methods_take_the_longest_passing_path(method: Method) -> None:
    harness = Harness()
    params = (
        MethodParams(typical_epsilon=1e-9) if method is Method.TYPICAL else MethodParams(threshold_pass=1e-9)
    )
    session_id, opened = harness.open(
        prompt=PROMPT, method=method, sampling=SAMPLED, method_params=params, ignore_eos=True
    )
    probs = (0.5,) * 6 if method is Method.THRESHOLD else ()
    request = VerifyRequest(
        1,
        opened.position,
        opened.hash,
        draft_tokens=(1, 2, 3, 4, 5, 6),
        parents=(-1, 0, -1, 2, 3, 2),
        q_token_probs=probs,
    )
    verdict = harness.ask(session_id, request)
    assert isinstance(verdict, Verdict)
    assert verdict.accepted_nodes == (2, 3, 4)  # everything passes: the deepest path
    assert verdict.correction_kind is CorrectionKind.BONUS


def test_trees_and_chains_share_a_step() -> None:
    harness = Harness()
    expected = harness.reference(PROMPT, SAMPLED, 5)
    names = range(1, 4)
    opened = [harness.open(name, PROMPT, SAMPLED, ignore_eos=True) for name in names]
    parents = ((-1, 0, 1), (-1, -1, 0), (-1, 0, -1))
    right = expected[1:4]
    drafts = (tuple(right), (30, right[0], 29), (right[0], right[1], 28))
    replies = [
        harness.submit(
            session_id,
            VerifyRequest(1, each.position, each.hash, draft_tokens=draft, parents=its),
        )
        for (session_id, each), draft, its in zip(opened, drafts, parents, strict=True)
    ]
    harness.settle()
    verdicts = [each[-1] for each in replies]
    assert [v.accepted_len for v in verdicts if isinstance(v, Verdict)] == [3, 1, 2]
    assert [v.correction for v in verdicts if isinstance(v, Verdict)] == [
        expected[4],
        expected[2],
        expected[3],
    ]
    assert harness.backend.batches[-1] == [4, 4, 4]


class ServedDraft(ChanceDraft):
    fingerprint = tokenizer_fingerprint = "d" * 16


@pytest.mark.parametrize(
    ("sampling", "method"),
    [(GREEDY, Method.COUPLED), (SAMPLED, Method.COUPLED), (GREEDY, Method.SPARSE)],
    ids=["greedy", "sampled", "greedy, sparse"],
)
@pytest.mark.parametrize("num_nodes", [1, 6, 16])
def test_co_located_trees_give_the_targets_own_text(
    sampling: SamplingParams, method: Method, num_nodes: int
) -> None:
    expected = expected_text(sampling, 60)
    draft = ServedDraft(expected, accuracy=0.6, seed=3, second=0.9)
    harness = Harness(drafter=CoLocatedDrafter(draft))  # type: ignore[arg-type]
    session_id, opened = harness.open(prompt=PROMPT, sampling=sampling, method=method, ignore_eos=True)
    request = GenerateRequest(
        1,
        opened.position,
        opened.hash,
        40,
        is_co_located=True,
        num_speculative_tokens=num_nodes,
        is_tree=True,
    )
    messages = harness.submit(session_id, request)
    harness.settle()
    made = [each for each in messages if isinstance(each, GeneratedTokens)]
    text = [opened.first_token, *(token_id for each in made for token_id in each.token_ids)]
    assert text == expected[3 : 3 + 41]
    assert all(each.num_draft_tokens <= num_nodes for each in made)
    assert len(made) < 40, "nothing was ever accepted"


def test_a_co_located_tree_is_bounded_and_refused_for_methods_of_chains() -> None:
    draft = ServedDraft(expected_text(GREEDY, 60), accuracy=0.6, seed=3)
    harness = Harness(drafter=CoLocatedDrafter(draft))  # type: ignore[arg-type]
    for number, (method, num_nodes, field) in enumerate(
        [
            (Method.COUPLED, 17, "num_speculative_tokens"),
            (Method.BLOCK, 8, "is_tree"),
            (Method.THRESHOLD, 8, "is_tree"),
        ],
        start=1,
    ):
        session_id, opened = harness.open(number, prompt=PROMPT, method=method)
        request = GenerateRequest(
            1,
            opened.position,
            opened.hash,
            9,
            is_co_located=True,
            num_speculative_tokens=num_nodes,
            is_tree=True,
        )
        reply = harness.ask(session_id, request)
        assert isinstance(reply, RoundError) and (reply.code, reply.field) == (RoundErrorCode.INVALID, field)
