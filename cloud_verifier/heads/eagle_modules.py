"""EAGLE's draft: one decoder layer on the target's features, as it is trained and as it is served.

    EAGLE, EAGLE-2   Li et al. 2024, arXiv 2401.15077 and 2406.16858
    EAGLE-3          Li et al. 2025, arXiv 2503.01840

Notation: f[t] is the target's feature of token t, and x[t + 1] the token after it. The layer reads them as a pair, at
position t, and its output is scored for token t + 2. Further on in a draft there is no feature: the layer's own output
for the pair before takes its place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.layers import inverse_frequencies

# Returns what queries [*, heads, n, head_dim] read; the second argument is their own keys and values
# [2, *, kv_heads, n, head_dim].
Attend = Callable[[Tensor, Tensor], Tensor]


class EagleLayer(nn.Module):
    """Computes a Llama layer without its first norm: attention over inputs of any width, and the MLP."""

    def __init__(self, config: DecoderConfig, num_inputs: int) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self._sizes = config.num_attention_heads, config.num_key_value_heads, head_dim
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        has_bias = config.attention_bias
        self.q_proj = nn.Linear(num_inputs, queries, bias=has_bias)
        self.k_proj = nn.Linear(num_inputs, keys, bias=has_bias)
        self.v_proj = nn.Linear(num_inputs, keys, bias=has_bias)
        self.o_proj = nn.Linear(queries, size, bias=config.has_output_bias)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.has_head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.has_head_norms else nn.Identity()
        self.gate_proj = nn.Linear(size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=config.mlp_bias)
        self.mlp_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self._frequencies = inverse_frequencies(config)  # float32 always, so no buffer

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Maps inputs [*, n, num_inputs] and the states that the attention is added to [*, n, size] to the next
        states; `positions` is int64 [*, n]."""
        num_heads, num_kv_heads, head_dim = self._sizes
        query = self.q_norm(_split(self.q_proj(x), num_heads, head_dim))
        key = self.k_norm(_split(self.k_proj(x), num_kv_heads, head_dim))
        value = _split(self.v_proj(x), num_kv_heads, head_dim)
        self._frequencies = self._frequencies.to(positions.device)
        angles = (positions[..., None].float() * self._frequencies).unsqueeze(-3)
        cos, sin = angles.cos().to(key.dtype), angles.sin().to(key.dtype)  # [*, 1, n, head_dim / 2]
        own = torch.stack((_rotate(key, cos, sin), value))
        read = attend(_rotate(query, cos, sin), own)
        state: Tensor = residual + self.o_proj(read.transpose(-3, -2).flatten(-2))
        inner = self.mlp_norm(state)
        moved: Tensor = self.down_proj(silu(self.gate_proj(inner)) * self.up_proj(inner))
        return state + moved


def attention(query: Tensor, keys_and_values: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what queries [*, heads, n, head_dim] read of m keys and values [2, *, kv_heads, m, head_dim]; `bias`
    [n, m] is added to the scores."""
    keys, values = keys_and_values
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=True)


def attention_side_by_side(query: Tensor, keys_and_values: Tensor, bias: Tensor) -> Tensor:
    """Returns `attention` of sequences [sequences, heads, n, head_dim] of which each has a bias [sequences, n, m].

    It is plain products: a library may plan a fused kernel anew for each shape, and here m grows with every token.
    """
    keys, values = keys_and_values
    num, num_heads, n, head_dim = query.shape
    grouped = query.reshape(
        num, keys.shape[1], -1, head_dim
    )  # the heads that read the same keys, one after the other
    scores = (grouped @ keys.transpose(-2, -1) * head_dim**-0.5).view(num, num_heads, n, -1) + bias[:, None]
    shares = scores.float().softmax(-1).to(values.dtype)
    read: Tensor = shares.view(num, keys.shape[1], -1, keys.shape[2]) @ values
    return read.view(num, num_heads, n, head_dim)


class EagleDraft(nn.Module):
    """Is what both kinds share: `fuse` makes states of features, the layer makes the next of them and the token's
    embedding, `scored` is what the output embedding scores."""

    layer: EagleLayer

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = None  # its own, where it does not share the target's
        self.output: nn.Module | None = None  # likewise

    @property
    def device(self) -> torch.device:
        """Returns where the weights are."""
        return self.layer.q_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Returns what the weights are kept as."""
        return self.layer.q_proj.weight.dtype

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Maps the target's features [*, num_features] to states [*, size]."""

    @abstractmethod
    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Maps embeddings and states [*, n, size] of pairs at `positions` [*, n] to the next states."""

    @abstractmethod
    def scored(self, states: Tensor) -> Tensor:
        """Maps next states to what the output embedding scores, both [*, size]."""


class Eagle(EagleDraft):
    """EAGLE and EAGLE-2, whose feature is the target's last state after its final norm, and so are the states."""

    def __init__(self, config: DecoderConfig, *, has_bias: bool) -> None:
        """`has_bias`: of the fusion, as trained by EAGLE's authors for some targets."""
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layer = EagleLayer(config, config.hidden_size)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns the features."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `EagleDraft.forward`."""
        x = self.fc(torch.cat((embedded, states), dim=-1))
        out: Tensor = self.layer(x, x, positions, attend)
        return out

    def scored(self, states: Tensor) -> Tensor:
        """Returns the states."""
        return states


class Eagle3(EagleDraft):
    """EAGLE-3, which fuses the states of three of the target's layers and scores by its own output embedding."""

    def __init__(
        self,
        config: DecoderConfig,
        num_features: int,
        *,
        has_feature_norm: bool = False,
        is_norm_before_residual: bool = False,
        is_output_normed: bool = False,
    ) -> None:
        """Options of `speculators`. `has_feature_norm`: features are normalised before they are fused;
        `is_norm_before_residual`: the attention is added to the state's norm instead of the state; `is_output_normed`:
        the next states are normalised, so that later tokens of a draft read them so (EAGLE-3.1)."""
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.feature_norm = nn.RMSNorm(num_features, epsilon) if has_feature_norm else nn.Identity()
        self.fc = nn.Linear(num_features, size, bias=False)
        self.token_norm = nn.RMSNorm(size, epsilon)
        self.state_norm = nn.RMSNorm(size, epsilon)
        self.layer = EagleLayer(config, 2 * size)
        self.norm = nn.RMSNorm(size, epsilon)
        self._is_norm_before_residual = is_norm_before_residual
        self._is_output_normed = is_output_normed

    def fuse(self, features: Tensor) -> Tensor:
        """See `EagleDraft.fuse`."""
        fused: Tensor = self.fc(self.feature_norm(features))
        return fused

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `EagleDraft.forward`."""
        normed = self.state_norm(states)
        x = torch.cat((self.token_norm(embedded), normed), dim=-1)
        residual = normed if self._is_norm_before_residual else states
        out: Tensor = self.layer(x, residual, positions, attend)
        return self.norm(out) if self._is_output_normed else out

    def scored(self, states: Tensor) -> Tensor:
        """See `EagleDraft.scored`."""
        return states if self._is_output_normed else self.norm(states)


def _split(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Returns [*, num_heads, n, head_dim] of [*, n, num_heads · head_dim]."""
    return x.view(*x.shape[:-1], num_heads, head_dim).transpose(-3, -2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
