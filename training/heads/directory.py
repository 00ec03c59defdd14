"""The directory of trained heads: config.json and model.safetensors, float16.

config.json has the fields that Medusa's project publishes, and ours under one key:

    {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "target",
     "outrider": {"format_version": 1, "kind": "medusa" | "hydra", "hidden_size": 384, "target_fingerprint": "…",
                  "shares_output_embedding": true}}

`medusa_num_layers` is the number of residual blocks of a head, `target_fingerprint` what `Describe` says of the target.
The tensors are exactly these, k from 0 to medusa_num_heads - 1, block from 0 to medusa_num_layers - 1:

    {k}.{block}.linear.weight [size, size], {k}.{block}.linear.bias [size]           as in medusa_lm_head.safetensors
    {k}.inputs.weight [size, (k + 2) size], {k}.inputs.bias [size]                   hydra only

Medusa's `{k}.{num_layers}.weight`, a head's own output embedding, is absent: the target's is shared. The columns of
`inputs.weight` take h first, then the embeddings of the k + 1 tokens after it, oldest first. Beside them are
training.json and, after `outrider.training.heads.judge`, tree.json and evaluation.json.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.heads.directory import HeadDirectory
from outrider.cloud_verifier.heads.eagle_layouts import published_names
from outrider.cloud_verifier.heads.eagle_modules import Eagle3
from outrider.cloud_verifier.heads.medusa_layouts import published_name
from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import target_fingerprint
from outrider.common.types import EARLY_EXIT
from outrider.training.common.checkpoint import write_json
from outrider.training.heads.model import Heads, HeadsShape

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def write_heads(heads: Heads, target_dir: Path, out: Path) -> None:
    """Writes config.json and model.safetensors, each whole or not at all."""
    shape = heads.shape
    weights = heads.heads.state_dict()
    tensors = {published_name(name): value.to("cpu", torch.float16) for name, value in weights.items()}
    ours = {
        "format_version": FORMAT_VERSION,
        "kind": shape.kind,
        "hidden_size": heads.size,
        "target_fingerprint": target_fingerprint(target_dir),
        "shares_output_embedding": True,
    }
    write_directory(
        out,
        tensors,
        {
            "medusa_num_heads": shape.num_heads,
            "medusa_num_layers": shape.num_blocks,
            "base_model_name_or_path": target_dir.resolve().name,
            "outrider": ours,
        },
    )


def write_eagle(
    draft: Eagle3, config: DecoderConfig, feature_layers: Sequence[int], target_dir: Path, out: Path
) -> None:
    """Writes an EAGLE-3 draft in SpecForge's layout (`cloud_verifier/heads/eagle_layouts.py`), float16, without an
    output embedding."""
    name_of = published_names("midlayer")
    tensors = {name_of(name): value.to("cpu", torch.float16) for name, value in draft.state_dict().items()}
    fields = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
    )
    ours = {
        "format_version": FORMAT_VERSION,
        "kind": "eagle",
        "feature_layers": list(feature_layers),
        "target_fingerprint": target_fingerprint(target_dir),
        "shares_output_embedding": True,
    }
    write_directory(
        out,
        tensors,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **{name: getattr(config, name) for name in fields},
            "rope_parameters": dict(config.rope_parameters),
            "draft_vocab_size": config.vocab_size,
            "base_model_name_or_path": target_dir.resolve().name,
            "outrider": ours,
        },
    )


def write_early_exit(layers: Sequence[int], target_dir: Path, out: Path) -> None:
    """Writes the directory of a target that drafts by some of its own layers: config.json alone, without weights."""
    ours = {
        "format_version": FORMAT_VERSION,
        "kind": EARLY_EXIT,
        "layers": list(layers),
        "target_fingerprint": target_fingerprint(target_dir),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CONFIG_FILE, {"base_model_name_or_path": target_dir.resolve().name, "outrider": ours})


def write_directory(out: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes model.safetensors and config.json, each whole or not at all."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f"{WEIGHTS_FILE}.tmp"
    save_file(tensors, temporary)
    os.replace(temporary, out / WEIGHTS_FILE)
    write_json(out / CONFIG_FILE, config)


def read_heads(directory: Path) -> tuple[Heads, dict[str, Any]]:
    """Returns what `write_heads` wrote, in float32, and config.json. Raises ValueError naming the directory."""
    try:
        found = HeadDirectory(directory)
        config, ours = found.config, found.config["outrider"]
        shape = HeadsShape(ours["kind"], config["medusa_num_heads"], config["medusa_num_layers"])
        heads = Heads(shape, ours["hidden_size"])
        found.fill(heads.heads, published_name)
        found.check_all_read()
    except (ModelError, KeyError, TypeError, RuntimeError, ValueError) as error:
        why = str(error).removeprefix(f"--heads {directory}: ")
        raise ValueError(f"--heads {directory} has no heads of this training: {why}") from error
    return heads, config
