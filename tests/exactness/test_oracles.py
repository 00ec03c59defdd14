"""Against what others wrote: transformers' processors and assisted generation, vLLM's penalties.

`tests/common/test_processors.py` compares fixed settings; here every parameter is drawn at random, alone and
with all the others, presence and frequency penalties among them. Tolerance: the same ids are kept, scores
agree to 2e-6 of their size (float32 rounds the same operations in another order).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exact.in_process import InProcessEdge
from support.models import make_tiny_target

from outrider.common.sampling.processors import process_logits
from outrider.common.types import Method, SamplingParams

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.generation import logits_process as hf  # noqa: E402

VOCAB = 3000
EOS = (0, 2)
NUM_NEW = 32


class CountPenalties(hf.LogitsProcessor):  # type: ignore[misc]
    """vLLM's formula (`apply_penalties`, after OpenAI's API reference), over the output alone:
    logits −= frequency_penalty · count; logits −= presence_penalty · (count > 0)."""

    def __init__(self, presence: float, frequency: float, num_prompt_tokens: int) -> None:
        self._presence, self._frequency, self._num_prompt_tokens = presence, frequency, num_prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        output = input_ids[0, self._num_prompt_tokens :]
        counts = torch.bincount(output, minlength=scores.shape[-1])[None].to(scores.dtype)
        scores = scores - self._frequency * counts
        return scores - self._presence * (counts > 0).to(scores.dtype)


def chain_of(params: SamplingParams, num_prompt_tokens: int) -> list[Any]:
    """transformers' processors and vLLM's penalties, in our order."""
    chain: list[Any] = []
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(CountPenalties(params.presence_penalty, params.frequency_penalty, num_prompt_tokens))
    if params.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias}))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_new_tokens:
        least = hf.MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_new_tokens, list(EOS))
        chain.append(least)
    if params.temperature != 1:
        chain.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    return chain


def random_fields(rng: np.random.Generator, text: list[int]) -> dict[str, Any]:
    """A value for every parameter, some of them about ids that the text holds."""
    ids = [int(i) for i in rng.permutation(VOCAB)[:6]] + text[-2:]
    return {
        "temperature": float(np.float32(rng.uniform(0.3, 2.0))),
        "top_k": int(rng.integers(1, 400)),
        "top_p": float(np.float32(rng.uniform(0.3, 0.999))),
        "min_p": float(np.float32(rng.uniform(0.0001, 0.1))),
        "repetition_penalty": float(np.float32(rng.uniform(0.6, 1.8))),
        "presence_penalty": float(np.float32(rng.uniform(-2, 2))),
        "frequency_penalty": float(np.float32(rng.uniform(-2, 2))),
        "logit_bias": tuple({i: float(np.float32(rng.uniform(-5, 5))) for i in ids}.items()),
        "bad_words": ((ids[0],), (text[-1], ids[1]), (text[-2], text[-1], ids[2])),
        "min_new_tokens": int(rng.integers(1, 12)),
    }


NAMES = tuple(random_fields(np.random.default_rng(0), [1, 2]))


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES], ids=[*NAMES, "all"])
def test_processors_are_transformers_and_vllms_in_our_order(names: tuple[str, ...]) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        prompt, output, draft = (rng.integers(0, 60, size).tolist() for size in (9, 7, 3))
        fields = random_fields(rng, [*prompt, *output])
        params = SamplingParams(**{"temperature": 1.0} | {name: fields[name] for name in names})
        logits = (rng.standard_normal((4, VOCAB)) * rng.choice([0.5, 2, 5])).astype(np.float32)
        ours = process_logits(
            np,
            logits,
            params,
            prompt_ids=prompt,
            output_ids=output,
            draft_token_ids=draft,
            eos_token_ids=EOS,
        )
        for row in range(4):
            scores = torch.from_numpy(logits[row : row + 1].copy())
            text = torch.tensor([[*prompt, *output, *draft[:row]]])
            for processor in chain_of(params, len(prompt)):
                scores = processor(text, scores)
            theirs = scores[0].numpy()
            assert np.array_equal(np.isfinite(ours[row]), np.isfinite(theirs)), (seed, row)
            np.testing.assert_allclose(ours[row], theirs, rtol=2e-6, atol=2e-6)


def test_equal_scores_at_the_edge_of_top_p_stay_together_where_transformers_takes_some_of_them() -> None:
    """Ours cannot depend on how a sort orders equals, on either side of the wire; a coarser choice, no bias
    of either side against the other."""
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    params = SamplingParams(temperature=1.0, top_p=0.5)
    ours = process_logits(np, logits, params, prompt_ids=[0], output_ids=[])
    theirs = hf.TopPLogitsWarper(0.5)(None, torch.from_numpy(logits))
    assert np.isfinite(ours).sum() == 4
    assert int(torch.isfinite(theirs).sum()) == 2


def test_equal_scores_at_the_edge_of_top_k_stay_together_as_in_transformers() -> None:
    logits = np.array([[3, 1, 1, 1, 0]], np.float32)
    params = SamplingParams(temperature=1.0, top_k=2)
    ours = process_logits(np, logits, params, prompt_ids=[0], output_ids=[])
    theirs = hf.TopKLogitsWarper(2)(None, torch.from_numpy(logits)).numpy()
    assert np.array_equal(ours, theirs) and math.isinf(ours[0, 4])


# ------------------------------------------------------------------------------ assisted generation


PROMPTS = [tuple(np.random.default_rng(seed).integers(1, 300, 12).tolist()) for seed in range(2)]


@dataclass(frozen=True)
class Assisted:
    """A random target's directory, a draft of it, and what assisted generation writes after each prompt."""

    target: Path
    draft: Any
    texts: list[list[int]]


@pytest.fixture(scope="module")
def assisted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assisted]:
    directory = make_tiny_target(tmp_path_factory.mktemp("assisted"), hidden=64, num_layers=2, seed=1)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval() for _ in range(2)
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    with torch.inference_mode():  # the target's weights, disturbed: right often, not always
        generator = torch.Generator().manual_seed(0)
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1 * weight.std())
        texts = [_generate(target, draft, prompt) for prompt in PROMPTS]
    yield Assisted(directory, draft, texts)
    torch.set_num_threads(num_threads)


def _generate(target: Any, draft: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


@pytest.mark.parametrize("method", [m for m in Method if m.is_exact])
def test_greedy_text_is_that_of_transformers_assisted_generation(assisted: Assisted, method: Method) -> None:
    from outrider.cloud_verifier.backends.loading import load_target

    def draft(text: Any) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(assisted.draft(torch.tensor([text])).logits[0, -1].numpy(), np.float32)

    edge = InProcessEdge(load_target(assisted.target, num_threads=1))
    greedy = SamplingParams(temperature=0.0)
    for prompt, expected in zip(PROMPTS, assisted.texts, strict=True):
        text = edge.speculative(prompt, greedy, NUM_NEW, method=method, draft=draft, ignore_eos=True)
        assert text == expected
    assert edge.num_accepted > NUM_NEW // 2, "the draft was hardly ever right: the comparison proves little"
