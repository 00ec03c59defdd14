"""The paged packed path writes what transformers' `generate` writes: greedy, float32, ten architectures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.devices import GPU_DEVICE, ON_GPU
from support.exact.ties import TieCounter
from support.matrices import one_of
from support.models import ARCHITECTURES, WINDOWED

from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend

PROMPTS = [list(range(5, 12)), list(range(40, 73)), [9, 8, 7] * 20]
NUM_NEW_TOKENS = 24
GPU_ARCHITECTURES = ARCHITECTURES if GPU_DEVICE == "cuda" else ARCHITECTURES[:1]
OWN = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
CASES = [
    *((arch, "auto", "cpu") for arch in (*ARCHITECTURES, *WINDOWED)),
    *one_of(2, OWN, ["transformers", "cuda"], ["cpu"]),
    *(pytest.param(arch, "cuda", GPU_DEVICE, marks=ON_GPU, id=f"{arch}-gpu") for arch in GPU_ARCHITECTURES),
]


def load(directory: Path, decoder: str, device: str) -> PagedBackend:
    backend = load_target(directory, decoder=decoder, device=device, dtype="float32")
    backend.has_device_logits = False
    return backend


@functools.cache
def generate(directory: Path) -> list[list[int]]:
    """What transformers writes after each prompt, alone, with its own cache and attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize(("arch", "decoder", "device"), CASES)
def test_a_session_alone_and_three_in_one_batch_write_what_generate_writes(
    target_of: Callable[[str], Path], arch: str, decoder: str, device: str
) -> None:
    directory = target_of(arch)
    references = generate(directory)
    backend = load(directory, decoder, device)
    counter = TieCounter()
    for prompt, reference in zip(PROMPTS, references, strict=True):
        sequence = backend.new_sequence()
        feed = prompt
        for token in reference:
            (scores,) = backend.forward([ForwardItem(sequence, feed, 1)])
            feed = [counter.compare(scores, token)]
        backend.close(sequence)

    before = (backend.num_forwards, backend.num_query_rows)
    sequences = [backend.new_sequence() for _ in PROMPTS]
    feeds = list(PROMPTS)
    for step in range(NUM_NEW_TOKENS):
        items = [ForwardItem(s, f, 1) for s, f in zip(sequences, feeds, strict=True)]
        rows = backend.forward(items)
        feeds = [[counter.compare(row, ref[step])] for row, ref in zip(rows, references, strict=True)]
    backend.check_integrity()
    num_rows = sum(map(len, PROMPTS)) + 3 * (NUM_NEW_TOKENS - 1)
    assert backend.num_forwards - before[0] == NUM_NEW_TOKENS, "three sessions share each forward"
    assert backend.num_query_rows - before[1] == num_rows, "packed: no padding"
    counter.check()


@pytest.mark.parametrize(("arch", "decoder", "device"), CASES)
def test_several_rows_of_one_forward_score_the_same_tokens(
    target_of: Callable[[str], Path], arch: str, decoder: str, device: str
) -> None:
    """A verification: the text so far is in the cache, a draft of 8 comes in one forward."""
    directory = target_of(arch)
    references = generate(directory)
    backend = load(directory, decoder, device)
    sequences = [backend.new_sequence() for _ in PROMPTS]
    backend.forward([ForwardItem(s, p[:-1], 0) for s, p in zip(sequences, PROMPTS, strict=True)])
    counter = TieCounter()
    for start in range(0, NUM_NEW_TOKENS, 8):
        texts = [p[-1:] + ref for p, ref in zip(PROMPTS, references, strict=True)]
        items = [ForwardItem(s, t[start : start + 8], 8) for s, t in zip(sequences, texts, strict=True)]
        rows = backend.forward(items)
        for i, reference in enumerate(references):
            counter.compare_all(rows[8 * i : 8 * i + 8], reference[start : start + 8])
    counter.check()
