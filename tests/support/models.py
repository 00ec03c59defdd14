"""Small random targets that tests build themselves: a model directory as `--target` takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt_neox", "gpt2")
# Architectures some or all of whose layers attend over a window, with the fields that make it a small one.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
    "gemma2": {
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
    },
    "gemma3_text": {"sliding_window": 16, "head_dim": 32, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 16, "logit_scale": 0.5},
}
EOS = "<|end|>"


def make_tokenizer(directory: Path, vocab_size: int = 512) -> None:
    """A byte-level BPE tokenizer.json of at most `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f"def function_{i}(self, value_{i * 7}): return value_{i * 3} + {i * i}\n" for i in range(200)]
    tokenizer.train_from_iterator(words, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))


def make_tiny_target(
    directory: str | Path,
    arch: str = "llama",
    *,
    vocab: int = 512,
    hidden: int = 128,
    num_layers: int = 3,
    max_context: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Save a random decoder (about 1 M parameters) with its tokenizer to `directory`.

    `overrides` are further fields of the architecture's transformers configuration. The weights are drawn
    wider than transformers draws them, so that greedy text is not one token repeated.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = Path(directory)
    make_tokenizer(directory, vocab)
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": max_context,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    if arch not in ("gpt_neox", "gpt2"):
        fields |= {"num_key_value_heads": 2}
    if arch == "qwen3":
        fields |= {"head_dim": hidden // 4}
    config = AutoConfig.for_model(arch, **(fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def draw_mask_factors(directory: Path) -> None:
    """Draws the factors of a Doge's masks, which are zero before it is trained."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    factors = {name: each for name, each in tensors.items() if name.endswith("self_attn.A")}
    assert factors, "no Doge"
    tensors |= {name: torch.randn(each.shape, generator=generator) for name, each in factors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def add_token(tokenizer_json: Path, token_id: int, *, is_special: bool = True) -> None:
    """Adds a token to a tokenizer, as Gemma 3's have one for images that the model of text alone has no row for."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    added = {"id": token_id, "content": "<image>", "special": is_special, "normalized": False}
    content["added_tokens"].append(added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    tokenizer_json.write_text(json.dumps(content), encoding="utf-8")


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of a saved config.json (None stays null)."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
