"""Models of about a million parameters like those of third parties: trained in float32 on text of installed packages,
with nothing done for INT4, and saved as Hugging Face directories. Deterministic for one installation and one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from outrider.training.bank.texts import KINDS

VOCABULARY, CONTEXT = 1536, 256
_BATCH, _LENGTH, _NUM_STEPS, _RATE = 8, 128, 400, 2e-3
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "gpt_neox": GPTNeoXConfig(
        hidden_size=100,  # no multiple of 32, and heads of 25 rotated by 6
        intermediate_size=400,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=CONTEXT, **_COMMON),
}


@dataclass(frozen=True, slots=True)
class Texts:
    """Holds the documents: to train on, to choose a precision by, and to judge it by."""

    train: Sequence[str]
    choose: Sequence[str]
    judge: Sequence[str]


def read_texts() -> Texts:
    """Returns the bank's prose; what it holds out is halved."""
    corpus, _ = KINDS["prose"]()
    held_out = list(corpus.held_out.values())
    return Texts(corpus.train, held_out[0::2], held_out[1::2])


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Returns a byte-level BPE of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_model(shape: str, tokenizer: Tokenizer, texts: Sequence[str], out: Path) -> float:
    """Trains a model of one of `SHAPES`, saves it, and returns its last losses' mean in nats a token."""
    torch.manual_seed(3)
    ids = np.concatenate([np.asarray([0, *each.ids]) for each in tokenizer.encode_batch(list(texts))])
    chance = np.random.default_rng(3)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_NUM_STEPS, pct_start=0.1)
    losses = []
    for _ in range(_NUM_STEPS):
        starts = chance.integers(0, len(ids) - _LENGTH, _BATCH)
        batch = torch.from_numpy(np.stack([ids[start : start + _LENGTH] for start in starts]))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    return float(np.mean(losses[-50:]))
