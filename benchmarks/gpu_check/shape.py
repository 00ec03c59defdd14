"""A decoder of a given shape with random weights, made on the device, behind the backend that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.stage import Setting
from outrider.cloud_verifier.backends.attention.plan import ATTENTION_NAME, register_attention
from outrider.cloud_verifier.backends.base import KVSequence
from outrider.cloud_verifier.backends.decoder_config import (
    DecoderConfig,
    make_decoder_config,
    with_defaults,
)
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.cloud_verifier.backends.paged_backend import PagedBackend, PagedSequence
from outrider.cloud_verifier.backends.weights import Weights
from outrider.common.process.quiet_loading import quiet_loading


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a Qwen2 decoder; `num_tokens` of the `vocab_size` ids exist."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_tokens: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the (rows out, columns in) of each product of a layer, fused as a decoder may, and of the head."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv": (rows, self.hidden_size),
            "output": (self.hidden_size, self.num_heads * self.head_dim),
            "gate_up": (2 * self.ffn_size, self.hidden_size),
            "down": (self.hidden_size, self.ffn_size),
            "head": (self.vocab_size, self.hidden_size),
        }


SHAPE_7B = Shape(3584, 28, 28, 4, 128, 18_944, 152_064, 151_665)  # Qwen2.5-7B's
SHAPE_TOY = Shape(64, 28, 4, 2, 16, 96, 256, 250)  # as many layers: what is counted is a layer's


def make_model(setting: Setting, shape: Shape, dtype: torch.dtype) -> Any:
    """Returns the transformers model, with our attention."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils import logging as hf_logging

    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    register_attention()
    with quiet_loading(hf_logging), torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)


class ModelWeights(Weights):
    """Gives the weights of a transformers model that is in memory, as they are."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = model.state_dict()
        self.device, self.dtype = str(model.device), model.dtype

    @property
    def num_bytes(self) -> int:
        """Returns the size of all tensors."""
        return sum(each.numel() * each.element_size() for each in self._tensors.values())

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor."""
        tensor = self._tensors[name]
        assert tensor.shape == shape, f"{name} is {list(tensor.shape)}, the configuration says {list(shape)}"
        return tensor


def own_config(model: Any) -> DecoderConfig:
    """Returns what our own decoders need of a transformers model's configuration."""
    fields = with_defaults(model.config.to_dict())
    config = fields and make_decoder_config(fields)
    assert config, "not a configuration of our own decoders"
    return config


def make_facts(setting: Setting, shape: Shape, dtype: torch.dtype) -> TargetFacts:
    """Returns what `load_target` would know of such a model."""
    return TargetFacts(
        num_tokens=shape.num_tokens,
        vocab_size=shape.vocab_size,
        max_context=32_768,
        dtype=str(dtype).removeprefix("torch."),
        device=setting.device,
        model_id="shape",
        fingerprint="",
        files_fingerprint="",
        tokenizer_fingerprint="",
        eos_token_ids=(),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        windows=(None,) * shape.num_layers,
    )


def open_sequences(backend: PagedBackend, num_sequences: int, length: int) -> list[KVSequence]:
    """Returns sequences whose KV is taken and never computed: attention over it takes as long."""
    sequences: list[KVSequence] = []
    for _ in range(num_sequences):
        sequence = backend.new_sequence()
        assert isinstance(sequence, PagedSequence)
        backend.blocks.append(sequence.table, length)
        sequences.append(sequence)
    return sequences


def close_all(backend: PagedBackend, sequences: Sequence[KVSequence]) -> None:
    """Gives their KV back."""
    for sequence in sequences:
        backend.close(sequence)
