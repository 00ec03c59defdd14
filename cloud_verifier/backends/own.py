"""Our own decoder: the models of `decoder_config`, from config.json and safetensors, without transformers.

A layer is four products, attention, and some kernels (`layer_kernels`): two of sums and norms, and two more in Gemma 2;
rotation of queries and keys, which writes keys and values into the pool; activation. Only rows whose logits are needed
go through the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from outrider.cloud_verifier.backends.attention.plan import ForwardPlan, attend
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.layer_kernels import LayerKernels
from outrider.cloud_verifier.backends.layers import (
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

Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [num_rows, head_dim / 2] of the rows' angles


class OwnDecoder(Decoder):
    """Runs rows through layers; how a forward is run is its subclasses' matter."""

    is_of_transformers = False

    def __init__(
        self, config: DecoderConfig, weights: Weights, kernels: LayerKernels, *, is_packed: bool
    ) -> None:
        """`is_packed` is `LayerReader`'s. Raises `ModelError` for a tensor that `weights` lacks or that has another
        shape."""
        reader = LayerReader(config, weights, is_packed=is_packed)
        self._kernels = kernels
        self._config = config
        self._frequencies = inverse_frequencies(config).to(weights.device)
        self._rules = attention_rules(config)
        self._layers = [reader.layer(index) for index in range(config.num_hidden_layers)]
        self._norm = reader.norm("model.norm", config.hidden_size)
        self._embedding, self._head = reader.head()
        self._scale = embedding_scale(config, weights.dtype)
        self._reader = reader

    @property
    def num_weight_bytes(self) -> int:
        return self._reader.num_weight_bytes

    def use_linear(self, linear: Linear) -> None:
        self._reader.use_linear(linear)

    def matrix_kinds(self) -> list[MatrixKind]:
        return list(self._reader.kinds.values())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = embedding(token_ids, self._embedding)
        return x if self._scale is None else x.mul_(self._scale)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self._head(features), self._config.final_logit_softcapping)

    def _run(
        self, layers: Sequence[int], x: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan
    ) -> torch.Tensor | None:
        """Runs states [num_rows, hidden_size] through some layers, in place; returns what is still to be added to them,
        None where there are no layers. Keeps the features of all layers but the last."""
        angles = positions[: plan.num_rows, None] * self._frequencies
        return self._run_layers(layers, x, (angles.cos(), angles.sin()), plan)

    def _run_layers(
        self, layers: Sequence[int], x: torch.Tensor, turns: Turns, plan: ForwardPlan
    ) -> torch.Tensor | None:
        """Does what `_run` does, given the turns of the rows' positions."""
        kernels, config, epsilon = self._kernels, self._config, self._config.rms_norm_eps
        normed, gated = torch.empty_like(x), x.new_empty((len(x), config.intermediate_size))
        added: torch.Tensor | None = None
        before = -1
        for index in layers:
            layer = self._layers[index]
            kernels.add_norm(x, added, layer.input_norm, epsilon, normed)
            if added is not None:
                keep(plan, before, x)
            added = layer.output(self._attention(layer, index, layer.qkv(normed), turns, plan))
            if layer.attention_norm is not None:
                kernels.add_norm(added, None, layer.attention_norm, epsilon, added)
            kernels.add_norm(x, added, layer.mlp_norm, epsilon, normed)
            kernels.gate(layer.gate_up(normed), config.activation, gated)
            added = layer.down(gated)
            if layer.down_norm is not None:
                kernels.add_norm(added, None, layer.down_norm, epsilon, added)
            before = index
        return added

    def _finish(self, x: torch.Tensor, added: torch.Tensor | None, plan: ForwardPlan) -> torch.Tensor:
        """Adds to the states after the last layer; returns these after the final norm."""
        normed = torch.empty_like(x)
        self._kernels.add_norm(x, added, self._norm, self._config.rms_norm_eps, normed)
        keep(plan, len(self._layers) - 1, x)
        keep(plan, len(self._layers), normed)
        return normed

    def _attention(
        self,
        layer: Layer,
        index: int,
        qkv: torch.Tensor,
        turns: Turns,
        plan: ForwardPlan,
    ) -> torch.Tensor:
        config, num_rows = self._config, len(qkv)
        heads = qkv.view(num_rows, -1, config.head_dim)
        pools = plan.key_pools[index], plan.value_pools[index]
        written = heads[: plan.num_rows]
        self._kernels.rotate(written, layer.head_norms, config.rms_norm_eps, *turns, plan.write, *pools)
        query = heads[:, : config.num_attention_heads].transpose(0, 1)
        return attend(plan, index, query, self._rules[index]).reshape(num_rows, -1)


def keep(plan: ForwardPlan, layer: int, states: torch.Tensor) -> None:
    """Keeps the states after a layer where the plan asks for them. They change later, so that a copy is kept."""
    if layer in plan.feature_layers:
        plan.features[layer] = states.clone()
