"""The reference itself is right: `Generate` against transformers, greedy and in distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from support.processes.decoding import decode
from support.processes.forked import running_verifier
from support.processes.pairs import EMBEDDED, Pair
from test_same_text import make_prompt
from transformers import AutoModelForCausalLM

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import QueueLimits, ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.alignment import TokenChain
from outrider.common.types import GeneratedTokens, GenerateRequest, Opened, OpenRequest, SamplingParams
from outrider.experiments.shared.processes import VerifierProcess
from outrider.experiments.sweep.results.judging import Scorer

NUM_SAMPLES = 4000
PROMPT = (17, 200, 33, 90, 41)
SECOND = 60  # the token after which Generate samples


def hf_model(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model


def hf_greedy(model: torch.nn.Module, prompt: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(t) for t in out[0, len(prompt) :]]


def test_generate_is_transformers_generate_at_temperature_0(
    tiny_verifier: VerifierProcess, tiny_pair: Pair
) -> None:
    model = hf_model(tiny_pair.target)
    for seed in range(5):
        prompt = make_prompt(seed)
        ours = decode(tiny_verifier.address, prompt, SamplingParams(temperature=0.0), num_new=32).token_ids
        assert list(ours) == hf_greedy(model, prompt, 32)


@pytest.mark.skipif(not (EMBEDDED / "target" / "config.json").exists(), reason="no embedded pair")
def test_generate_is_transformers_generate_on_the_embedded_target() -> None:
    model = hf_model(EMBEDDED / "target")
    with running_verifier() as verifier:
        for prompt in ([9, 300, 77], list(range(40, 90))):
            ours = decode(verifier.address, prompt, SamplingParams(temperature=0.0), num_new=48).token_ids
            assert list(ours) == hf_greedy(model, prompt, 48)


def chi_square_p(counts: np.ndarray, probs: np.ndarray, min_expected: float = 8.0) -> float:
    """p-value of Pearson's test; bins of less than `min_expected` are put together (the tail)."""
    expected = probs * counts.sum()
    big = expected >= min_expected
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    assert len(wanted) > 20, "too few bins to prove anything"
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(chi2.sf(statistic, len(wanted) - 1))


def sample_openings_and_generates(target: Path) -> tuple[np.ndarray, np.ndarray]:
    """Through the engine, one session a seed: the opening's token, and Generate's after SECOND."""
    backend = load_target(target)
    model = make_model_info(backend, ServeConfig(max_sessions=NUM_SAMPLES))
    patient = QueueLimits(max_queue_ms=600_000.0)  # whoever steps by hand has no deadline
    engine = Engine(backend, model, max_step_tokens=2048, prefill_chunk_tokens=1024, queue_limits=patient)
    first, generated = np.zeros(backend.num_tokens), np.zeros(backend.num_tokens)

    def count(reply: object) -> None:
        if isinstance(reply, Opened):
            first[reply.first_token] += 1
        if isinstance(reply, GeneratedTokens):
            generated[reply.token_ids[0]] += 1

    base = TokenChain(PROMPT)
    for seed in range(NUM_SAMPLES):
        session_id = seed.to_bytes(16, "little")
        opening = OpenRequest(session_id, PROMPT, len(PROMPT), SamplingParams(temperature=1.0, seed=seed))
        generate = GenerateRequest(1, base.position, base.hash, 1, committed_tokens=(SECOND,))
        for request in (opening, generate):
            engine.submit(Job(session_id, request, count, 0))
        if seed % 500 == 499 or seed == NUM_SAMPLES - 1:
            while engine.step():
                pass
            for session in list(engine.sessions):
                engine.sessions.forget(session)
    assert first.sum() == generated.sum() == NUM_SAMPLES
    return first, generated


def test_generate_samples_the_softmax_of_transformers_logits_at_temperature_1(tiny_pair: Pair) -> None:
    first, generated = sample_openings_and_generates(tiny_pair.target)
    with torch.inference_mode():
        logits = hf_model(tiny_pair.target)(torch.tensor([[*PROMPT, SECOND]])).logits[0].double()
    probs = torch.softmax(logits, -1).numpy()[:, : len(first)]
    assert chi_square_p(first, probs[len(PROMPT) - 1]) > 0.001
    assert chi_square_p(generated, probs[len(PROMPT)]) > 0.001
    # The test can fail: it finds the other position's distribution out, and a fifth of it mixed in.
    assert chi_square_p(first, probs[len(PROMPT)]) < 1e-9
    mixed = 0.8 * probs[len(PROMPT)] + 0.2 * probs[len(PROMPT) - 1]
    assert chi_square_p(generated, mixed) < 0.001


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_scorer_finds_the_one_token_that_is_not_the_targets(
    tiny_verifier: VerifierProcess, tiny_pair: Pair, temperature: float
) -> None:
    prompt, sampling = make_prompt(2), SamplingParams(temperature=temperature, seed=2)
    written = decode(tiny_verifier.address, prompt, sampling, num_new=24).token_ids
    scorer = Scorer(tiny_pair.target)
    assert scorer.unlike(prompt, written, sampling) == []
    assert scorer.unlike(prompt, (*written[:7], written[7] ^ 1), sampling) == [7]
    assert not scorer.is_tie(prompt, written[:7], written[7], written[7] ^ 1, sampling)
