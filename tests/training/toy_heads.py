"""What tests of training heads share: a toy target, a short run, and a run in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.training.common.model import create_model, save_model
from outrider.training.common.schedule import Phase
from tests.training.test_target import TOY, toy_stream

SHORT: dict[str, Any] = {
    "phases": (Phase(0.0, 16, 4),),
    "target_share": 0.5,
    "target_text_tokens": 150,
    "sample_rows": 8,
    "sample_prompt": 4,
    "sample_tokens": 16,
    "num_threads": 1,
}


def make_toy_heads_target(directory: Path, num_layers: int | None = None) -> Path:
    """A random target whose layers and scores differ from each other."""
    torch.manual_seed(0)
    model = create_model(TOY, num_layers)
    for weight in (model.lm_head.weight, *(layer.mlp.down_proj.weight for layer in model.model.layers)):
        torch.nn.init.normal_(weight, std=0.5)
    save_model(model, directory)
    return directory


def kl(target: Tensor, guess: Tensor) -> Tensor:
    target_log, guess_log = target.log_softmax(-1), guess.log_softmax(-1)
    return (target_log.exp() * (target_log - guess_log)).sum()


def train_whole_and_in_slices(
    trainer: Callable[..., Any], config: Any, target_dir: Path, directory: Path
) -> tuple[Path, Path]:
    """Trains the same run in one go and in as many slices as it takes; returns both directories."""
    whole, parts = directory / "whole", directory / "sliced"
    assert trainer(config, target_dir, toy_stream(), whole).train()
    for _ in range(10):
        sliced = trainer(replace(config, slice_minutes=1e-6), target_dir, toy_stream(), parts)
        sliced.resume()
        if sliced.train():
            break
    return whole, parts
