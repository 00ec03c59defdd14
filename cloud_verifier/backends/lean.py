"""The same decoder with less between its matrix products: Llama, Qwen2 and Qwen3 in float32 on a CPU.

With a small target a third of a transformers forward is Python and tiny operations, and five rows take twice
the time of one (MKL packs the weights anew for every call). Here query, key and value are one product, so are
gate and up; weights are packed once for oneDNN; only rows whose logits are needed go through the head.
`backends.loading` compares it with the transformers forward at load and drops it if the two disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from outrider.cloud_verifier.backends.attention import ForwardPlan, attend
from outrider.cloud_verifier.backends.row_plan import MatrixKind

LEAN_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# One row is fastest over plain transposed weights, several over packed ones. Below this size we keep both.
MAX_DUPLICATED_BYTES = 512 * 2**20
PACK_ROWS = 8  # oneDNN's hint: of 1, 4, 8 and 16 the best over 1 to 64 rows


def can_be_lean(model: Any, device: str, dtype: str) -> bool:
    """Returns whether a model's architecture, device and dtype are those that `LeanDecoder` computes."""
    config = model.config
    return (
        config.model_type in LEAN_MODEL_TYPES
        and device == "cpu"
        and dtype == "float32"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and getattr(config, "hidden_act", None) in ("silu", "swish")
        and not getattr(config, "mlp_bias", False)
    )


class PackedLinear:
    """Computes x [rows, in] → x Wᵀ + b [rows, out] for weights that never change."""

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None], *, is_doubled: bool):
        weight = torch.cat(weights)  # [out, in]
        self._bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        self._transposed = weight.t().contiguous() if is_doubled else None  # [in, out]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._pointwise = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1 and self._transposed is not None:
            if self._bias is None:
                return torch.mm(x, self._transposed)
            return torch.addmm(self._bias, x, self._transposed)
        out: torch.Tensor = self._pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def exact_silu(x: torch.Tensor) -> torch.Tensor:
    """Returns x / (1 + e⁻ˣ) by operations whose vector and scalar code round alike."""
    return x / torch.exp(-x).add_(1.0)


class RootMeanSquareNorm:
    """Computes x / √(mean(x²) + ε) · weight over the last dimension, in four operations instead of seven."""

    def __init__(self, norm: Any) -> None:
        size = norm.weight.shape[0]
        self._weight = norm.weight.detach() * size**0.5
        self._epsilon = torch.tensor((size * float(norm.variance_epsilon)) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._epsilon)).mul_(self._weight)


@dataclass(slots=True)
class LeanLayer:
    """Holds one layer's packed weights."""

    input_norm: RootMeanSquareNorm
    qkv: PackedLinear
    query_norm: RootMeanSquareNorm | None
    key_norm: RootMeanSquareNorm | None
    output: PackedLinear
    scaling: float
    mlp_norm: RootMeanSquareNorm
    gate_up: PackedLinear
    down: PackedLinear


class LeanDecoder:
    """Implements the `Decoder` callable of `transformers_backend`. Copies the weights it is made from."""

    def __init__(self, model: Any) -> None:
        config, base = model.config, model.model
        self._activation: Callable[[torch.Tensor], torch.Tensor] = silu
        self._kinds: dict[tuple[int, int, bool], MatrixKind] = {}
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._embedding = base.embed_tokens.weight.detach()
        self._rotary = base.rotary_emb
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._is_doubled = num_bytes <= MAX_DUPLICATED_BYTES
        self._layers = [self._layer(layer) for layer in base.layers]
        self._norm = RootMeanSquareNorm(base.norm)
        self._head = self._linear(model.get_output_embeddings())

    def _linear(self, *modules: Any) -> PackedLinear:
        weights = [module.weight.detach() for module in modules]
        biases = [None if module.bias is None else module.bias.detach() for module in modules]
        num_outputs, num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        bias = None if biases[0] is None else torch.zeros(num_outputs)
        self._kinds[num_inputs, num_outputs, bias is None] = MatrixKind(
            num_inputs,
            num_outputs,
            lambda weight: PackedLinear([weight], [bias], is_doubled=self._is_doubled),
        )
        return PackedLinear(weights, biases, is_doubled=self._is_doubled)

    def use_exact_rows(self) -> None:
        """Exchanges the activation, which the library ends in scalar code that rounds otherwise."""
        self._activation = exact_silu

    def matrix_kinds(self) -> list[MatrixKind]:
        return list(self._kinds.values())

    def _layer(self, layer: Any) -> LeanLayer:
        attention, mlp = layer.self_attn, layer.mlp
        has_head_norms = hasattr(attention, "q_norm")
        return LeanLayer(
            input_norm=RootMeanSquareNorm(layer.input_layernorm),
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=RootMeanSquareNorm(attention.q_norm) if has_head_norms else None,
            key_norm=RootMeanSquareNorm(attention.k_norm) if has_head_norms else None,
            output=self._linear(attention.o_proj),
            scaling=float(attention.scaling),
            mlp_norm=RootMeanSquareNorm(layer.post_attention_layernorm),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
        )

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        """Returns float32 logits [rows, vocab_size]; token ids and positions are int64 [num_rows]."""
        x = self._embedding[token_ids]  # [num_rows, hidden_size]
        cos, sin = self._rotary(x, positions[None])
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)  # [num_rows, 1, head_dim]
        # rotate_half(x)·sin = roll(x)·signed sin: one copy less.
        half = sin.shape[-1] // 2
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for index, layer in enumerate(self._layers):
            x = x + self._attention(layer, index, layer.input_norm(x), cos, signed_sin, plan)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(self._activation(gate).mul_(up))
        if rows is not None:
            x = x[rows]
        return self._head(self._norm(x))

    def _attention(
        self,
        layer: LeanLayer,
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
        out = attend(plan, index, rotated[:num_heads], rotated[num_heads:], value, layer.scaling)
        return layer.output(out.reshape(num_rows, -1))
