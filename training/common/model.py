"""The two architectures, how they are initialised, and how a shallow target grows into a deep one."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ModelConfig:
    """Describes a Llama- or Qwen3-style decoder with grouped-query attention."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    tied: bool
    vocab_size: int = 8192
    context: int = 4096
    family: str = "llama"
    """llama, or qwen3: with norms of queries and keys."""


TARGET = ModelConfig(384, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=64, ffn_size=1024, tied=False)
"""15.7 M parameters. The embeddings are apart: the input one costs no arithmetic, and arithmetic is what is
scarce.
"""

TARGET_30M = ModelConfig(
    512, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=1408, tied=True
)
"""26.7 M parameters, 53.5 MB in bfloat16, for a GPU. There bytes are scarce and not arithmetic (the pair is
at most 60 MB with a draft and two tokenizers), so the embeddings are tied.
"""

DRAFT = ModelConfig(192, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32, ffn_size=512, tied=True)
"""2.4 M parameters. Widths are multiples of 32, the INT4 block."""


def create_model(config: ModelConfig, num_layers: int | None = None) -> Any:
    """Creates a `LlamaForCausalLM` or `Qwen3ForCausalLM` in float32; the projections that write to the
    residual stream start at zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            config.family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=num_layers or config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context,
            tie_word_embeddings=config.tied,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            rms_norm_eps=1e-5,
            dtype="float32",
        )
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                param.zero_()
            elif param.ndim == 2:
                is_embedding = "embed_tokens" in name or "lm_head" in name
                param.normal_(std=0.02 if is_embedding else 0.6 * param.size(1) ** -0.5)
    return model


def grow(model: Any, num_layers: int) -> Any:
    """Deepen a model without changing what it computes: each layer is followed by copies that add nothing
    yet.

    A copy keeps its layer's weights but for the two projections that write to the residual stream, which
    are zero (LLaMA Pro, Wu et al. 2024, section 3.2). `num_layers` must be a multiple of the present
    number.
    """
    old = len(model.model.layers)
    if num_layers % old:
        raise ValueError(f"cannot grow {old} layers to {num_layers}: not a multiple")
    layers = []
    for layer in model.model.layers:
        layers.append(layer)
        for _ in range(num_layers // old - 1):
            twin = copy.deepcopy(layer)
            torch.nn.init.zeros_(twin.self_attn.o_proj.weight)
            torch.nn.init.zeros_(twin.mlp.down_proj.weight)
            layers.append(twin)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0]] * num_layers
    return model


def num_params(model: Any) -> int:
    """Returns the number of parameters, a tied embedding counted once."""
    return sum(param.numel() for param in model.parameters())


def save_model(model: Any, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and safetensors shards of at most 15 MB, loadable by `AutoModelForCausalLM`."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()
    copy.deepcopy(model).to(dtype).save_pretrained(str(directory), max_shard_size="15MB")
