"""Lookahead's window and pool, beside a target whose next token depends on the last one alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from support.edge.edge_fakes import make_model

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.engine.validation import check_open
from outrider.cloud_verifier.heads.lookahead import Lookahead, LookaheadSequence
from outrider.common.errors import InvalidFieldError
from outrider.common.tree import ROOT, Tree
from outrider.common.types import LOOKAHEAD, Method, OpenRequest, SamplingParams
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft

NUM_TOKENS = 31


def next_token(token_id: int) -> int:
    return (3 * token_id + 1) % NUM_TOKENS  # passes through 30 of them


def make_sequence() -> LookaheadSequence:
    backend = SimpleNamespace(
        num_tokens=NUM_TOKENS, max_context=512, eos_token_ids=(), tokenizer_fingerprint=""
    )
    return Lookahead(cast(TargetBackend, backend)).sequence(SamplingParams())


def judge(draft: TreeDraft, last: int) -> tuple[list[int], list[int]]:
    """Returns the tokens that one step commits, and the target's choices after the root and after each node."""
    tree, committed = Tree(draft.parents), [next_token(last)]
    node = tree.child(ROOT, draft.token_ids, committed[-1])
    while node is not None:
        committed.append(next_token(committed[-1]))
        node = tree.child(node, draft.token_ids, committed[-1])
    return committed, [next_token(last), *map(next_token, draft.token_ids)]


def test_n_grams_that_the_target_found_are_accepted_later() -> None:
    sequence = make_sequence()
    text = [1, 2, 3, 4]
    sequence.commit(text)
    steps = []
    for _ in range(30):
        draft = sequence.propose_tree(TreeBudget(16, 12, 4), NodeValues())
        assert len(draft.token_ids) <= 16
        committed, choices = judge(draft, text[-1])
        text += committed
        steps.append(len(committed))
        sequence.read_choices(choices)
        sequence.commit(committed)
        sequence.check_integrity()
    assert steps[0] == 1 and sum(steps) > 45, steps  # guesses at first


def test_a_larger_tree_holds_a_wider_window_and_longer_n_grams() -> None:
    sequence = make_sequence()
    sequence.commit([1, 2, 3, 4, 5, 6, 7, 8, 9])
    for num_nodes, deepest in ((3, 0), (4, 2), (16, 5), (64, 11)):
        draft = sequence.propose_tree(TreeBudget(num_nodes, 12, 4), NodeValues())
        assert len(draft.token_ids) <= num_nodes
        assert max(Tree(draft.parents).depths, default=-1) + 1 == deepest, num_nodes


def test_a_text_that_repeats_itself_is_proposed_as_a_chain_too() -> None:
    sequence = make_sequence()
    sequence.commit([7, 8, 9, 10, 11, 12, 7])
    assert sequence.propose(3).token_ids == (8, 9, 10)
    sequence.commit([90])
    assert sequence.propose(3).token_ids == ()


@pytest.mark.parametrize("method", Method)
def test_an_opening_says_that_guesses_are_no_samples(method: Method) -> None:
    """A round would fail: every method but those with shared noise samples drafts from supports, sent or not."""
    model = make_model(num_tokens=NUM_TOKENS, methods=tuple(Method), draft_sources=(LOOKAHEAD,))
    request = OpenRequest(b"s" * 16, (1, 2), 1, SamplingParams(), method, draft_source=LOOKAHEAD)
    if method in (Method.COUPLED, Method.TYPICAL):
        check_open(request, model)
    else:
        with pytest.raises(
            InvalidFieldError, match="draft_source: lookahead goes with methods coupled and typical"
        ):
            check_open(request, model)
