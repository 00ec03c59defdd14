"""The processors against Hugging Face's composed in our order, vLLM's formula, and numpy against torch.

Tolerance: the same ids are kept, and kept scores agree to 1e-6 of their size (float32 rounds the same
operations in another order). Random logits have no ties; at ties ours keep all equal scores.
"""

import dataclasses
import math

import numpy as np
import pytest

from outrider.common.codec import decode_open, encode_open
from outrider.common.errors import InvalidFieldError, ModelError
from outrider.common.sampling.processors import (
    check_sampling_params,
    choose,
    is_plain,
    on_wire,
    penalties_of,
    process_logits,
)
from outrider.common.sampling.truncation import row_thresholds, truncate
from outrider.common.types import OpenRequest, SamplingParams

VOCAB = 500
PROMPT, OUTPUT, DRAFT = [3, 9, 9, 14], [9, 20, 20, 33], [20, 41, 41, 3]
PLAIN = SamplingParams(temperature=1.0)
ALL = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((5, 3.0), (33, -2.0)),
    bad_words=((7,), (20, 41, 8), (41, 6)),
    min_new_tokens=6,
)
EACH = [
    PLAIN,
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_k=17),
    SamplingParams(temperature=1, top_p=0.8),
    SamplingParams(temperature=1, top_p=0.05),
    SamplingParams(temperature=1, top_p=0.9999),
    SamplingParams(temperature=1, min_p=0.1),
    SamplingParams(temperature=1, repetition_penalty=1.5),
    SamplingParams(temperature=1, repetition_penalty=0.6),
    SamplingParams(temperature=1, logit_bias=((5, 3.0), (33, -2.0))),
    SamplingParams(temperature=1, bad_words=((7,), (20, 41, 8), (41, 6), (3, 9))),
    SamplingParams(temperature=1, min_new_tokens=6),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    dataclasses.replace(ALL, presence_penalty=0.0, frequency_penalty=0.0),
]


