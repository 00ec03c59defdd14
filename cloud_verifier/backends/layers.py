"""The layers of the models of `decoder_config`, read from safetensors: products, and the weights of norms.

Query, key and value are one product, so are gate and up. In float32 on a CPU, where five rows take twice the time of
one (MKL packs the weights anew for every call), weights are packed once for oneDNN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from outrider.cloud_verifier.backends.attention.plan import AttentionRule
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.products.packed import OwnKernel, PackedLinear
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.weights import Weights
from outrider.common.errors import ModelError

# Weights that the library packs are kept a second time for our own kernel, of models below this size.
MAX_DUPLICATED_BYTES = 512 * 2**20

Operation = Callable[[torch.Tensor], torch.Tensor]


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Returns cap · tanh(logits / cap), which may be in their memory; the logits where `cap` is None."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Returns the angle by which a position turns each pair of a head, float32 [head_dim / 2]."""
    rope = config.rope_parameters
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / float(rope["rope_theta"]) ** exponents
    if rope["rope_type"] == "default":
        return frequencies
    factor = float(rope["factor"])
    if rope["rope_type"] == "linear":
        return frequencies / factor
    # llama3: long wavelengths are scaled, short ones kept, those between interpolated.
    context = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    kept = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def attention_rules(config: DecoderConfig) -> list[AttentionRule]:
    """Returns the rule of each layer."""
    scalar = config.query_pre_attn_scalar
    scaling = None if scalar is None else scalar**-0.5
    return [AttentionRule(scaling, window, config.attn_logit_softcapping) for window in config.windows]


def embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float | None:
    """Returns by what embeddings are multiplied, rounded as it was in training; None: by nothing."""
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if config.is_gemma else None


class PlainLinear:
    """Computes the same by any function (the library's, at first), in any dtype on any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Linear = linear) -> None:
        """`weight` is [out, in]."""
        self._weight, self._bias = weight, bias
        self.multiply = multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self._weight, self._bias)


@dataclass(slots=True)
class Layer:
    """Holds one layer's products, and the weights of its norms."""

    input_norm: torch.Tensor
    qkv: Operation
    head_norms: torch.Tensor | None  # [2, head_dim]: of queries and of keys
    output: Operation
    attention_norm: torch.Tensor | None  # of what attention adds
    mlp_norm: torch.Tensor
    gate_up: Operation
    down: Operation
    down_norm: torch.Tensor | None  # of what the rest adds


class LayerReader:
    """Makes the products and norms of a model from its weights, each read once."""

    def __init__(self, config: DecoderConfig, weights: Weights, *, is_packed: bool) -> None:
        """With `is_packed` products are oneDNN's over packed weights."""
        self._is_packed = is_packed
        self.own_kernel = OwnKernel()
        self._config = config
        self._weights = weights
        self.kinds: dict[tuple[int, int, bool], MatrixKind] = {}  # of all matrices made so far
        self._products: list[Operation] = []
        self._multiply: Linear = linear

    @property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of all tensors; of what the library packs beside them nothing."""
        return self._weights.num_bytes

    def linear(self, *parts: tuple[str, int], num_inputs: int, has_bias: bool) -> Operation:
        """Returns one product of several layers (name, outputs) of the model that have the same input."""
        read = self._weights.read
        weight = torch.cat([read(f"{name}.weight", size, num_inputs) for name, size in parts])
        bias = torch.cat([read(f"{name}.bias", size) for name, size in parts]) if has_bias else None
        return self.product(weight, bias)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        """Returns the product with a weight [out, in]."""
        no_bias = None if bias is None else torch.zeros_like(bias)
        num_outputs, num_inputs = weight.shape
        kind = MatrixKind(num_inputs, num_outputs, lambda other: self._make(other, no_bias))
        self.kinds[num_inputs, num_outputs, bias is None] = kind
        self._products.append(self._make(weight, bias))
        return self._products[-1]

    def use_linear(self, multiply: Linear) -> None:
        """Exchanges the function of all products made so far, and of those of their kinds.

        Raises `ModelError` for weights that are packed for the library's.
        """
        self._multiply = multiply
        for product in self._products:
            if isinstance(product, PlainLinear):
                product.multiply = multiply
            elif multiply is not linear:
                raise ModelError("products in float32 on a CPU are the library's")

    def load_own_kernel(self) -> None:
        """Multiplies few rows by our kernel where weights are packed, where that is as good (`products.packed`)."""
        packed = [each for each in self._products if isinstance(each, PackedLinear)]
        if packed and self._weights.num_bytes <= MAX_DUPLICATED_BYTES:
            self.own_kernel.load(packed, self.kinds.values())

    @property
    def most_own_rows(self) -> int:
        """Returns for how many rows our kernel is used."""
        return self.own_kernel.most_rows

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Operation:
        if self._is_packed:
            return PackedLinear(weight, bias, self.own_kernel)
        return PlainLinear(weight, bias, self._multiply)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Returns the weight [size] by which this norm multiplies."""
        weight = self._weights.read(f"{name}.weight", size)
        return weight.float().add_(1.0) if self._config.is_gemma else weight

    def head(self) -> tuple[torch.Tensor, Operation]:
        """Returns the embedding [vocab_size, hidden_size] and the product of the head: of a head in the files that is
        another matrix also where config.json says that they are one, as transformers does."""
        table, name = (self._config.vocab_size, self._config.hidden_size), "lm_head.weight"
        embedding = self._weights.read("model.embed_tokens.weight", *table)
        is_tied = self._config.tie_word_embeddings
        if is_tied and name not in self._weights.names:
            return embedding, self.product(embedding)
        weight = self._weights.read(name, *table)
        return embedding, self.product(embedding if is_tied and torch.equal(weight, embedding) else weight)

    def layer(self, index: int) -> Layer:
        """Returns a layer of the model."""
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        query_size, key_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        heads = (("q_proj", query_size), ("k_proj", key_size), ("v_proj", key_size))
        after_attention, before_mlp = "post_attention_layernorm", "pre_feedforward_layernorm"
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            qkv=self.linear(
                *((f"{attention}.{name}", size) for name, size in heads),
                num_inputs=hidden,
                has_bias=config.attention_bias,
            ),
            head_norms=self._head_norms(attention),
            output=self.linear(
                (f"{attention}.o_proj", hidden), num_inputs=query_size, has_bias=config.has_output_bias
            ),
            attention_norm=self.norm(f"{prefix}.{after_attention}", hidden) if config.is_gemma else None,
            mlp_norm=self.norm(f"{prefix}.{before_mlp if config.is_gemma else after_attention}", hidden),
            gate_up=self.linear(
                (f"{mlp}.gate_proj", inner),
                (f"{mlp}.up_proj", inner),
                num_inputs=hidden,
                has_bias=config.mlp_bias,
            ),
            down=self.linear((f"{mlp}.down_proj", hidden), num_inputs=inner, has_bias=config.mlp_bias),
            down_norm=self.norm(f"{prefix}.post_feedforward_layernorm", hidden) if config.is_gemma else None,
        )

    def _head_norms(self, attention: str) -> torch.Tensor | None:
        config = self._config
        if not config.has_head_norms:
            return None
        return torch.stack(
            [self.norm(f"{attention}.{name}", config.head_dim) for name in ("q_norm", "k_norm")]
        )
