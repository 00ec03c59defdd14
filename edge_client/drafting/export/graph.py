"""The draft's ONNX graph, written node by node from `pieces`: which ones, the architecture says.

    input_ids [1, n] ── embedding ──▶ layers × (norm, qkv, attention, out, norm, gate·up, down)
                                        ──▶ norm, head ──▶ logits and kin [k, vocab]

Only k of the n tokens, those at the indices `rows` (int64 `[k]`), reach the last layer's MLP and the head. Each
layer's `past_key_i / past_value_i` and `present_key_i / present_value_i` are `[1, kv_heads, capacity, head_dim]`
and meant to be one buffer, bound as both. `seqlens_k` (int32 `[1]`) is one less than the slots that are valid
after this call; the n new tokens fill the last of them. `position_ids` (int64 `[1, n]`) are their positions and
`attention_bias` (float32 `[1, 1, n, total]`, total = `total_sequence_length`, int32 `[1]`, any number of slots
that includes the valid ones) is added to their attention scores, beside the causal mask over slots: 0 where a
token sees a slot, `spec.HIDDEN` where it does not. So the nodes of a tree can share the buffers, in any order in
which a node comes after its ancestors.
Layers with a sliding window also hide the slots that are too far back by a token's position: the slot of a committed
token is its position, and a tree is never as deep as a window is long.
`probs` is softmax(logits), `tempered_logits` logits / temperature (float32 `[1]`), `tempered_probs` its
softmax.
`model.norm.out` [1, k, hidden_size] is what the head reads; nothing is computed for it alone.
Operators of the domain `com.microsoft` are onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.edge_client.drafting.export.hf_config import FULL, SLIDING, DecoderConfig
from outrider.edge_client.drafting.export.pieces import GraphPieces
from outrider.edge_client.drafting.export.weights import DecoderWeights
from outrider.edge_client.drafting.export.writer import MICROSOFT, ValueInfo
from outrider.edge_client.drafting.spec import ATTENTION_BIAS, HIDDEN_STATES, POSITION_IDS, ROW_OUTPUTS, ROWS

EMBEDDING, HEAD = "embedding", "lm_head"  # names of tables


class GraphBuilder:
    """Collects nodes and constants; `build()` returns the `onnx.ModelProto`."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        num_tokens: int,
        context: int,
        precision: str,
        accuracy_level: int,
    ) -> None:
        """`num_tokens` <= vocab_size drops the embedding's padding rows, so ids past the tokenizer
        have no logit; `context` positions of rotary angles are written."""
        self._config = config
        self._weights = weights
        self._num_tokens = num_tokens
        self._context = context
        self._pieces = GraphPieces(precision, accuracy_level)
        self._constant, self._node = self._pieces.constant, self._pieces.node

    @property
    def fallbacks(self) -> dict[str, str]:
        """Returns the tensors that are kept in another precision than asked for, and in which."""
        return self._pieces.fallbacks

    def build(self, progress: Callable[[int, int, str], None]) -> Any:
        """Raises `ModelError` for missing or misshapen tensors; `ImportError` without `onnx`."""
        num_layers = self._config.num_layers
        progress(0, num_layers + 2, "embedding")
        hidden, residual = self._embed(), ""
        self._rotary_caches()
        self._window_bias()
        for layer in range(num_layers):
            progress(layer + 1, num_layers + 2, f"layer {layer}")
            hidden, residual = self._layer(layer, hidden, residual)
        progress(num_layers + 1, num_layers + 2, "head")
        self._head(hidden, residual)
        return self._pieces.model("draft", *self._interface())

    # ------------------------------------------------------------------ before the layers

    def _embed(self) -> str:
        config, weights = self._config, self._weights
        embedded = self._pieces.embed(EMBEDDING, weights.embedding(self._num_tokens), "input_ids")
        if config.shape.is_embedding_scaled:
            self._constant("embedding.factor", np.array([config.hidden_size**0.5], np.float32))
            self._node("Mul", [embedded, "embedding.factor"], ["embedded.scaled"])
            embedded = "embedded.scaled"
        if config.shape.has_positions:
            self._constant("positions.table", weights.positions(self._context))
            self._node("Gather", ["positions.table", POSITION_IDS], ["positions.embedded"])
            self._node("Add", [embedded, "positions.embedded"], ["embedded.placed"])
            embedded = "embedded.placed"
        return embedded

    def _rotary_caches(self) -> None:
        config = self._config
        if not config.rotary_dim:
            return
        for layer_type in dict.fromkeys(config.layer_types[: config.num_layers]):
            frequencies = np.zeros(config.padded_head_dim // 2)  # what is not rotated has angle 0
            frequencies[: config.rotary_dim // 2] = config.inverse_frequencies(layer_type)
            angles = np.arange(self._context)[:, None] * frequencies
            cos, sin = self._cache_names(layer_type)
            self._constant(cos, np.cos(angles).astype(np.float32))  # [context, padded_head_dim // 2]
            self._constant(sin, np.sin(angles).astype(np.float32))

    def _cache_names(self, layer_type: str) -> tuple[str, str]:
        suffix = "" if layer_type == FULL else f".{layer_type}"
        return f"cos_cache{suffix}", f"sin_cache{suffix}"

    def _has_window(self, layer_type: str) -> bool:
        return layer_type == SLIDING and self._config.window < self._context

    def _window_bias(self) -> None:
        if any(map(self._has_window, self._config.layer_types[: self._config.num_layers])):
            self._pieces.window_bias("window_bias", self._config.window)

    # ------------------------------------------------------------------ a layer

    def _layer(self, layer: int, hidden: str, residual: str) -> tuple[str, str]:
        """Returns the names of the MLP's output and of the residual it is to be added to."""
        names, prefix = self._config.shape.names, f"model.layers.{layer}"
        normed, residual = self._norm("input_norm", f"{prefix}.input_layernorm", hidden, residual, layer)
        attended = self._attention(layer, f"{prefix}.self_attn", normed)
        if layer == self._config.num_layers - 1:
            attended, residual = (self._pieces.rows(each, ROWS) for each in (attended, residual))
            normed = self._pieces.rows(normed, ROWS) if self._config.is_parallel else normed
        if self._config.is_parallel:
            return self._parallel_mlp(layer, prefix, normed, attended, residual)
        if "attention_out_norm" in names:
            attended, _ = self._norm("attention_out_norm", f"{prefix}.attention_norm", attended, "", layer)
        normed, residual = self._norm(
            "mlp_norm", f"{prefix}.post_attention_layernorm", attended, residual, layer
        )
        computed = self._mlp(layer, f"{prefix}.mlp", normed)
        if "mlp_out_norm" in names:
            computed, _ = self._norm("mlp_out_norm", f"{prefix}.mlp_norm", computed, "", layer)
        return computed, residual

    def _parallel_mlp(
        self, layer: int, prefix: str, normed: str, attended: str, residual: str
    ) -> tuple[str, str]:
        """The MLP of a layer whose attention reads the same states, by the same norm or one of its own."""
        if "mlp_norm" in self._config.shape.names:
            normed, _ = self._norm("mlp_norm", f"{prefix}.post_attention_layernorm", residual, "", layer)
        computed = self._mlp(layer, f"{prefix}.mlp", normed)
        self._node("Add", [computed, attended], [f"{prefix}.sum"])
        return f"{prefix}.sum", residual

    def _attention(self, layer: int, prefix: str, hidden: str) -> str:
        config, layer_type = self._config, self._config.layer_types[layer]
        qkv = [self._pieces.linear(f"{prefix}.q_proj_k_proj_v_proj", self._weights.attention(layer), hidden)]
        if "q_norm" in config.shape.names:  # before they are rotated, so that they go in apart
            qkv = self._normed_heads(layer, prefix, qkv[0])
        else:
            qkv += ["", ""]  # GroupQueryAttention takes them in one tensor
        attended, lengths = f"{prefix}.attended", ("seqlens_k", "total_sequence_length")
        rotary = (*self._cache_names(layer_type), POSITION_IDS) if config.rotary_dim else ("", "", "")
        bias = "window_bias" if self._has_window(layer_type) else ATTENTION_BIAS
        self._node(
            "GroupQueryAttention",
            [*qkv, f"past_key_{layer}", f"past_value_{layer}", *lengths, *rotary, bias],
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            do_rotary=int(config.rotary_dim > 0),
            rotary_interleaved=0,
            **self._attention_attributes(),
        )
        return self._pieces.linear(f"{prefix}.o_proj", self._weights.attention_out(layer), attended)

    def _attention_attributes(self) -> dict[str, float]:
        """Returns what is not onnxruntime's default."""
        config, attributes = self._config, {}
        if config.attention_scale != config.padded_head_dim**-0.5:
            attributes["scale"] = config.attention_scale
        if config.attention_softcap:
            attributes["softcap"] = config.attention_softcap
        return attributes

    def _normed_heads(self, layer: int, prefix: str, packed: str) -> list[str]:
        """Splits queries, keys and values and normalises each head of the first two."""
        config = self._config
        heads = (config.num_heads, config.num_kv_heads)
        qkv = self._pieces.split(
            packed, [count * config.padded_head_dim for count in (*heads, config.num_kv_heads)]
        )
        for index, (part, count) in enumerate(zip(("q_norm", "k_norm"), heads, strict=True)):
            weight = self._weights.head_norm(part, layer)
            qkv[index] = self._pieces.head_norm(
                f"{prefix}.{part}", weight, qkv[index], count, config.norm_eps
            )
        return qkv

    def _mlp(self, layer: int, prefix: str, hidden: str) -> str:
        config, weights = self._config, self._weights
        name = f"{prefix}.gate_proj_up_proj" if config.shape.is_gated else f"{prefix}.up_proj"
        found = self._pieces.linear(name, weights.mlp_in(layer), hidden)
        if config.shape.is_gated:
            gate, up = self._pieces.split(found, [config.intermediate_size] * 2)
            self._node(
                "Mul", [self._pieces.activation(config.activation, gate, prefix), up], [f"{prefix}.gated"]
            )
            found = f"{prefix}.gated"
        else:
            found = self._pieces.activation(config.activation, found, prefix)
        return self._pieces.linear(f"{prefix}.down_proj", weights.mlp_out(layer), found)

    def _norm(self, part: str, name: str, hidden: str, residual: str, layer: int | None) -> tuple[str, str]:
        return self._pieces.norm(
            name, *self._weights.norm(part, layer), hidden, residual, self._config.norm_eps
        )

    # ------------------------------------------------------------------ after the layers

    def _head(self, hidden: str, residual: str) -> None:
        config, weights = self._config, self._weights
        normed, _ = self._norm("norm", "model.norm", hidden, residual, None)
        is_tied = weights.is_head_tied(self._num_tokens)
        table = None if is_tied else weights.head(self._num_tokens)
        bias = None if is_tied else weights.head_bias(self._num_tokens)
        self._pieces.score("head_rows", normed, HEAD, table, EMBEDDING, bias)
        self._constant("logits_shape", np.array([-1, self._num_tokens], np.int64))
        rows = (
            self._pieces.softcap("head_rows", config.logit_softcap) if config.logit_softcap else "head_rows"
        )
        self._node("Reshape", [rows, "logits_shape"], ["logits"])
        # Softmax here takes a tenth of numpy's time; the rest of sampling is cheaper outside.
        self._node("Softmax", ["logits"], ["probs"], axis=-1)
        self._node("Div", ["logits", "temperature"], ["tempered_logits"])
        self._node("Softmax", ["tempered_logits"], ["tempered_probs"], axis=-1)

    def _interface(self) -> tuple[list[ValueInfo], list[ValueInfo]]:
        config = self._config
        kv_shape = (1, config.num_kv_heads, "capacity", config.padded_head_dim)
        kinds = [(kind, layer) for layer in range(config.num_layers) for kind in ("key", "value")]
        past = [ValueInfo(f"past_{kind}_{layer}", "float32", kv_shape) for kind, layer in kinds]
        present = [ValueInfo(f"present_{kind}_{layer}", "float32", kv_shape) for kind, layer in kinds]
        inputs = [
            ValueInfo("input_ids", "int64", (1, "n")),
            ValueInfo("seqlens_k", "int32", (1,)),
            ValueInfo("total_sequence_length", "int32", (1,)),
            ValueInfo("temperature", "float32", (1,)),
            ValueInfo(POSITION_IDS, "int64", (1, "n")),
            ValueInfo(ATTENTION_BIAS, "float32", (1, 1, "n", "total")),
            ValueInfo(ROWS, "int64", ("k",)),
        ]
        rows = [ValueInfo(name, "float32", ("k", self._num_tokens)) for name in ROW_OUTPUTS]
        hidden = ValueInfo(HIDDEN_STATES, "float32", (1, "k", config.hidden_size))
        return inputs + past, [*rows, *present, hidden]
