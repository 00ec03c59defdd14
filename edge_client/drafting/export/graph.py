"""The draft's ONNX graph, written node by node: INT4 matrices, grouped-query attention, RMS norms.

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
`probs` is softmax(logits), `tempered_logits` logits / temperature (float32 `[1]`), `tempered_probs` its
softmax.
Operators of the domain `com.microsoft` are onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.edge_client.drafting.export.hf_config import DecoderConfig
from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE, QuantizedMatrix, quantize
from outrider.edge_client.drafting.export.safetensors_dir import TensorDirectory
from outrider.edge_client.drafting.export.writer import MICROSOFT, OnnxWriter, ValueInfo
from outrider.edge_client.drafting.spec import ATTENTION_BIAS, POSITION_IDS, ROW_OUTPUTS, ROWS


class GraphBuilder:
    """Collects nodes and constants; `build()` returns the `onnx.ModelProto`."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: TensorDirectory,
        *,
        num_tokens: int,
        context: int,
        accuracy_level: int,
    ) -> None:
        """`num_tokens` <= vocab_size drops the embedding's padding rows, so ids past the tokenizer
        have no logit; `context` positions of rotary angles are written."""
        self._config = config
        self._tensors = tensors
        self._num_tokens = num_tokens
        self._context = context
        self._writer = OnnxWriter(accuracy_level)
        self._constant = self._writer.constant
        self._node = self._writer.node

    def build(self, progress: Callable[[int, int, str], None]) -> Any:
        """Raises `ModelError` for missing or misshapen tensors; `ImportError` without `onnx`."""
        num_layers = self._config.num_layers
        progress(0, num_layers + 2, "embedding")
        table = self._read_table("model.embed_tokens.weight")
        self._embed(table)
        self._rotary_caches()
        hidden, residual = "embedded", ""
        for layer in range(num_layers):
            progress(layer + 1, num_layers + 2, f"layer {layer}")
            hidden, residual = self._layer(layer, hidden, residual)
        progress(num_layers + 1, num_layers + 2, "head")
        self._head(hidden, residual, table)
        return self._writer.model("draft", *self._interface())

    # ------------------------------------------------------------------ the parts of the model

    def _embed(self, table: QuantizedMatrix) -> None:
        # The head's packed rows [rows, blocks, 16 bytes] are gathered as they are: one copy of a
        # tied table, whose blocks become [1, n, blocks, 32] and then [1, n, hidden].
        self._constant("embedding.packed", table.packed)
        self._constant("embedding.block_scales", table.scales[..., None])
        self._constant("hidden_shape", np.array([1, -1, self._config.hidden_size], np.int64))
        inputs = ["embedding.packed", "input_ids", "embedding.block_scales"]
        attributes = {"bits": 4, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 2}
        self._node("GatherBlockQuantized", inputs, ["embedded_blocks"], MICROSOFT, **attributes)
        self._node("Reshape", ["embedded_blocks", "hidden_shape"], ["embedded"])

    def _rotary_caches(self) -> None:
        angles = np.arange(self._context)[:, None] * self._config.inverse_frequencies()
        self._constant("cos_cache", np.cos(angles).astype(np.float32))  # [context, head_dim // 2]
        self._constant("sin_cache", np.sin(angles).astype(np.float32))

    def _layer(self, layer: int, hidden: str, residual: str) -> tuple[str, str]:
        """Returns the names of the MLP's output and of the residual it is to be added to."""
        prefix = f"model.layers.{layer}"
        normed, residual = self._norm(f"{prefix}.input_layernorm", hidden, residual)
        attended = self._attention(layer, f"{prefix}.self_attn", normed)
        if layer == self._config.num_layers - 1:
            attended, residual = (self._writer.rows(each, ROWS) for each in (attended, residual))
        normed, residual = self._norm(f"{prefix}.post_attention_layernorm", attended, residual)
        return self._mlp(f"{prefix}.mlp", normed), residual

    def _attention(self, layer: int, prefix: str, hidden: str) -> str:
        config = self._config
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        packed = self._linear(prefix, parts, config.hidden_size, hidden)
        qkv = [packed, "", ""]  # GroupQueryAttention takes them in one tensor …
        if config.architecture == "qwen3":  # … unless queries and keys are normalised first
            qkv = self._writer.split(packed, list(parts.values()))
            qkv[0] = self._head_norm(f"{prefix}.q_norm", qkv[0], config.num_heads)
            qkv[1] = self._head_norm(f"{prefix}.k_norm", qkv[1], config.num_kv_heads)
        attended, lengths = f"{prefix}.attended", ("seqlens_k", "total_sequence_length")
        rotary = ("cos_cache", "sin_cache", POSITION_IDS)
        self._node(
            "GroupQueryAttention",
            [*qkv, f"past_key_{layer}", f"past_value_{layer}", *lengths, *rotary, ATTENTION_BIAS],
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        return self._linear(prefix, {"o_proj": config.hidden_size}, query_size, attended)

    def _mlp(self, prefix: str, hidden: str) -> str:
        config = self._config
        size = config.intermediate_size
        both = self._linear(prefix, {"gate_proj": size, "up_proj": size}, config.hidden_size, hidden)
        gate, up = self._writer.split(both, [size, size])
        self._node("QuickGelu", [gate], [f"{prefix}.silu"], MICROSOFT, alpha=1.0)  # x·sigmoid(x) = SiLU
        self._node("Mul", [f"{prefix}.silu", up], [f"{prefix}.gated"])
        return self._linear(prefix, {"down_proj": config.hidden_size}, size, f"{prefix}.gated")

    def _head(self, hidden: str, residual: str, table: QuantizedMatrix) -> None:
        config = self._config
        normed, _ = self._norm("model.norm", hidden, residual)
        packed, name = "embedding.packed", "lm_head.weight"
        if not config.is_tied:
            table, packed = self._read_table(name), "lm_head.packed"
            self._constant(packed, table.packed)
        self._constant("lm_head.scales", table.scales)
        self._writer.matmul("head_rows", normed, packed, "lm_head.scales", table.shape)
        self._constant("logits_shape", np.array([-1, self._num_tokens], np.int64))
        self._node("Reshape", ["head_rows", "logits_shape"], ["logits"])
        # Softmax here takes a tenth of numpy's time; the rest of sampling is cheaper outside.
        self._node("Softmax", ["logits"], ["probs"], axis=-1)
        self._node("Div", ["logits", "temperature"], ["tempered_logits"])
        self._node("Softmax", ["tempered_logits"], ["tempered_probs"], axis=-1)

    # ------------------------------------------------------------------ their pieces

    def _read_table(self, name: str) -> QuantizedMatrix:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return quantize(self._tensors.read(name, shape)[: self._num_tokens], name)

    def _linear(self, prefix: str, parts: dict[str, int], num_inputs: int, hidden: str) -> str:
        """Adds the projections `parts` (name → outputs) as one matrix, outputs side by side."""
        weights = [self._tensors.read(f"{prefix}.{p}.weight", (n, num_inputs)) for p, n in parts.items()]
        name = f"{prefix}.{'_'.join(parts)}"
        matrix = quantize(np.concatenate(weights), name)
        self._constant(f"{name}.packed", matrix.packed)
        self._constant(f"{name}.scales", matrix.scales)
        bias = self._bias(prefix, parts, name)
        self._writer.matmul(f"{name}.out", hidden, f"{name}.packed", f"{name}.scales", matrix.shape, bias)
        return f"{name}.out"

    def _bias(self, prefix: str, parts: dict[str, int], name: str) -> str:
        present = [f"{prefix}.{part}.bias" in self._tensors for part in parts]
        if not any(present):
            return ""
        rows = [
            self._tensors.read(f"{prefix}.{part}.bias", (size,)) if has else np.zeros(size, np.float32)
            for (part, size), has in zip(parts.items(), present, strict=True)
        ]
        self._constant(f"{name}.bias", np.concatenate(rows))
        return f"{name}.bias"

    def _norm(self, name: str, hidden: str, residual: str) -> tuple[str, str]:
        """RMS norm of hidden + residual; returns the names of the norm and of the sum."""
        weight = self._tensors.read(f"{name}.weight", (self._config.hidden_size,))
        self._constant(f"{name}.weight", weight)
        epsilon = self._config.rms_norm_eps
        if not residual:
            inputs = [hidden, f"{name}.weight"]
            self._node("SimplifiedLayerNormalization", inputs, [f"{name}.out"], epsilon=epsilon, axis=-1)
            return f"{name}.out", hidden
        inputs, outputs = [hidden, residual, f"{name}.weight"], [f"{name}.out", "", "", f"{name}.sum"]
        self._node("SkipSimplifiedLayerNormalization", inputs, outputs, MICROSOFT, epsilon=epsilon)
        return f"{name}.out", f"{name}.sum"

    def _head_norm(self, name: str, hidden: str, num_heads: int) -> str:
        """Qwen3's norm of each head of a query or key, `[1, n, heads · head_dim]` in and out."""
        size = self._config.head_dim
        self._constant(f"{name}.weight", self._tensors.read(f"{name}.weight", (size,)))
        self._constant(f"{name}.heads", np.array([1, -1, num_heads, size], np.int64))
        self._constant(f"{name}.flat", np.array([1, -1, num_heads * size], np.int64))
        self._node("Reshape", [hidden, f"{name}.heads"], [f"{name}.in"])
        inputs, epsilon = [f"{name}.in", f"{name}.weight"], self._config.rms_norm_eps
        self._node("SimplifiedLayerNormalization", inputs, [f"{name}.normed"], epsilon=epsilon, axis=-1)
        self._node("Reshape", [f"{name}.normed", f"{name}.flat"], [f"{name}.out"])
        return f"{name}.out"

    def _interface(self) -> tuple[list[ValueInfo], list[ValueInfo]]:
        config = self._config
        kv_shape = (1, config.num_kv_heads, "capacity", config.head_dim)
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
        return inputs + past, rows + present
