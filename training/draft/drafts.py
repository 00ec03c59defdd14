"""Opens the draft for a target: a saved one, or a new one whose shape follows from the target's."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import num_embedded_tokens, tokenizer_fingerprint
from outrider.training.common.model import ModelConfig, create_model
from outrider.training.draft.quant import BLOCK_SIZE, require_blocks

_TOKENIZER = "tokenizer.json"


def parse_size(size: str) -> tuple[int, int]:
    """Returns hidden size and layers: "192x2" → (192, 2). Raises ValueError naming `--draft-size`."""
    match = re.fullmatch(r"(\d+)x(\d+)", size)
    if match is None:
        raise ValueError(f"--draft-size {size}: give hidden size x layers, such as 192x2")
    hidden_size, num_layers = int(match[1]), int(match[2])
    if not num_layers or not hidden_size or hidden_size % BLOCK_SIZE:
        raise ValueError(f"--draft-size {size}: the hidden size must be a multiple of {BLOCK_SIZE}")
    return hidden_size, num_layers


def draft_shape(size: str, vocab_size: int, context: int) -> ModelConfig:
    """Returns a Llama-style draft with tied embeddings: heads of 32 (64 from a hidden size of 512 on), a
    third of them at most for keys and values, an FFN of 8/3 of the width in whole INT4 blocks."""
    hidden_size, num_layers = parse_size(size)
    head_dim = 64 if hidden_size >= 512 and hidden_size % 64 == 0 else 32
    num_heads = hidden_size // head_dim
    most_kv = max(1, num_heads // 3)
    return ModelConfig(
        hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=max(n for n in range(1, most_kv + 1) if num_heads % n == 0),
        head_dim=head_dim,
        ffn_size=round(hidden_size * 8 / 3 / BLOCK_SIZE) * BLOCK_SIZE,
        tied=True,
        vocab_size=vocab_size,
        context=context,
    )


def saved_shape(directory: Path) -> ModelConfig:
    """Returns the shape of a saved draft. Raises ValueError naming the directory without a configuration."""
    fields = read_config(directory)
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    return ModelConfig(
        hidden_size,
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or hidden_size // num_heads,
        ffn_size=fields["intermediate_size"],
        tied=bool(fields.get("tie_word_embeddings")),
        vocab_size=fields["vocab_size"],
        context=fields["max_position_embeddings"],
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the fields of a model directory's config.json. Raises ValueError naming the directory without
    one."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: give a Hugging Face model directory")
    fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return fields


def load_target(directory: Path, dtype: torch.dtype) -> Any:
    """Loads a target to learn from: evaluation mode, no gradients. Raises ValueError for a head that is
    not linear."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True).eval()
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(target.config, field, None):
            raise ValueError(f"{directory} has {field}: distilling supports plain linear heads")
    if not hasattr(getattr(target, "model", None), "layers"):
        raise ValueError(f"{directory} is a {type(target).__name__}; its decoder is not at model.layers")
    target.requires_grad_(False)
    return target


def load_draft(directory: Path, target_dir: Path) -> Any:
    """Loads a saved draft to train on, float32. Raises ValueError where its tokenizer is not the target's."""
    from transformers import AutoModelForCausalLM

    require_same_tokenizer(target_dir, directory)
    draft = AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, local_files_only=True
    ).train()
    require_blocks(draft)
    return draft


def create_draft(shape: ModelConfig, target: Any) -> Any:
    """Creates a draft with the target's special tokens, its embedding from the target's principal
    components."""
    draft = create_model(shape)
    for field in ("bos_token_id", "eos_token_id"):
        setattr(draft.config, field, getattr(target.config, field, None))
        setattr(draft.generation_config, field, getattr(target.generation_config, field, None))
    _inherit_embedding(draft, target)
    return draft


def require_same_tokenizer(target_dir: Path, draft_dir: Path) -> None:
    """Raise ValueError naming both fingerprints where two directories' tokenizers differ."""
    try:
        target, draft = (tokenizer_fingerprint(path / _TOKENIZER) for path in (target_dir, draft_dir))
    except ModelError as error:
        raise ValueError(str(error)) from error
    if target != draft:
        raise ValueError(
            f"{draft_dir} has another tokenizer ({draft[:12]}) than {target_dir} ({target[:12]}): "
            "take a draft of the target's family, or --draft-size for a new one"
        )


def num_common_ids(target_dir: Path, *models: Any) -> int:
    """Returns how many ids exist: the tokenizer's, or where there is none the rows that all embeddings
    have."""
    rows = min(int(model.get_output_embeddings().weight.size(0)) for model in models)
    if not (target_dir / _TOKENIZER).is_file():
        return rows
    try:
        return num_embedded_tokens(target_dir / _TOKENIZER, rows)
    except ModelError as error:
        raise ValueError(str(error)) from error


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Put the files a tokenizer consists of beside the weights; those that exist."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in (_TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


@torch.no_grad()
def _inherit_embedding(draft: Any, target: Any) -> None:
    """Starts the draft's embedding at the principal components of the target's output embedding."""
    weight = target.get_output_embeddings().weight.float()  # [vocab, target_size]
    size = draft.config.hidden_size
    if weight.size(1) < size:
        return
    _, directions = torch.linalg.eigh(weight.T @ weight)  # ascending
    components = weight @ directions[:, -size:].flip(-1)  # [vocab, draft_size]
    draft.model.embed_tokens.weight.copy_(components)
