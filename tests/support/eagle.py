"""Random EAGLE drafts in the layouts that people publish, and what such a draft computes, written plainly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

LAYOUTS = ("eagle", "specforge", "speculators")
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 32, 192
_LAYER = {"eagle": "layers.0", "specforge": "midlayer", "speculators": "layers.0"}


def make_eagle(
    directory: Path,
    layout: str,
    *,
    vocab: int = 512,
    target_size: int = 128,
    size: int = 128,
    draft_vocab: int = 300,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Writes a random draft of a tiny target; `fields` are further ones of config.json."""
    chance = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance) / math.sqrt(shape[-1])

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=chance)

    layer, width = _LAYER[layout], size if layout == "eagle" else 2 * size
    tensors = {
        f"{layer}.self_attn.q_proj.weight": 3 * random(HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.k_proj.weight": 3 * random(KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.o_proj.weight": random(size, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": random(INNER, size),
        f"{layer}.mlp.up_proj.weight": random(INNER, size),
        f"{layer}.mlp.down_proj.weight": random(size, INNER),
        f"{layer}.post_attention_layernorm.weight": norm(),
    }
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": vocab,
    }
    if layout == "eagle":
        tensors |= {"fc.weight": random(size, 2 * size), "fc.bias": random(size)}
        config |= {"architectures": ["LlamaForCausalLM"], "bias": True}
    else:
        ids = torch.randperm(vocab, generator=chance)[:draft_vocab].sort().values
        is_scored = torch.zeros(vocab, dtype=torch.bool)
        is_scored[ids] = True
        tensors |= {
            "fc.weight": random(size, 3 * target_size),
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.hidden_norm.weight": norm(),
            "norm.weight": norm(),
            "lm_head.weight": 4 * random(draft_vocab, size),
            "d2t": ids - torch.arange(draft_vocab),
            "t2d": is_scored,
        }
        if size != target_size:
            tensors["embed_tokens.weight"] = random(vocab, size)
            config["target_hidden_size"] = target_size
        config["draft_vocab_size"] = draft_vocab
    if layout == "specforge":
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    if layout == "speculators":
        outside = {
            name: config.pop(name) for name in ("draft_vocab_size", "target_hidden_size") if name in config
        }
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "norm_before_residual": False,
            "transformer_layer_config": config,
            **outside,
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return directory


class PlainEagle:
    """Computes a draft's rows by whole forwards over its inputs, without KV, from the files alone."""

    def __init__(self, directory: Path, embedding: Tensor, output: Tensor) -> None:
        """The target's embeddings serve where the directory has none."""
        self._tensors = load_file(directory / "model.safetensors")
        self._config = json.loads((directory / "config.json").read_text())
        self._prefix = "midlayer" if "midlayer.mlp.up_proj.weight" in self._tensors else "layers.0"
        self._is_third = "norm.weight" in self._tensors
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        self._output = output

    @torch.inference_mode()
    def row(self, text: Sequence[int], known: dict[int, Tensor], path: Sequence[int] = ()) -> Tensor:
        """Returns logits [vocab] after a text and a path; `known` are the target's features by position."""
        pairs = [(position, text[position + 1], known[position]) for position in sorted(known)]
        assert pairs[-1][0] == len(text) - 2, "the features of the last token but one are wanted"
        states = [
            feature if not self._is_third else self._tensors["fc.weight"] @ feature for *_, feature in pairs
        ]
        tokens = [token_id for _, token_id, _ in pairs]
        positions = [position for position, *_ in pairs]
        out = self._layer(tokens, states, positions)
        for token_id in path:
            tokens.append(token_id)
            states.append(out)
            positions.append(positions[-1] + 1)
            out = self._layer(tokens, states, positions)
        return self._score(out)

    def _layer(self, tokens: Sequence[int], states: Sequence[Tensor], positions: Sequence[int]) -> Tensor:
        """Returns the next state of the last of some inputs, in order."""
        embedded, state = self._embedding[torch.tensor(tokens)], torch.stack(list(states))
        if self._is_third:
            normed = self._norm("hidden_norm", state)
            x = torch.cat((self._norm("input_layernorm", embedded), normed), dim=-1)
            residual = normed[-1] if self._config.get("norm_before_residual") else state[-1]
        else:
            x = linear(
                torch.cat((embedded, state), dim=-1), self._tensors["fc.weight"], self._tensors["fc.bias"]
            )
            residual = x[-1]
        query, key, value = (
            linear(x, self._of(f"self_attn.{name}_proj")).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv"
        )
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        read = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            weights = (key[:, kv_head] @ query[-1, head] / math.sqrt(HEAD_DIM)).softmax(0)
            read.append(weights @ value[:, kv_head])
        residual = residual + self._of("self_attn.o_proj") @ torch.cat(read)
        inner = self._norm("post_attention_layernorm", residual)
        inner = silu(self._of("mlp.gate_proj") @ inner) * (self._of("mlp.up_proj") @ inner)
        out = residual + self._of("mlp.down_proj") @ inner
        return _normed(out, self._tensors["norm.weight"]) if self._config.get("norm_output") else out

    def _score(self, state: Tensor) -> Tensor:
        if not self._is_third:
            return self._output @ state
        if not self._config.get("norm_output"):
            state = _normed(state, self._tensors["norm.weight"])
        logits = self._tensors["lm_head.weight"] @ state
        every = torch.full((len(self._output),), -1e4)
        every[torch.arange(len(logits)) + self._tensors["d2t"]] = logits
        return every

    def _of(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}.{name}.weight"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _normed(x, self._of(name))

    @staticmethod
    def _rotate(x: Tensor, positions: Sequence[int]) -> Tensor:
        """Turns pairs (i, i + head_dim / 2) of [n, heads, head_dim] as complex numbers."""
        half = HEAD_DIM // 2
        rates = 5000.0 ** (-torch.arange(half) / half)
        turns = torch.exp(1j * torch.tensor(positions)[:, None] * rates)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
