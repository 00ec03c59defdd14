"""Our own decoder: the models of `decoder_config`, from config.json and safetensors, without transformers.

With a small target a third of a transformers forward is Python and tiny operations. Here query, key and value
are one product, so are gate and up, and only rows whose logits are needed go through the head. In float32 on a
CPU, where five rows take twice the time of one (MKL packs the weights anew for every call), weights are packed
once for oneDNN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.nn.functional import gelu, linear, silu

from outrider.cloud_verifier.backends.attention.plan import (
    AttentionRule,
    Entry,
    ForwardPlan,
    PackedRows,
    attend,
    write,
)
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.products.packed import OwnKernel, PackedLinear
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.weights import Weights
from outrider.common.errors import ModelError

# Weights that the library packs are kept a second time for our own kernel, of models below this size.
MAX_DUPLICATED_BYTES = 512 * 2**20

Operation = Callable[[torch.Tensor], torch.Tensor]
Norm = TypeVar("Norm")  # what a decoder makes of a norm's weight


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute with the calling thread alone. Otherwise it wakes others for small operations too (exponentials
    of more than 2,048 numbers) and waits for them: on cores that are in use, for longer than the operation takes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def exact_silu(x: torch.Tensor) -> torch.Tensor:
    """Returns x / (1 + e⁻ˣ) by operations whose vector and scalar code round alike."""
    return x / torch.exp(-x).add_(1.0)


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns GELU by tanh, which is x / (1 + e⁻²ᵘ) where u is √(2/π) (x + 0.044715 x³), in the same way."""
    twice = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(2 * math.sqrt(2 / math.pi))
    return x / twice.neg_().exp_().add_(1.0)


# As the library has them, and so that a number's place in a tensor does not matter.
ACTIVATIONS: dict[str, tuple[Operation, Operation]] = {
    "silu": (silu, exact_silu),
    "gelu_tanh": (partial(gelu, approximate="tanh"), exact_gelu),
}


class RootMeanSquareNorm:
    """Computes x / √(mean(x²) + ε) · weight over the last dimension, in four operations instead of seven."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        size = weight.shape[0]
        self._weight = weight * size**0.5
        self._epsilon = torch.tensor((size * epsilon) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._epsilon)).mul_(self._weight)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Returns cap · tanh(logits / cap), which may be in their memory; the logits where `cap` is None."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class PlainLinear:
    """Computes the same by any function (the library's, at first), in any dtype on any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Linear = linear) -> None:
        """`weight` is [out, in]."""
        self._weight, self._bias = weight, bias
        self.multiply = multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self._weight, self._bias)


class PlainNorm:
    """Computes the same in any dtype on any device: in float32, and rounded where transformers rounds it."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight, self._epsilon = weight, epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._epsilon)
        return (self._weight * wide.to(self._weight.dtype)).to(x.dtype)


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


@dataclass(slots=True)
class Layer(Generic[Norm]):
    """Holds one layer's products and norms."""

    input_norm: Norm
    qkv: Operation
    query_norm: Norm | None
    key_norm: Norm | None
    output: Operation
    attention_norm: Norm | None  # of what attention adds
    mlp_norm: Norm
    gate_up: Operation
    down: Operation
    down_norm: Norm | None  # of what the rest adds


