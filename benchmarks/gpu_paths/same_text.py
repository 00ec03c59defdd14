"""Texts of CudaDecoder on a CPU beside those of transformers' `generate`: each alone, and all in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_check.shape import SHAPE_TOY, ModelWeights, make_facts, own_config
from benchmarks.gpu_check.stage import Setting
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.loading import make_backend
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.process.quiet_loading import quiet_loading
from outrider.experiments.shared.results import at_least, judged

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so that greedy text is not one token repeated
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "gemma2": {
        "head_dim": 24,
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
    },
}
PROMPTS = (tuple(range(5, 12)), tuple(range(40, 73)), (9, 8, 7) * 20, (3,))
NUM_NEW = 32


def run() -> Found:
    """Writes each text with each model, alone and in a batch."""
    setting = Setting(is_rehearsal=True, limit_s=600.0)
    equal: dict[str, list[int]] = {}
    for name, fields in MODELS.items():
        model = _make_model(name, fields)
        config = own_config(model)
        facts = replace(
            make_facts(setting, SHAPE_TOY, torch.float32),
            num_tokens=config.vocab_size,
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            windows=config.windows,
        )
        expected = [_generate(model, prompt) for prompt in PROMPTS]
        backend = make_backend(
            CudaDecoder(config, ModelWeights(model)), facts, kv_tokens=1024, exact_rows="off"
        )
        alone = [text for prompt in PROMPTS for text in _write(backend, [prompt])]
        together = _write(backend, PROMPTS)
        equal[name] = [
            sum(map(list.__eq__, texts, expected)) for texts in (alone, together)
        ]  # of the prompts
    num_texts = 2 * len(PROMPTS) * len(MODELS)
    what = f"of {num_texts} texts of {NUM_NEW} tokens, those that are transformers'; {', '.join(MODELS)}"
    measure = judged("gpu.same_text", what, sum(map(sum, equal.values())), "texts", at_least(num_texts))
    return [measure], {"equal": equal}


def _make_model(name: str, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    with torch.random.fork_rng(), quiet_loading(hf_logging):
        torch.manual_seed(1)
        config = AutoConfig.for_model(name, **(SIZES | fields))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def _generate(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
    )
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def _write(backend: PagedBackend, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    sequences, texts = [backend.new_sequence() for _ in prompts], [list[int]() for _ in prompts]
    feeds = [list(prompt) for prompt in prompts]
    for _ in range(NUM_NEW):
        rows = backend.forward(
            [ForwardItem(each, fed, 1) for each, fed in zip(sequences, feeds, strict=True)]
        )
        feeds = [[int(row.argmax())] for row in rows]
        for text, (token_id,) in zip(texts, feeds, strict=True):
            text.append(token_id)
    for sequence in sequences:
        backend.close(sequence)
    return texts
