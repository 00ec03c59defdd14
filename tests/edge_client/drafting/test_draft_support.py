"""Drafts sampled from the integer weights they tell: the draw, its key, and the sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draft_dirs import make_hf_dir

from outrider.common.noise.philox import Purpose, first_word
from outrider.common.sampling.processors import process_logits
from outrider.common.sampling.support import make_support, sample_support, support_prob
from outrider.common.types import Draft, SamplingParams, Support
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

PROMPT = [5, 9, 200, 17, 33, 8, 120]
PLAIN = SamplingParams(temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxDraftModel]:
    root = tmp_path_factory.mktemp("draft")
    hf_dir = make_hf_dir(root / "hf", "llama", num_tokens=500)
    export_draft(hf_dir, root / "onnx")
    with OnnxDraftModel.open(root / "onnx") as model:
        yield model


def propose(model: OnnxDraftModel, params: SamplingParams, num_support: int, num: int = 5) -> Draft:
    sequence = model.sequence(params, num_support=num_support)
    sequence.commit(PROMPT)
    return sequence.propose(num)


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, top_k=7),
        replace(PLAIN, top_p=0.8, min_p=0.01),
        replace(PLAIN, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=((40, 3.0),)),
        replace(PLAIN, bad_words=((31,), (9, 8)), min_new_tokens=4),
    ],
)
@pytest.mark.parametrize("num_support", [1, 16, 64])
def test_each_token_is_the_inverse_cdf_of_the_processed_distribution(
    model: OnnxDraftModel, params: SamplingParams, num_support: int
) -> None:
    """Token by token against the logits of a second sequence that is fed the same ids."""
    draft = propose(model, params, num_support)
    shadow = model.sequence(params)
    shadow.commit(PROMPT)
    shadow.propose(1)
    for offset, token_id in enumerate(draft.token_ids):
        output_ids = draft.token_ids[:offset]
        logits = shadow.parts[0]._rows.bind(1).logits
        scores = process_logits(
            np,
            logits,
            params,
            prompt_ids=PROMPT,
            output_ids=output_ids,
            eos_token_ids=model.eos_token_ids,
        )
        support = make_support(scores[0], num_support)
        assert draft.supports[offset] == support
        word = first_word(params.seed, Purpose.DRAFT, len(PROMPT), offset)
        assert token_id == sample_support(support, word)
        assert draft.draft_probs[offset] == support_prob(support, token_id) > 0
        shadow._feed([token_id])


def test_a_support_changes_neither_kv_reuse_nor_the_signals(model: OnnxDraftModel) -> None:
    sequence = model.sequence(PLAIN, num_support=16)
    sequence.commit(PROMPT)
    first = sequence.propose(6)
    correction = (first.token_ids[2] + 1) % model.num_tokens
    sequence.commit([*first.token_ids[:2], correction])
    sequence.check_integrity()
    again = model.sequence(PLAIN, num_support=16)
    again.commit(PROMPT)
    again.propose(6)
    again.commit([*first.token_ids[:2], correction])
    assert sequence.propose(6) == again.propose(6) == sequence.propose(6)
    coupled = propose(model, PLAIN, 0)
    assert coupled.supports == ()
    assert coupled.signals[0].entropy_bits == first.signals[0].entropy_bits


def test_draws_depend_on_where_the_draft_began_and_on_the_offset(model: OnnxDraftModel) -> None:
    """The same position in two rounds is drawn anew: a rejected draft says nothing about the next."""
    sequence = model.sequence(replace(PLAIN, temperature=5.0), num_support=64)
    sequence.commit(PROMPT)
    first = sequence.propose(2)
    sequence.commit(first.token_ids[:1])
    second = sequence.propose(1)
    assert second.supports[0] == first.supports[1]
    word = first_word(PLAIN.seed, Purpose.DRAFT, len(PROMPT) + 1, 0)
    assert second.token_ids[0] == sample_support(second.supports[0], word)


def test_drafts_follow_their_weights(model: OnnxDraftModel) -> None:
    sequences = [
        model.sequence(SamplingParams(temperature=1.5, seed=seed), num_support=4) for seed in range(400)
    ]
    drafts = []
    for sequence in sequences:
        sequence.commit(PROMPT)
        drafts.append(sequence.propose(1))
        sequence.close()
    support = drafts[0].supports[0]
    assert all(draft.supports[0] == support for draft in drafts)
    found = [sum(draft.token_ids[0] == token_id for draft in drafts) for token_id in support.token_ids]
    expected = [400 * support_prob(support, token_id) for token_id in support.token_ids]
    assert sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True)) < 16.3  # 3 degrees, 0.001


def test_a_greedy_draft_is_certain(model: OnnxDraftModel) -> None:
    params = SamplingParams(temperature=0)
    draft = propose(model, params, 16)
    assert draft.token_ids == propose(model, params, 0).token_ids
    assert draft.supports == tuple(Support((token_id,), (1,)) for token_id in draft.token_ids)
    assert draft.draft_probs == (1.0,) * 5


@pytest.mark.parametrize("num_support", [0, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_bad_words_leave_nothing_the_draft_is_certain_of_id_0_as_the_target_is(
    model: OnnxDraftModel, num_support: int, temperature: float
) -> None:
    """All but one word are banned, and that one after the prompt's last."""
    words = (*((i,) for i in range(model.num_tokens) if i != 40), (PROMPT[-1], 40))
    params = SamplingParams(temperature=temperature, seed=1, bad_words=words)
    draft = propose(model, params, num_support, num=2)
    assert draft.token_ids == (0, 40) and draft.draft_probs == (1.0, 1.0)
    assert draft.supports == ((Support((0,), (1,)), Support((40,), (1,))) if num_support else ())


def test_a_copy_is_certain_too() -> None:
    sequence = PromptLookupModel(500, "").sequence(PLAIN, num_support=16)
    sequence.commit([1, 2, 3, 4, 1, 2])
    draft = sequence.propose(3)
    assert draft.supports == (Support((3,), (1,)), Support((4,), (1,)), Support((1,), (1,)))
    assert draft.draft_probs == (1.0, 1.0, 1.0)
    sequence.commit([77])
    assert sequence.propose(3).token_ids == ()


def test_the_draft_directory_of_first_layers_has_supports_as_well(tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "qwen2", num_tokens=500)
    export_draft(hf_dir, tmp_path / "onnx", first_layers=1)
    with OnnxDraftModel.open(tmp_path / "onnx") as model:
        assert [len(s.token_ids) for s in propose(model, PLAIN, 8).supports] == [8] * 5
