"""The decoder for CUDA: the models of `decoder_config` in ten launches a layer, as `lean` is for a CPU.

Four are products, as query, key and value are one, gate and up another; two are attention's. The rest are kernels
(`outrider.kernels.layers`): two of sums and norms, and two more in Gemma 2; rotation of queries and keys, which writes
keys and values into the pool; activation. A product that the library splits takes one launch more. On a CPU the same is
computed by `outrider.kernels.plain_layers`, slowly.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch.nn.functional import embedding

from outrider.cloud_verifier.backends.attention.plan import ForwardPlan, attend
from outrider.cloud_verifier.backends.cuda.graphs import Capture, StepGraphs
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.lean import (
    Layer,
    LayerReader,
    attention_rules,
    capped,
    embedding_scale,
    inverse_frequencies,
)
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.weights import Weights
from outrider.kernels import plain_layers
from outrider.kernels.kv_pool import KVPool

logger = logging.getLogger(__name__)


class LayerKernels(Protocol):
    """Declares the kernels of a layer, so that both modules with them are checked against it;
    `outrider.kernels.plain_layers` says what they compute."""

    def add_norm(
        self,
        states: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
    ) -> None:
        """Adds, and normalises."""

    def rotate(
        self,
        qkv: torch.Tensor,
        norms: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        key_pool: KVPool,
        value_pool: KVPool,
    ) -> None:
        """Rotates queries and keys, and writes keys and values to their slots."""

    def gate(self, gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
        """Applies the activation to gates, and multiplies."""


class CudaDecoder(Decoder):
    """Implements `Decoder` for the models of `decoder_config`, in any dtype."""

    is_of_transformers = False
    writes_padding = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        kernels: LayerKernels | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`kernels` are Triton's on CUDA and torch's on a CPU where they are None; with `capture` steps become graphs.
        Raises `ModelError` for a tensor that `weights` lacks or that has another shape."""
        reader = LayerReader(config, weights, lambda weight, _: weight, is_packed=False)
        self._kernels = kernels or kernels_for(weights.device)
        self._config = config
        self._frequencies = inverse_frequencies(config).to(weights.device)
        self._rules = attention_rules(config)
        self._layers = [reader.layer(index) for index in range(config.num_hidden_layers)]
        self._head_norms = [_stacked(layer) for layer in self._layers]
        self._norm = reader.norm("model.norm", config.hidden_size)
        self._embedding, self._head = reader.head()
        self._scale = embedding_scale(config, weights.dtype)
        self._reader = reader
        self._graphs = None if capture is None else StepGraphs(self.run_layers, capture)

    @property
    def num_weight_bytes(self) -> int:
        return self._reader.num_weight_bytes

    @property
    def num_graphs(self) -> int:
        """Returns the number of sizes of steps that are replayed as CUDA graphs."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def use_exact_rows(self) -> None:
        """Changes nothing: no kernel of ours looks at other rows."""

    def use_linear(self, linear: Linear) -> None:
        """Drops what was captured, too."""
        self._reader.use_linear(linear)
        if self._graphs is not None:
            self._graphs.forget()

    def matrix_kinds(self) -> list[MatrixKind]:
        return list(self._reader.kinds.values())

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        states = (self._graphs or self.run_layers)(token_ids, positions, plan)
        return self.score(states if rows is None else states[rows])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = embedding(token_ids, self._embedding)
        return x if self._scale is None else x.mul_(self._scale)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self._head(features), self._config.final_logit_softcapping)

    def run_layers(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan) -> torch.Tensor:
        """Returns the states after the last norm [num_rows, hidden_size], and writes the rows' keys and values."""
        kernels, config, epsilon = self._kernels, self._config, self._config.rms_norm_eps
        x = self.embed(token_ids)
        angles = positions[:, None] * self._frequencies
        turns = angles.cos(), angles.sin()
        normed, gated = torch.empty_like(x), x.new_empty((len(x), config.intermediate_size))
        added: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            kernels.add_norm(x, added, layer.input_norm, epsilon, normed)
            _keep(plan, index - 1, x)  # now with what the layer before has added
            added = layer.output(self._attention(index, layer.qkv(normed), turns, plan))
            if layer.attention_norm is not None:
                kernels.add_norm(added, None, layer.attention_norm, epsilon, added)
            kernels.add_norm(x, added, layer.mlp_norm, epsilon, normed)
            kernels.gate(layer.gate_up(normed), config.activation, gated)
            added = layer.down(gated)
            if layer.down_norm is not None:
                kernels.add_norm(added, None, layer.down_norm, epsilon, added)
        kernels.add_norm(x, added, self._norm, epsilon, normed)
        _keep(plan, len(self._layers) - 1, x)
        _keep(plan, len(self._layers), normed)
        return normed

    def _attention(
        self, index: int, qkv: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], plan: ForwardPlan
    ) -> torch.Tensor:
        config, num_rows = self._config, len(qkv)
        heads = qkv.view(num_rows, -1, config.head_dim)
        key_pool, value_pool = plan.key_pools[index], plan.value_pools[index]
        assert isinstance(plan.write, torch.Tensor), "slots are a tensor where padding is written too"
        norms, epsilon = self._head_norms[index], config.rms_norm_eps
        self._kernels.rotate(heads, norms, epsilon, *turns, plan.write, key_pool, value_pool)
        query = heads[:, : config.num_attention_heads].transpose(0, 1)
        return attend(plan, index, query, self._rules[index]).reshape(num_rows, -1)


def _keep(plan: ForwardPlan, layer: int, states: torch.Tensor) -> None:
    if layer in plan.feature_layers:
        plan.features[layer] = states.clone()


def _stacked(layer: Layer[torch.Tensor]) -> torch.Tensor | None:
    """Returns the norms of queries and keys [2, head_dim]."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return torch.stack((layer.query_norm, layer.key_norm))


def kernels_for(device: str) -> LayerKernels:
    """Returns Triton's kernels where one of them runs on `device`, else torch's own, with a warning."""
    if device == "cpu":
        return plain_layers
    try:
        from outrider.kernels import layers

        row = torch.ones((1, 16), device=device)
        layers.add_norm(row, None, row[0], 1e-5, torch.empty_like(row))
    except Exception as error:  # no Triton, no compiler for it, a GPU that it does not support
        logger.warning(
            "a layer's kernels are torch's own, which takes longer: Triton's do not run here (%s)", error
        )
        return plain_layers
    return layers
