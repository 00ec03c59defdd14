"""Reads a decoder's tensors by the part that they play, in the layout that the graph computes with.

Each architecture of `architectures` stores them in its own way; here all become rows of outputs, `[outputs, inputs]`.
The graph rotates the two halves of a head against each other and wants heads of a multiple of 16. Where an architecture
rotates only a head's first dimensions, the rows of queries and keys change places, so that the pairs that it rotates
are those of the graph, and the others are rotated by nothing; where a head is too short, it is filled up with zeros.
Neither changes a product of a query and a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.export.hf_config import DecoderConfig
from outrider.edge_client.drafting.export.safetensors_dir import TensorDirectory

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """Holds a matrix `[outputs, inputs]`, its bias `[outputs]`, and the names of the tensors it is made of."""

    weights: Float32
    bias: Float32 | None
    tensors: tuple[str, ...]


class DecoderWeights:
    """Reads one part at a time. Every method raises `ModelError` for missing or misshapen tensors."""

    def __init__(self, config: DecoderConfig, tensors: TensorDirectory) -> None:
        self._config = config
        self._tensors = tensors
        self._query_places = _places(config, is_rotated=True)
        self._value_places = _places(config, is_rotated=False)

    def embedding(self, num_tokens: int) -> Linear:
        """Returns the first `num_tokens` rows of the embedding."""
        return self._table("embedding", num_tokens)

    def head(self, num_tokens: int) -> Linear:
        """Returns the first `num_tokens` rows of the output embedding where it is another one."""
        return self._table("head", num_tokens)

    def is_head_tied(self, num_tokens: int) -> bool:
        """Returns whether the output embedding is the embedding: config.json says so, and the files have no other."""
        if not self._config.is_tied or self._name("head", None) not in self._tensors:
            return self._config.is_tied
        return np.array_equal(self.head(num_tokens).weights, self.embedding(num_tokens).weights)

    def head_bias(self, num_tokens: int) -> Float32 | None:
        """Returns the bias of the output embedding, [num_tokens], where there is one."""
        bias = self._bias("head", None, self._config.vocab_size)
        return None if bias is None else bias[:num_tokens]

    def positions(self, count: int) -> Float32:
        """Returns the embedding of the first positions, [count, hidden_size]."""
        shape = (self._config.max_context, self._config.hidden_size)
        return self._tensors.read(self._name("positions", None), shape)[:count]

    def norm(self, part: str, layer: int | None, size: int | None = None) -> tuple[Float32, Float32 | None]:
        """Returns the weight and the bias of a norm."""
        name = self._name(part, layer)
        size = size or self._config.hidden_size
        weight = self._tensors.read(name, (size,))
        bias = self._bias(part, layer, size)
        return (weight + np.float32(offset) if (offset := self._config.shape.norm_offset) else weight), bias

    def attention(self, layer: int) -> Linear:
        """Returns queries, keys and values as one matrix, their rows one after the other, heads as the graph wants."""
        config = self._config
        sizes = [heads * config.head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
        if config.shape.layout == "apart":
            parts = [self._linear(part, layer, size) for part, size in zip("qkv", sizes, strict=True)]
        else:
            whole = self._linear("attention", layer, sum(sizes))
            parts = [Linear(*each, whole.tensors) for each in self._split_heads(whole, sizes)]
        places = (self._query_places, self._query_places, self._value_places)
        placed = [
            Linear(_place_rows(part.weights, rows), _place_bias(part.bias, rows), part.tensors)
            for part, rows in zip(parts, places, strict=True)
        ]
        return _stack(placed)

    def attention_out(self, layer: int) -> Linear:
        """Returns the projection of the attended values."""
        found = self._linear(
            "o", layer, self._config.hidden_size, self._config.num_heads * self._config.head_dim
        )
        columns = _place_rows(np.ascontiguousarray(found.weights.T), self._value_places)
        return Linear(np.ascontiguousarray(columns.T), found.bias, found.tensors)

    def mlp_in(self, layer: int) -> Linear:
        """Returns the MLP's first matrix: gate and up one after the other where it is gated."""
        size = self._config.intermediate_size
        if not self._config.shape.is_gated:
            return self._linear("up", layer, size)
        if "gate_up" in self._config.shape.names:
            return self._linear("gate_up", layer, 2 * size)
        return _stack([self._linear(part, layer, size) for part in ("gate", "up")])

    def mlp_out(self, layer: int) -> Linear:
        """Returns the MLP's last matrix."""
        return self._linear("down", layer, self._config.hidden_size, self._config.intermediate_size)

    def head_norm(self, part: str, layer: int) -> Float32:
        """Returns the weight of the norm of each query (`q_norm`) or key (`k_norm`), [head_dim]."""
        weight, _ = self.norm(part, layer, self._config.head_dim)
        return weight

    # ------------------------------------------------------------------ as they are stored

    def _linear(self, part: str, layer: int, num_outputs: int, num_inputs: int | None = None) -> Linear:
        name, num_inputs = self._name(part, layer), num_inputs or self._config.hidden_size
        if self._config.shape.is_transposed:
            weights = np.ascontiguousarray(self._tensors.read(name, (num_inputs, num_outputs)).T)
        else:
            weights = self._tensors.read(name, (num_outputs, num_inputs))
        return Linear(weights, self._bias(part, layer, num_outputs), (name,))

    def _split_heads(self, whole: Linear, sizes: Sequence[int]) -> list[tuple[Float32, Float32 | None]]:
        """Returns the queries', keys' and values' rows of one matrix for all, each with its bias."""
        ends = np.cumsum(sizes)[:-1]
        if self._config.shape.layout == "rows":
            rows = np.split(np.arange(sum(sizes)), ends)
        else:  # three times head_dim rows a head
            by_head = np.arange(sum(sizes)).reshape(self._config.num_heads, 3, self._config.head_dim)
            rows = [by_head[:, part].reshape(-1) for part in range(3)]
        return [(whole.weights[each], None if whole.bias is None else whole.bias[each]) for each in rows]

    def _table(self, part: str, num_tokens: int) -> Linear:
        name = self._name(part, None)
        shape = (self._config.vocab_size, self._config.hidden_size)
        return Linear(self._tensors.read(name, shape)[:num_tokens], None, (name,))

    def _bias(self, part: str, layer: int | None, size: int) -> Float32 | None:
        name = self._name(part, layer).removesuffix("weight") + "bias"
        return self._tensors.read(name, (size,)) if name in self._tensors else None

    def _name(self, part: str, layer: int | None) -> str:
        pattern = self._config.shape.names[part]
        name = f"{pattern if layer is None else pattern.format(layer)}.weight"
        without_prefix = name.partition(".")[2]  # as saved from the model without its head: GPT-2's own files
        return without_prefix if name not in self._tensors and without_prefix in self._tensors else name