def logits(rows=5, vocab=VOCAB, scale=4.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def ours(params, raw, xp=np, **others):
    texts = {"prompt_ids": PROMPT, "output_ids": OUTPUT, "draft_token_ids": DRAFT, "eos_token_ids": [0, 2]}
    return process_logits(xp, raw, params, **{**texts, **others})


def hugging_face(params, raw):
    """Row by row, each with its own text, through transformers' processors."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    chain = []
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias}))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_new_tokens:
        least = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_new_tokens, [0, 2])
        chain.append(least)
    chain.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    rows = []
    for index, row in enumerate(raw):
        scores = torch.from_numpy(row.copy())[None]
        text = torch.tensor([PROMPT + OUTPUT + DRAFT[:index]])
        for processor in chain:
            scores = processor(text, scores)
        rows.append(scores[0].numpy())
    return np.stack(rows)


def assert_same_scores(got, expected):
    assert np.array_equal(np.isfinite(got), np.isfinite(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("params", EACH, ids=range(len(EACH)))
@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_hugging_face_in_our_order(params, seed):
    for scale in (0.5, 4.0):
        raw = logits(seed=seed, scale=scale)
        assert_same_scores(ours(params, raw), hugging_face(params, raw))


@pytest.mark.parametrize("presence, frequency", [(0.4, 0.0), (0.0, 0.3), (0.5, -0.7), (-1.5, 2.0)])
def test_presence_and_frequency_follow_vllms_formula_over_output_and_draft(presence, frequency):
    params = dataclasses.replace(PLAIN, presence_penalty=presence, frequency_penalty=frequency)
    raw = logits()
    counts = np.zeros((5, VOCAB), np.float32)
    for row in range(5):
        for token_id in OUTPUT + DRAFT[:row]:  # not the prompt
            counts[row, token_id] += 1
    expected = raw.copy()
    expected -= np.float32(frequency) * counts
    expected -= np.float32(presence) * (counts > 0)
    np.testing.assert_allclose(ours(params, raw), expected, rtol=1e-6)


@pytest.mark.parametrize("params", [*EACH, ALL], ids=range(len(EACH) + 1))
def test_numpy_and_torch_give_the_same_scores(params):
    torch = pytest.importorskip("torch")
    raw = logits(seed=8)
    in_torch = ours(params, torch.from_numpy(raw.copy()), xp=torch, num_tokens=VOCAB - 7)
    assert isinstance(in_torch, torch.Tensor) and in_torch.dtype == torch.float32
    assert_same_scores(ours(params, raw, num_tokens=VOCAB - 7), in_torch.numpy())


@pytest.mark.parametrize("params", [*EACH, ALL], ids=range(len(EACH) + 1))
def test_drafted_rows_get_the_very_bits_that_committed_text_gets(params):
    raw = logits(seed=9)
    drafted = ours(params, raw)
    for row in range(5):
        alone = ours(params, raw[row : row + 1], output_ids=OUTPUT + DRAFT[:row], draft_token_ids=[])
        assert np.array_equal(alone[0], drafted[row])


@pytest.mark.parametrize("params", [*EACH, ALL, SamplingParams(temperature=0, top_p=0.5)])
def test_the_logits_passed_in_stay_as_they_were(params):
    raw = logits()
    before = raw.copy()
    ours(params, raw, num_tokens=VOCAB - 7)
    assert np.array_equal(raw, before)


def test_ids_past_the_tokenizer_are_masked():
    raw = logits()
    raw[:, 490:] = 100
    for params in (PLAIN, ALL, SamplingParams(temperature=0)):
        scores = ours(params, raw, num_tokens=490)
        assert np.isneginf(scores[:, 490:]).all()
        assert (choose(scores, params, range(5)) < 490).all()


def test_greedy_skips_scaling_and_truncation_and_takes_the_lowest_of_equals():
    greedy = SamplingParams(temperature=0, top_k=3, top_p=0.1)
    raw = np.array([[1, 5, 5, 2], [7, 7, 0, 0]], np.float32)
    scores = process_logits(np, raw, greedy, prompt_ids=[1], output_ids=[], draft_token_ids=[0])
    assert scores is raw
    assert choose(scores, greedy, [1, 2]).tolist() == [1, 0]
    with pytest.raises(ModelError, match="NaN"):
        choose(np.array([[0, math.nan]], np.float32), greedy, [1])


def test_greedy_still_sees_penalties_and_masks():
    params = SamplingParams(temperature=0, repetition_penalty=2, bad_words=((2,),))
    raw = np.array([[4, 3.5, 9, 3.6]], np.float32)
    scores = process_logits(np, raw, params, prompt_ids=[0], output_ids=[])
    assert choose(scores, params, [1]).tolist() == [3]


def test_end_of_text_is_masked_until_the_minimum_length_draft_included():
    params = dataclasses.replace(PLAIN, min_new_tokens=len(OUTPUT) + 2)
    scores = ours(params, logits())
    assert np.isneginf(scores[:, 0]).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("num_short", [0, 2, 9])
def test_stop_ids_that_are_held_back_are_masked_as_end_of_text_is(library, num_short):
    xp = pytest.importorskip(library)
    params = dataclasses.replace(PLAIN, min_new_tokens=len(OUTPUT) + num_short, held_back=(7, 0, 41, 7))
    raw = logits()
    expected = raw.copy()
    expected[:num_short, [0, 2, 7, 41]] = -math.inf
    got = np.asarray(ours(params, raw if xp is np else xp.from_numpy(raw), xp))
    np.testing.assert_array_equal(got, expected)


def test_what_masks_stop_ids_grows_neither_with_rows_nor_with_ids_given_twice():
    params = dataclasses.replace(PLAIN, min_new_tokens=100, held_back=(*range(VOCAB),) * 60)
    for num_rows in (1, 65):
        found = penalties_of(params, num_rows, PROMPT, OUTPUT, [1] * (num_rows - 1))
        assert sum(each.nbytes for each in found) == 8 * VOCAB


@pytest.mark.parametrize("vocab", [70, 1000, 8192])
@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(5, 1, 0), (60, 0.9, 0), (0, 0.9, 0), (0, 0.3, 0.01), (0, 0.99, 0)]
)
@pytest.mark.parametrize("scale", [0, 0.1, 2, 12])
def test_truncating_rows_equals_sorting_everything(vocab, top_k, top_p, min_p, scale):
    scores = logits(rows=6, vocab=vocab, scale=scale, seed=vocab)
    scores[3:] = np.round(scores[3:])  # ties
    scores[5, 7:] = -np.inf
    expected = np.where(scores >= row_thresholds(np, scores, top_k, top_p, min_p), scores, -np.inf)
    got = truncate(np, scores, top_k, top_p, min_p)
    num_ids = np.isfinite(got).sum(axis=1)
    probs = np.exp(scores - scores.max(axis=1, keepdims=True)).astype(np.float64)
    probs /= probs.sum(axis=1, keepdims=True)
    is_at_edge = np.isfinite(got) != np.isfinite(expected)
    # Equal scores of a tied top-p threshold go together; float32 weights may move that threshold by 1e-6 of the mass.
    assert not is_at_edge[probs > 1e-3].any() and is_at_edge.sum() <= 6
    assert (num_ids >= 1).all()
    assert np.array_equal(got.max(axis=1), scores.max(axis=1))


def test_scores_equal_at_an_edge_stay_together():
    tied = np.array([[3, 1, 3, 2, 2, 0]], np.float32)
    for settings in ((1, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.9)):
        assert np.isfinite(truncate(np, tied, *settings))[0].tolist() == [
            True,
            False,
            True,
            False,
            False,
            False,
        ]
    assert np.isfinite(truncate(np, tied, 3, 1.0, 0.0))[0].tolist() == [True, False, True, True, True, False]


def test_rows_with_nothing_left_stay_as_they_are():
    masked = np.full((1, 100), -np.inf, np.float32)
    assert np.isneginf(truncate(np, masked, 3, 0.5, 0.1)).all()


def test_float32_on_the_wire_gives_the_same_scores_as_float64_at_the_edge():
    def carried(value):
        return float(np.float32(value)) if isinstance(value, float) else value

    rounded = SamplingParams(**{f.name: carried(getattr(ALL, f.name)) for f in dataclasses.fields(ALL)})
    assert np.array_equal(ours(ALL, logits()), ours(rounded, logits()))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": 1e9}, "frequency_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.inf),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, "bad_words"),
    ],
)
def test_values_out_of_range_are_named_as_on_the_wire(change, field):
    with pytest.raises(InvalidFieldError) as caught:
        check_sampling_params(dataclasses.replace(PLAIN, **change), VOCAB)
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (1e-46, -1e-46, 1e-3, 0.99999999e-3, 1000.00001, 0.9e-3, 1000.1, 1e300, -1e300)),
        ("top_p", (1e-6, 1.00000001, 1.0000002, 0.99999999e-6, 0.9e-6)),
        ("min_p", (1e-46, -1e-46, 0.9999999, 0.99999999, 1 - 2**-24, 1 - 2**-26)),
        ("repetition_penalty", (0.01, 0.00999999999, 0.0099, 100.000001, 100.1)),
        ("presence_penalty", (100.000001, -100.000001, 100.1, 1e-46)),
    ],
)
def test_both_sides_take_and_refuse_the_same_numbers(name, values):
    """The verifier sees a number after the wire, in float32; its answer is the one that counts."""

    def error_of(params):
        try:
            check_sampling_params(params, VOCAB)
        except InvalidFieldError as error:
            return error.field
        return None

    answers = set()
    for value in values:
        params = dataclasses.replace(PLAIN, **{name: value})
        request = OpenRequest(bytes(16), (1,), 1, params)
        received = decode_open(encode_open(request)).sampling
        assert error_of(params) == error_of(received), value
        assert on_wire(params) == received, value
        answers.add(error_of(params) is None)
    assert answers == {True, False}, "one answer for all"


def test_a_number_past_the_wires_largest_is_refused_by_name_and_not_by_a_warning():
    with pytest.raises(InvalidFieldError, match="temperature"):
        check_sampling_params(dataclasses.replace(PLAIN, temperature=1e300), VOCAB)


def test_ordinary_values_pass_the_check():
    for params in (*EACH, ALL, SamplingParams(temperature=0), SamplingParams(seed=2**64 - 1)):
        check_sampling_params(params, VOCAB)


def test_plain_means_that_history_does_not_matter():
    assert is_plain(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logit_bias=((1, 1.0),)))
    for change in ({"repetition_penalty": 1.1}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        assert not is_plain(dataclasses.replace(PLAIN, **change))
    for change in ({"bad_words": ((1,),)}, {"min_new_tokens": 1}):
        assert not is_plain(dataclasses.replace(PLAIN, **change))
