"""The optimisers of a training run: Muon for the matrices inside the layers, AdamW for everything else."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.training.common.muon import Muon
from outrider.training.common.workers import SOLO, Group


@dataclass(frozen=True)
class Rates:
    """Holds peak learning rates by kind of parameter."""

    muon: float = 0.03
    embed: float = 0.006
    head: float = 0.002
    norm: float = 0.003
    weight_decay: float = 0.01

    def times(self, factor: float) -> "Rates":
        """Returns all learning rates scaled: below 1 to train on from weights that are not new."""
        rates = {name: getattr(self, name) * factor for name in ("muon", "embed", "head", "norm")}
        return replace(self, **rates)


def make_optimizers(model: Any, rates: Rates, group: Group = SOLO) -> list[torch.optim.Optimizer]:
    """Returns [Muon, AdamW] for a Llama-style `ForCausalLM`; `scale_rates` moves their rates."""
    matrices: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for param in model.model.layers.parameters():
        (matrices if param.ndim == 2 else norms).append(param)
    norms.append(model.model.norm.weight)
    groups = [
        {"params": [model.model.embed_tokens.weight], "lr": rates.embed},
        {"params": norms, "lr": rates.norm},
    ]
    if not model.config.tie_word_embeddings:
        groups.append({"params": [model.lm_head.weight], "lr": rates.head})
    optimizers = [
        Muon(matrices, lr=rates.muon, weight_decay=rates.weight_decay, group=group),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            options["base_lr"] = options["lr"]
    return optimizers


def scale_rates(optimizers: list[torch.optim.Optimizer], scale: float) -> None:
    """Set every learning rate to `scale` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * scale


def take_step(model: Any, optimizers: list[torch.optim.Optimizer], clip_norm: float) -> None:
    """Clip, step every optimiser, and drop the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
