"""Prompt lookup against a real target: the same text as cloud-only, with and without matches."""

from __future__ import annotations

import itertools

import pytest
from support.notes import Note
from support.processes.decoding import Oracle, decode
from support.processes.pairs import Pair
from test_same_text import check_matrix, make_prompt

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.experiments.shared.processes import VerifierProcess


@pytest.fixture(scope="module")
def lookup(tiny_pair: Pair) -> PromptLookupModel:
    return PromptLookupModel.open(tiny_pair.target)


def test_prompt_lookup_is_cloud_only(
    tiny_verifier: VerifierProcess,
    lookup: PromptLookupModel,
    tiny_oracle: Oracle,
    note: Note,
) -> None:
    cases = [
        (t, depth, seed, ("stream", "unary")[i % 2])
        for i, (t, depth, seed) in enumerate(itertools.product((0.0, 0.8), (1, 5), (1, 2)))
    ]
    ledger = check_matrix(tiny_verifier.address, {"lookup": lookup}, tiny_oracle, cases, num_new=32)
    note(f"prompt lookup: {ledger.check()}")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copies_are_accepted_where_the_text_repeats_and_rounds_without_one_are_rounds(
    tiny_verifier: VerifierProcess, lookup: PromptLookupModel, temperature: float
) -> None:
    """A bias leaves the target four words, none of them in the prompt: at first nothing can be copied."""
    words = tuple((token_id, 80.0) for token_id in (401, 402, 403, 404))
    sampling = SamplingParams(temperature=temperature, seed=5, logit_bias=words)
    result = decode(tiny_verifier.address, make_prompt(3), sampling, draft=lookup, num_new=60)
    reference = decode(tiny_verifier.address, make_prompt(3), sampling, num_new=60)
    assert result.token_ids == reference.token_ids
    rounds = result.stats.rounds
    assert rounds[0].num_draft_tokens == 0 and sum(r.num_accepted_tokens for r in rounds) > 0
    assert not result.stats.num_generate_tokens, "it left speculation"
