"""Random Medusa and Hydra heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN = 128


def make_heads(directory: Path, kind: str, num_heads: int = 3, seed: int = 0) -> Path:
    """Writes random heads of the tiny targets."""
    chance = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance) * 0.1

    tensors = {}
    for k in range(num_heads):
        tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"] = (
            random(HIDDEN, HIDDEN),
            random(HIDDEN),
        )
        if kind == "hydra":
            tensors[f"{k}.inputs.weight"] = random(HIDDEN, (k + 2) * HIDDEN)
            tensors[f"{k}.inputs.bias"] = random(HIDDEN)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "outrider": {"kind": kind}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
