"""A sequence's text, KV and sampling: rollback, catch-up, the context limit, shared weights."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from draft_dirs import make_hf_dir

from outrider.common.errors import InvalidFieldError
from outrider.common.noise.draws import gumbel_row
from outrider.common.sampling.processors import process_logits
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.drafting import noise_ahead
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.rows.rows import allowed_by, constrained, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler

SAMPLED = SamplingParams(temperature=0.8, seed=11)
PROMPT = [5, 9, 200, 17, 33, 8, 120]


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draft")
    hf_dir = make_hf_dir(root / "hf", "qwen2", num_tokens=500, max_position_embeddings=1500)
    export_draft(hf_dir, root / "onnx")
    return root / "onnx"


@pytest.fixture(scope="module")
def model(draft_dir: Path) -> Iterator[OnnxDraftModel]:
    with OnnxDraftModel.open(draft_dir) as model:
        yield model


def propose_after(model: OnnxDraftModel, *commits: list[int], num: int = 6) -> Draft:
    """A fresh sequence that is fed each of `commits` in one go before it proposes."""
    sequence = model.sequence(SAMPLED)
    for token_ids in commits[:-1]:
        sequence.commit(token_ids)
        sequence.propose(1)  # feeds what is committed, speculates nothing
    sequence.commit(commits[-1])
    return sequence.propose(num)


def test_a_draft_after_rollback_equals_a_fresh_prefill_bit_for_bit(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    first = sequence.propose(6)
    correction = (first.token_ids[0] + 1) % model.num_tokens
    sequence.commit([correction])  # all six are rejected
    sequence.check_integrity()
    assert sequence.propose(6) == propose_after(model, PROMPT, [correction])


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParams(temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("num_before", [1, 70])
def test_one_run_tells_what_would_have_been_proposed_in_the_place_of_known_text(
    model: OnnxDraftModel, sampling: SamplingParams, num_before: int
) -> None:
    before = np.random.default_rng(1).integers(0, model.num_tokens, num_before).tolist()
    one_by_one, sequence = model.sequence(sampling), model.sequence(sampling)
    one_by_one.commit(before)
    proposed = list(one_by_one.propose(1).token_ids)
    for token_id in PROMPT:
        one_by_one.commit([token_id])
        proposed += one_by_one.propose(1).token_ids
    sequence.commit(before)
    runs = []
    for name in ("feed", "feed_nodes"):
        run = getattr(sequence.parts[0], name)
        setattr(sequence.parts[0], name, lambda *a, run=run, name=name: (runs.append(name), run(*a))[1])
    assert list(sequence.propose_along(PROMPT)) == proposed
    assert runs.count("feed_nodes") == 1 and len(runs) == 2 + (num_before > 64)
    assert sequence.position == num_before + len(PROMPT)
    sequence.check_integrity()
    assert sequence.propose(6).token_ids == one_by_one.propose(6).token_ids


def test_known_text_is_only_committed_where_its_proposals_cannot_be_told(model: OnnxDraftModel) -> None:
    for sampling, before in (
        (SamplingParams(temperature=0.0, repetition_penalty=1.3), 5),
        (SAMPLED, model.max_context - len(PROMPT)),
    ):
        sequence = model.sequence(sampling)
        sequence.commit([7] * before)
        assert sequence.propose_along(PROMPT) == () and sequence.position == before + len(PROMPT)
        sequence.check_integrity()
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    with pytest.raises(InvalidFieldError):
        sequence.propose_along([model.num_tokens])


def test_a_draft_whose_noise_was_made_ahead_is_the_same_and_waits_for_none(
    model: OnnxDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, start = model.sequence(SAMPLED), len(PROMPT)
    sequence.commit(PROMPT)
    assert len(list(sequence.prepare(9))) == 9
    assert not list(sequence.prepare(9)), "it is there"
    expected = propose_after(model, PROMPT), propose_after(model, PROMPT, [3, 4], num=4)
    monkeypatch.setattr(noise_ahead, "noise_row", None)
    assert sequence.propose(6) == expected[0]
    sequence.commit([3, 4])
    assert sequence.propose(4) == expected[1]
    _, sampler = sequence.parts
    assert [position in sampler._noise for position in range(start, start + 4)] == [False, False, True, True]


def test_a_greedy_draft_needs_no_noise(model: OnnxDraftModel) -> None:
    assert not list(model.sequence(SamplingParams(temperature=0.0)).prepare(5))
    assert not list(model.sequence(SAMPLED, num_support=16).prepare(5))


def test_nothing_is_prepared_beyond_the_drafts_context(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit([5] * (model.max_context - 2))
    assert len(list(sequence.prepare(5))) == 2


def test_a_draft_after_truncate_equals_a_fresh_prefill_bit_for_bit(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    sequence.propose(4)
    sequence.commit(list(range(40, 60)))
    sequence.propose(4)
    sequence.truncate(len(PROMPT))
    assert sequence.position == len(PROMPT)
    sequence.commit([77, 78])
    sequence.check_integrity()
    assert sequence.propose(6) == propose_after(model, PROMPT, [77, 78])


def test_committing_what_was_proposed_keeps_its_kv(
    model: OnnxDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    draft = sequence.propose(4)
    fed: list[list[int]] = []
    feed = sequence._feed
    monkeypatch.setattr(sequence, "_feed", lambda ids, *after: (fed.append(list(ids)), feed(ids, *after))[1])
    sequence.commit([*draft.token_ids, 42])  # all accepted, and a bonus token
    sequence.propose(1)
    assert fed == [[draft.token_ids[3], 42]]  # the last drafted token was never fed
    fed.clear()
    accepted, rejected = sequence.propose(3).token_ids[:2]
    fed.clear()
    sequence.commit([accepted, (rejected + 1) % model.num_tokens])
    sequence.propose(1)
    assert fed == [[(rejected + 1) % model.num_tokens]]
    sequence.check_integrity()


def test_proposing_twice_gives_the_same_draft_and_leaves_the_text_alone(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    sequence.propose(1)
    sequence.commit([42])
    assert sequence.propose(5) == sequence.propose(5)
    assert sequence.position == len(PROMPT) + 1


def test_a_long_text_is_caught_up_in_chunks_while_the_kv_grows(model: OnnxDraftModel) -> None:
    text = np.random.default_rng(0).integers(0, model.num_tokens, 1200).tolist()
    sequence = model.sequence(SAMPLED)
    sequence.commit(text[:10])
    sequence.propose(1)
    small = sequence.num_kv_bytes
    sequence.commit(text[10:])
    draft = sequence.propose(8)
    assert sequence.num_kv_bytes < 3 * small  # 1500 positions where there were 512
    sequence.check_integrity()
    one_by_one = model.sequence(SAMPLED)
    for token_id in text:
        one_by_one.commit([token_id])
        one_by_one.propose(1)
    other = one_by_one.propose(8)
    # Activations are rounded to int8, so one token at a time differs a little from many at once.
    assert np.allclose(draft.draft_probs[0], other.draft_probs[0], rtol=0.3)
    assert draft.token_ids[0] == other.token_ids[0]


def test_drafts_end_at_the_context_limit_and_resume_behind_it(model: OnnxDraftModel) -> None:
    limit = model.max_context
    text = np.random.default_rng(1).integers(0, model.num_tokens, limit).tolist()
    sequence = model.sequence(SAMPLED)
    sequence.commit(text[: limit - 3])
    assert len(sequence.propose(8).token_ids) == 3
    sequence.commit(text[limit - 3 :])
    assert sequence.propose(8) == Draft((), ())
    sequence.commit([1, 2, 3])  # the text goes on without the draft
    assert sequence.propose(8) == Draft((), ())
    sequence.truncate(limit - 3)
    assert len(sequence.propose(8).token_ids) == 3
    sequence.check_integrity()


def test_sequences_of_one_model_do_not_disturb_each_other(model: OnnxDraftModel) -> None:
    prompts = [PROMPT, list(range(90)), [400, 3]]
    alone = [propose_after(model, prompt, num=20) for prompt in prompts]
    sequences = [model.sequence(SAMPLED) for _ in prompts]
    together: list[Draft | None] = [None] * len(prompts)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.commit(prompt)

    def draft(index: int) -> None:
        for _ in range(5):
            together[index] = sequences[index].propose(20)
            sequences[index].truncate(0)
            sequences[index]._cached.clear()
            sequences[index].commit(prompts[index])

    threads = [threading.Thread(target=draft, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_drafted_tokens_are_the_coupled_samples_of_the_drafts_own_distribution(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    draft = sequence.propose(1)
    runner = sequence._runner
    assert runner is not None
    logits = runner._rows.bind(1).logits[0].astype(np.float64)
    noise = gumbel_row(SAMPLED.seed, len(PROMPT), model.num_tokens)
    assert draft.token_ids[0] == int((np.float32(logits / 0.8).astype(np.float64) + noise).argmax())
    weights = np.exp((logits - logits.max()) / 0.8)
    assert draft.draft_probs[0] == pytest.approx(weights[draft.token_ids[0]] / weights.sum(), rel=1e-4)


def test_signals_are_of_the_unprocessed_distribution(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SamplingParams(temperature=0.5, top_k=3, seed=2))
    sequence.commit(PROMPT)
    draft = sequence.propose(1)
    runner = sequence._runner
    assert runner is not None
    logits = runner._rows.bind(1).logits[0].astype(np.float64)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    first, second = np.sort(probs)[-1:-3:-1]
    signals = draft.signals[0]
    assert signals.entropy_bits == pytest.approx(-(probs * np.log2(probs)).sum(), rel=1e-4)
    assert signals.nll == pytest.approx(-np.log(probs[draft.token_ids[0]]), rel=1e-4)
    assert signals.margin == pytest.approx(first - second, rel=1e-3)
    kept = np.argsort(probs)[-3:]
    assert draft.token_ids[0] in kept
    powered = probs[kept] ** 2
    chosen = probs[draft.token_ids[0]] ** 2 / powered.sum()
    assert draft.draft_probs[0] == pytest.approx(chosen, rel=1e-4)


def test_greedy_drafts_take_the_most_likely_token_with_certainty(model: OnnxDraftModel) -> None:
    sequence = model.sequence(SamplingParams(temperature=0))
    sequence.commit(PROMPT)
    draft = sequence.propose(4)
    assert draft.draft_probs == (1.0,) * 4
    assert all(np.isclose(signal.nll, 0) or signal.margin >= 0 for signal in draft.signals)
    again = propose_greedy(model, list(PROMPT), draft.token_ids[:1])
    assert again == draft.token_ids[1]


def propose_greedy(model: OnnxDraftModel, prompt: list[int], more: tuple[int, ...]) -> int:
    sequence = model.sequence(SamplingParams(temperature=0))
    sequence.commit(prompt)
    sequence.propose(1)
    sequence.commit(more)
    return sequence.propose(1).token_ids[0]


def test_penalties_see_the_output_and_the_tokens_drafted_before(model: OnnxDraftModel) -> None:
    """A frequency penalty of 100 forbids what the output or the draft holds already, not the prompt."""
    params = SamplingParams(temperature=0, frequency_penalty=100.0)
    sequence = model.sequence(params)
    sequence.commit(PROMPT)
    draft = sequence.propose(30).token_ids
    assert len(set(draft)) == 30
    sequence.commit(draft[:10])
    assert not set(draft[:10]) & set(sequence.propose(10).token_ids)
    resumed = model.sequence(params, num_prompt_tokens=len(PROMPT))  # a rebuilt session
    resumed.commit([*PROMPT, *draft[:10]])
    assert not set(draft[:10]) & set(resumed.propose(10).token_ids)


def test_ids_past_the_tokenizer_are_never_proposed_and_refused_when_committed(model: OnnxDraftModel) -> None:
    assert model.num_tokens == 500  # of 512 rows
    sequence = model.sequence(SamplingParams(temperature=1000.0, seed=4))
    sequence.commit([1])
    assert max(sequence.propose(300).token_ids) < 500
    with pytest.raises(InvalidFieldError, match="500"):
        sequence.commit([500])
    assert sequence.position == 1


def test_sampling_parameters_out_of_range_are_refused_by_name(model: OnnxDraftModel) -> None:
    with pytest.raises(InvalidFieldError, match=r"sampling\.top_p"):
        model.sequence(SamplingParams(top_p=1.5))


def test_drafting_needs_neither_torch_nor_transformers_nor_onnx(draft_dir: Path) -> None:
    code = f"""