def _places(config: DecoderConfig, *, is_rotated: bool) -> NDArray[np.int64]:
    """Returns for each dimension of a head in the graph which one of the model it is, −1 for zeros,
    [padded_head_dim]."""
    size, rotary = config.padded_head_dim, config.rotary_dim
    places = np.full(size, -1, np.int64)
    if not is_rotated or not rotary or rotary == size:
        places[: config.head_dim] = np.arange(config.head_dim)
        return places
    half = rotary // 2
    places[:half] = np.arange(half)
    places[size // 2 : size // 2 + half] = np.arange(half, rotary)
    free = np.flatnonzero(places < 0)[: config.head_dim - rotary]
    places[free] = np.arange(rotary, config.head_dim)
    return places


def _place_rows(rows: Float32, places: NDArray[np.int64]) -> Float32:
    """Returns `[heads · head_dim, …]` as `[heads · padded_head_dim, …]`, each head's rows at their places."""
    head_dim = int(places.max()) + 1
    if np.array_equal(places, np.arange(head_dim)):
        return rows
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    with_zeros = np.concatenate([heads, np.zeros_like(heads[:, :1])], axis=1)
    placed: Float32 = with_zeros[:, places].reshape(-1, *rows.shape[1:])  # −1 is the zeros
    return placed


def _place_bias(bias: Float32 | None, places: NDArray[np.int64]) -> Float32 | None:
    return None if bias is None else _place_rows(bias, places)


def _stack(parts: Sequence[Linear]) -> Linear:
    """Returns several matrices as one, outputs one after the other; a bias that one lacks is 0."""
    bias = None
    if any(part.bias is not None for part in parts):
        rows = [np.zeros(len(part.weights), np.float32) if part.bias is None else part.bias for part in parts]
        bias = np.concatenate(rows)
    names = dict.fromkeys(name for part in parts for name in part.tensors)
    return Linear(np.concatenate([part.weights for part in parts]), bias, tuple(names))
