"""Every sampling parameter at drafted positions as cloud-only decoding has it, through the engine.

With `coupled` the texts are equal token for token. The other exact methods write other texts of the same
distribution (`test_statistics.py`); at temperature 0 theirs are equal too.
"""

import itertools

import numpy as np
import pytest
from support.exact.in_process import InProcessEdge
from support.fakes import FakeBackend

from outrider.common.types import Method, SamplingParams

PROMPT = (5, 9, 9, 14)
NUM_NEW = 40
ALL = {
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.005,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": ((17, 2.0), (0, 5.0), (21, -3.0)),
    "bad_words": ((3,), (9, 8), (17, 17)),
    "min_new_tokens": 15,
}
FIELDS = [{}, *({name: value} for name, value in ALL.items()), ALL]
IDS = ["plain", *ALL, "all"]


def noisy_draft(backend):
    """The target's logits with noise of their own: accepted often, and not always."""

    def logits(text):
        rng = np.random.default_rng([*text[-2:], len(text)])
        noise = rng.normal(scale=0.7, size=backend.num_tokens)
        return (backend.logits_after(text)[: backend.num_tokens] + noise).astype(np.float32)

    return logits


def texts_of(method, sampling, **options):
    backend = FakeBackend(max_context=128)
    edge = InProcessEdge(backend)
    reference = edge.cloud_only(PROMPT, sampling, NUM_NEW, **options)
    text = edge.speculative(PROMPT, sampling, NUM_NEW, method=method, draft=noisy_draft(backend), **options)
    assert edge.num_accepted > 0 or len(text) < 8, "nothing was accepted: the comparison proves little"
    return reference, text


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("fields", FIELDS, ids=IDS)
def test_coupled_writes_cloud_only_text_under_every_parameter(fields, seed):
    sampling = SamplingParams(temperature=0.9, seed=seed, **fields)
    reference, text = texts_of(Method.COUPLED, sampling)
    assert text == reference
    assert len(text) > fields.get("min_new_tokens", 0)


@pytest.mark.parametrize("seed", range(6))
def test_coupled_ends_where_cloud_only_ends(seed):
    sampling = SamplingParams(temperature=1.0, seed=seed, **ALL)
    reference, text = texts_of(Method.COUPLED, sampling, stop_token_ids=(12, 26))
    assert text == reference
    assert text[-1] in (0, 12, 26) or len(text) == NUM_NEW


@pytest.mark.parametrize("fields", FIELDS, ids=IDS)
@pytest.mark.parametrize("method", [m for m in Method if m.is_exact])
def test_greedy_text_is_cloud_only_text_with_every_exact_method(method, fields):
    for options in ({}, {"stop_token_ids": (12, 26)}):
        reference, text = texts_of(method, SamplingParams(temperature=0.0, **fields), **options)
        assert text == reference


@pytest.mark.parametrize("method", [Method.SPARSE, Method.BLOCK, Method.CANDIDATES])
def test_what_a_parameter_forbids_never_stands_in_the_text(method):
    for seed in range(10):
        sampling = SamplingParams(temperature=1.2, seed=seed, **ALL)
        _, text = texts_of(method, sampling)
        pairs = list(itertools.pairwise(text))
        assert 3 not in text and (9, 8) not in pairs and (17, 17) not in pairs
        assert 0 not in text[:15]


@pytest.mark.parametrize("method", [Method.SPARSE, Method.BLOCK, Method.CANDIDATES])
def test_a_seed_gives_one_text_and_others_others(method):
    texts = [texts_of(method, SamplingParams(temperature=1.0, seed=seed))[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