import os, sys
for name in ("torch", "transformers", "onnx", "safetensors"):
    sys.modules[name] = None
from outrider.edge_client.drafting.registry import create_draft_model
assert "onnxruntime" not in sys.modules, "imported before it is needed"
from outrider.common.types import SamplingParams
from pathlib import Path
with create_draft_model("model", Path({str(draft_dir)!r})) as model:
    sequence = model.sequence(SamplingParams())
    sequence.commit([1, 2, 3])
    assert len(sequence.propose(4).token_ids) == 4
assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_graphs_tempered_logits_are_the_processed_scores_bit_for_bit(model: OnnxDraftModel) -> None:
    for temperature in (0.7, 1.0, 1.3):
        params = SamplingParams(temperature=temperature)
        sequence = model.sequence(params)
        sequence.commit(PROMPT)
        rows = sequence.parts[0].feed([4], 0)
        scores = process_logits(np, rows.logits, params, prompt_ids=(), output_ids=())
        assert np.array_equal(rows.tempered_logits, scores)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gap", [0.0, 200.0], ids=["likely ids", "ids without a digit in the softmax"])
def test_a_constrained_row_is_the_softmax_over_what_is_allowed(temperature: float, gap: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 70)).astype(np.float32)
    allowed = np.zeros(96, np.bool_)
    allowed[[3, 40, 69]] = True
    logits[0, ~allowed[:70]] += np.float32(gap)
    words = np.packbits(allowed, bitorder="little").view(np.int32)
    got = constrained(rows_of(logits, temperature), allowed_by(words, logits.shape[1]), temperature)
    masked = np.where(allowed[:70], logits, np.float32(-np.inf))
    expected = rows_of(masked, temperature)
    np.testing.assert_array_equal(got.logits, expected.logits)
    np.testing.assert_array_equal(got.tempered_logits, expected.tempered_logits)
    np.testing.assert_allclose(got.probs, expected.probs, rtol=1e-5)
    np.testing.assert_allclose(got.tempered_probs, expected.tempered_probs, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_few_allowed_ids_are_sampled_among_as_all_are(
    temperature: float, is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.grammars import NUM_TOKENS, compiled, regex

    params = SamplingParams(temperature=temperature, seed=5, grammar=compiled(regex("[a-e]{3}x[a-e]{1,40}")))
    rng, found = np.random.default_rng(1), []
    logits = [rng.normal(0, 4, (1, NUM_TOKENS)).astype(np.float32) for _ in range(12)]
    for most in (512, 0):
        monkeypatch.setattr("outrider.edge_client.drafting.rows.sampler._FEW", most)
        sampler = DraftSampler(params, (0,))
        if is_prepared:
            list(sampler.prepare(range(20), NUM_TOKENS))
        output: list[int] = []
        sampled = []
        for each in logits:
            sampled.append(sampler.sample(rows_of(each, temperature), len(output), 0, (), output))
            output.append(sampled[-1][0])
        assert not any(position in sampler._noise for position in range(len(logits) - 1)), "kept for nothing"
        found.append(sampled)
    few, whole = found
    assert [each[0] for each in few] == [each[0] for each in whole]
    np.testing.assert_allclose([each[1] for each in few], [each[1] for each in whole], rtol=1e-4)
    for ours, theirs in zip(few, whole, strict=True):
        a, b = ours[2], theirs[2]
        np.testing.assert_allclose(
            [a.entropy_bits, a.nll, a.margin], [b.entropy_bits, b.nll, b.margin], atol=2e-3
        )
