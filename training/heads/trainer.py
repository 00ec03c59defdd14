"""Training heads on a frozen target: Medusa-1 (arXiv 2401.10774, section 2.2.1) and Hydra (arXiv 2402.05109).

The head at index k learns the target's own distribution of the token k + 2 places after t, which is the target's row at
t + k + 1: forward KL, weighted 0.8^(k+1) as in Medusa, on the corpus and on text that the target wrote (its
self-distillation). Hydra's heads see the embeddings of the true tokens between.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cloud_verifier.backends.model_ends import embed
from outrider.training.heads.directory import read_heads, write_heads
from outrider.training.heads.frozen import FrozenTargetConfig, FrozenTargetTrainer
from outrider.training.heads.model import Heads, HeadsShape


@dataclass(frozen=True)
class HeadsConfig(FrozenTargetConfig):
    """Holds everything that decides the run, beside the target and the data."""

    shape: HeadsShape = field(default_factory=HeadsShape)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(phase.length <= self.shape.num_heads for phase in self.phases):
            raise ValueError(f"--length: windows longer than the {self.shape.num_heads} heads look ahead")


class HeadsTrainer(FrozenTargetTrainer):
    """Trains a set of heads."""

    config: HeadsConfig

    def _make_model(self, config: HeadsConfig, heads_dir: Path | None) -> Heads:
        size, shape = self.target.config.hidden_size, config.shape
        if heads_dir is None:
            return Heads(shape, size)
        heads, _ = read_heads(heads_dir)
        if heads.shape != shape or heads.size != size:
            raise ValueError(
                f"--heads {heads_dir} are {heads.size} wide, {heads.shape}; asked for: {size}, {shape}"
            )
        return heads

    def _take_model(self, model: Any) -> None:
        super()._take_model(model)
        self.heads: Heads = self.model

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        hidden, embedded = self._features(ids[:, :-1])
        places = self._places(ids.size(0), ids.size(1) - 1).to(hidden.device)
        loss = self._heads_loss(hidden, embedded, places, hidden[places])
        return loss, loss.detach()

    def _heads_loss(self, hidden: Tensor, embedded: Tensor, places: Tensor, teacher: Tensor) -> Tensor:
        """Returns the weighted mean of the heads' losses: each learns `teacher`, the rows at `places`, from the states
        as far before as it looks ahead."""
        total, weights = hidden.new_zeros(()), 0.0
        for index in range(self.config.shape.num_heads):
            start = places - index - 1
            following = [embedded[start + step] for step in range(1, index + 2)] if len(embedded) else []
            with self.compute.autocast():
                rows = self.heads.row(index, hidden[start], following)
            scale = self.config.decay ** (index + 1)
            total = total + scale * self._divergence(rows, teacher)
            weights += scale
        return total / weights

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states and, where heads see tokens, their embeddings: [rows * length, size]
        both."""
        hidden = self.compute.last_hidden(self.target, inputs)
        if not self.heads.sees_tokens:
            return hidden, hidden.new_empty(0)
        embedded = embed(self.target, inputs.flatten())
        return hidden, embedded.to(hidden.dtype)

    def _places(self, num_rows: int, length: int) -> Tensor:
        """Returns the positions, of rows laid end to end, whose distribution is learnt: each has as many before it
        in its row as there are heads."""
        every = torch.arange(num_rows * length).view(num_rows, length)
        return self._chosen(every[:, self.config.shape.num_heads :].flatten())

    def _save_heads(self) -> dict[str, Any]:
        if self.group.is_first:
            write_heads(self.heads, self.target_dir, self.out)
        return {}
