"""Training heads together with their target: Medusa-2 (arXiv 2401.10774, section 2.2.2), for any kind of heads.

The heads learn alone first, unless they were trained before. Then the target moves, at low rates, along its own loss
and `heads_weight` of theirs. Its own loss is the forward KL from the target as it was, which needs no other text than
its own (the paper's self-distillation); the embeddings stay. What comes out is another target, with a fingerprint and
texts of its own.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.training.common.loss import linear_divergence
from outrider.training.common.optim import make_optimizers
from outrider.training.heads.directory import write_heads
from outrider.training.heads.model import Heads
from outrider.training.heads.moving import MovingTargetTrainer
from outrider.training.heads.trainer import HeadsConfig, HeadsTrainer


@dataclass(frozen=True)
class JointConfig(HeadsConfig):
    """Adds what decides how the target moves."""

    heads_alone: float = 0.25
    """Share of the budget in which the target stays as it is."""
    heads_weight: float = 1.0
    """Of the heads' loss beside the target's own."""
    target_rates: float = 0.5
    """Factor on the learning rates, for the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heads_alone < 1:
            raise ValueError(f"--heads-alone {self.heads_alone}: give a share from 0 and below 1")
        if self.heads_weight <= 0 or self.target_rates <= 0:
            raise ValueError("--heads-weight and --target-rates must be above 0")


class Joint(nn.Module):
    """Is the heads, and a target that moves with them."""

    def __init__(self, heads: Heads, target: Any) -> None:
        super().__init__()
        self.heads, self.target = heads, target


class JointTrainer(MovingTargetTrainer, HeadsTrainer):
    """Trains heads, and the copy with them."""

    config: JointConfig

    def _take_model(self, model: Heads) -> None:
        config, compute = self.config, self.compute
        target = self._make_copy()
        self.heads = model.to(compute.device)
        self.model = Joint(self.heads, compute.place(target))
        own = make_optimizers(self.heads, config.rates, self.group)
        self.optimizers = [
            *own,
            *make_optimizers(target, config.rates.times(config.target_rates), self.group),
        ]

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        if done < self.config.heads_alone:
            return super()._loss(ids, done)
        before, embedded = self._features(ids[:, :-1])
        hidden = self.compute.last_hidden(self.model.target, ids[:, :-1])
        places = self._places(ids.size(0), ids.size(1) - 1).to(hidden.device)
        teacher, weight = before[places], self.output_embedding
        own_loss = linear_divergence("fkl", hidden[places], weight, teacher, weight)
        heads_loss = self._heads_loss(hidden, embedded, places, teacher)
        self._note_divergence(own_loss)
        return own_loss + self.config.heads_weight * heads_loss, heads_loss.detach()

    def _save_heads(self) -> dict[str, Any]:
        if self.group.is_first:
            write_heads(self.heads, self._save_copy(self.model.target), self.out)
        return self._divergence_figures()