class LayerReader(Generic[Norm]):
    """Makes the operations of a model from its weights, each read once."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        make_norm: Callable[[torch.Tensor, float], Norm],
        *,
        is_packed: bool,
    ) -> None:
        """`make_norm` is given a norm's weight and epsilon; with `is_packed` products are oneDNN's."""
        self._make_norm = make_norm
        self._is_packed = is_packed
        self._own_kernel = OwnKernel()
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
            self._own_kernel.load(packed, self.kinds.values())

    @property
    def most_own_rows(self) -> int:
        """Returns for how many rows our kernel is used."""
        return self._own_kernel.most_rows

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Operation:
        if self._is_packed:
            return PackedLinear(weight, bias, self._own_kernel)
        return PlainLinear(weight, bias, self._multiply)

    def norm(self, name: str, size: int) -> Norm:
        """Returns the norm of this name."""
        weight = self._weights.read(f"{name}.weight", size)
        if self._config.is_gemma:
            weight = weight.float().add_(1.0)
        return self._make_norm(weight, self._config.rms_norm_eps)

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

    def layer(self, index: int) -> Layer[Norm]:
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
            query_norm=self.norm(f"{attention}.q_norm", head_dim) if config.has_head_norms else None,
            key_norm=self.norm(f"{attention}.k_norm", head_dim) if config.has_head_norms else None,
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


class LeanDecoder(Decoder):
    """Implements `Decoder` for the models of `decoder_config`, in any dtype on any device."""

    is_of_transformers = False
    writes_padding = False

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        """Raises `ModelError` for a tensor that `weights` lacks or that has another shape."""
        is_on_cpu = weights.device == "cpu" and weights.dtype == torch.float32
        is_packed = is_on_cpu and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        make_norm: Callable[[torch.Tensor, float], Operation] = RootMeanSquareNorm if is_packed else PlainNorm
        reader = LayerReader(config, weights, make_norm, is_packed=is_packed)
        self._activation, self._exact_activation = ACTIVATIONS[config.activation]
        self._is_float32 = weights.dtype == torch.float32
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._frequencies = inverse_frequencies(config).to(weights.device)
        self._rules = attention_rules(config)
        self._layers = [reader.layer(index) for index in range(config.num_hidden_layers)]
        self._norm = reader.norm("model.norm", config.hidden_size)
        self._embedding, self._head = reader.head()
        self._scale = embedding_scale(config, weights.dtype)
        self._softcap = config.final_logit_softcapping
        self._reader = reader
        reader.load_own_kernel()

    @property
    def num_weight_bytes(self) -> int:
        return self._reader.num_weight_bytes

    @property
    def most_own_rows(self) -> int:
        return self._reader.most_own_rows

    def use_exact_rows(self) -> None:
        """Exchanges the activation, which the library ends in scalar code that rounds otherwise in float32."""
        if self._is_float32:
            self._activation = self._exact_activation

    def use_linear(self, linear: Linear) -> None:
        self._reader.use_linear(linear)

    def matrix_kinds(self) -> list[MatrixKind]:
        return list(self._reader.kinds.values())

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        """Returns logits [rows, vocab_size]; token ids and positions are int64 [num_rows]."""
        with self._threads(token_ids.shape[0]):
            first, x = 0, None
            if plan.entry is not None:
                first, x = plan.entry.num_layers, self._enter(plan.entry, plan, token_ids.shape[0])
            layers = range(first, len(self._layers))
            x = self._run(layers, self.embed(token_ids) if x is None else x, positions, plan)
            if len(self._layers) in plan.feature_layers:
                plan.features[len(self._layers)] = self._norm(x)
            if rows is not None:
                x = x[rows]
            return self.score(self._norm(x))

    def run_some(
        self, rows: PackedRows, layers: Sequence[int], num_first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SkipsLayers.run_some`."""
        with self._threads(rows.token_ids.shape[0]):
            states = self._run(layers[:num_first], self.embed(rows.token_ids), rows.positions, rows.plan)
            x = self._run(layers[num_first:], states, rows.positions, rows.plan)
            return states, self.score(self._norm(x))

    def _threads(self, num_rows: int) -> AbstractContextManager[None]:
        """Returns within what so many rows are computed: by one thread where our kernel multiplies them."""
        return one_thread() if num_rows <= self.most_own_rows else contextlib.nullcontext()

    def _enter(self, entry: Entry, plan: ForwardPlan, num_rows: int) -> torch.Tensor:
        """Returns the states [num_rows, hidden_size] of all rows after the entry's layers; zeros where they pad. Of the
        features of these layers only those of the rows that were run are there."""
        below, size = entry.below, entry.states.shape[1]
        layers = {entry.num_layers - 1, *(each for each in plan.feature_layers if each < entry.num_layers)}
        low = {layer: entry.states.new_zeros((num_rows, size)) for layer in layers}
        every = low[entry.num_layers - 1]
        every[entry.known] = entry.states
        if below is not None:
            x = self._run(range(entry.num_layers), self.embed(below.token_ids), below.positions, below.plan)
            for layer, each in {**below.plan.features, entry.num_layers - 1: x}.items():
                low[layer][entry.others] = each[: below.plan.num_rows]
        plan.features.update(low)
        return every

    def _run(
        self, layers: Sequence[int], x: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan
    ) -> torch.Tensor:
        """Returns the states [num_rows, hidden_size] of rows after some layers, and keeps the features of these."""
        cos, signed_sin = self._rotations(positions, x.dtype)
        for index in layers:
            layer = self._layers[index]
            attended = self._attention(layer, index, layer.input_norm(x), cos, signed_sin, plan)
            x = x + (attended if layer.attention_norm is None else layer.attention_norm(attended))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            added = layer.down(self._activation(gate).mul_(up))
            x = x + (added if layer.down_norm is None else layer.down_norm(added))
            if index in plan.feature_layers:
                plan.features[index] = x
        return x

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self._embedding[token_ids]
        return x if self._scale is None else x.mul_(self._scale)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self._head(features), self._softcap)

    def _rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines [num_rows, 1, head_dim], the first half of the sines negated: a head is then
        rotated as x·cos + roll(x)·sin, with one copy less than by rotate_half."""
        angles = (positions[:, None].float() * self._frequencies).unsqueeze(1)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _attention(
        self,
        layer: Layer[Operation],
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        plan: ForwardPlan,
    ) -> torch.Tensor:
        num_rows, num_heads, num_kv_heads = x.shape[0], self._num_heads, self._num_kv_heads
        num_rotated = num_heads + num_kv_heads
        qkv = layer.qkv(x).view(num_rows, num_rotated + num_kv_heads, -1)
        rotated = qkv[:, :num_rotated]  # queries, then keys
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
            rotated = torch.cat((layer.query_norm(queries), layer.key_norm(keys)), dim=1)
        half = rotated.shape[-1] // 2
        rotated = torch.addcmul(rotated * cos, rotated.roll(half, -1), signed_sin).transpose(0, 1)
        value = qkv[:, num_rotated:].transpose(0, 1)
        write(plan, index, rotated[num_heads:], value)
        out = attend(plan, index, rotated[:num_heads], self._rules[index])
        return layer.output(out.reshape(num_rows, -1))
