"""The optimisers of a training run: Muon for the matrices inside the layers, AdamW for everything else."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.training.common.workers import SOLO, Group

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Returns the nearest semi-orthogonal matrix, roughly: the singular values of the result are about 1.
    [..., rows, cols] in the dtype of the arithmetic.

    [..., rows, cols] in the dtype of the arithmetic.
    """
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if matrix.size(-2) > matrix.size(-1) else x
    return result


class Muon(torch.optim.Optimizer):
    """Moves along the momentum, orthogonalised (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/). Takes matrices only.

    With several workers each orthogonalises its share of the matrices; gradients must be the same on all.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        group: Group = SOLO,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._group = group
        if any(param.ndim != 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("Muon takes matrices only; give vectors and embeddings to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "Muon takes no closure"
        for options in self.param_groups:
            params = [param for param in options["params"] if param.grad is not None]
            updates = self._updates([self._direction(param, options["momentum"]) for param in params])
            for param, update in zip(params, updates, strict=True):
                scale = max(1.0, param.size(0) / param.size(1)) ** 0.5
                param.mul_(1 - options["lr"] * options["weight_decay"])
                param.add_(update, alpha=-options["lr"] * scale)

    def _direction(self, param: Tensor, momentum: float) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum"]
        assert param.grad is not None, "only parameters with a gradient move"
        buffer.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)

    def _updates(self, directions: list[Tensor]) -> list[Tensor]:
        """Orthogonalises, one stack a shape; a worker makes every size-th matrix and receives the others."""
        updates = [torch.zeros_like(direction) for direction in directions]
        by_shape: dict[torch.Size, list[int]] = {}
        for index, direction in enumerate(directions):
            by_shape.setdefault(direction.shape, []).append(index)
        for indices in by_shape.values():
            own = indices[self._group.rank :: self._group.size]
            if not own:
                continue
            stack = torch.stack([directions[index] for index in own])  # [num_own, rows, cols]
            dtype = torch.bfloat16 if stack.is_cuda else torch.float32
            for index, update in zip(own, orthogonalise(stack.to(dtype)), strict=True):
                updates[index].copy_(update)
        self._group.add_up(updates)
        return updates


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
    """Returns [Muon, AdamW] of a model's parameters that are trained; `scale_rates` moves their rates.

    AdamW takes the input and the output embedding, if the model has them, and every vector.
    """
    tables = _embedding(model, "get_input_embeddings"), _embedding(model, "get_output_embeddings")
    trained = [param for param in model.parameters() if param.requires_grad]
    params = [param for param in trained if all(param is not table for table in tables)]
    matrices = [param for param in params if param.ndim == 2]
    groups = [{"params": [param for param in params if param.ndim != 2], "lr": rates.norm}]
    if tables[0] is not None:
        groups.insert(0, {"params": [tables[0]], "lr": rates.embed})
    if tables[1] is not None and tables[1] is not tables[0]:
        groups.append({"params": [tables[1]], "lr": rates.head})
    optimizers = [
        Muon(matrices, lr=rates.muon, weight_decay=rates.weight_decay, group=group),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            options["base_lr"] = options["lr"]
    return optimizers


def _embedding(model: Any, getter: str) -> Tensor | None:
    table = getattr(model, getter)().weight if hasattr(model, getter) else None
    return table if table is not None and table.requires_grad else None


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
