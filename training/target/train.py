"""Train the target: next-token cross-entropy over the corpus, within a budget of minutes or tokens.

    python -m outrider.training.target.train --data DIR --out DIR --minutes 66 [--workers 2] [--resume]
    python -m outrider.training.target.train --data DIR --out DIR --preset gpu30m --device cuda --slice-minutes 9

Matrices are updated by Muon, embeddings and norms by AdamW. On a CPU the model starts shallow and is deepened
on the way (`model.grow`), since early tokens teach a shallow model as much for half the arithmetic.
"""

import argparse
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.training.common.loss import linear_cross_entropy
from outrider.training.common.model import TARGET, TARGET_30M, ModelConfig, create_model, grow, save_model
from outrider.training.common.optim import Rates, make_optimizers
from outrider.training.common.options import add_run_options, run_options, run_training
from outrider.training.common.schedule import Phase, Schedule, phase_at
from outrider.training.common.trainer import RunConfig, Trainer
from outrider.training.common.workers import SOLO, Group
from outrider.training.data.streams import Batches, Tokens, load_functions, load_train
from outrider.training.target.unlikelihood import GreedyText, UnlikelihoodConfig, repeat_loss


@dataclass(frozen=True)
class TargetConfig(RunConfig):
    """Holds everything that decides the run, beside the data."""

    model: ModelConfig = TARGET
    minutes: float = 66.0
    phases: tuple[Phase, ...] = (
        Phase(0.0, length=256, rows=16, num_layers=3),
        Phase(0.5, length=512, rows=8, num_layers=3),
        Phase(0.7, length=512, rows=8, num_layers=6, functions=0.5),
        Phase(0.9, length=2048, rows=2, num_layers=6, functions=0.5),
    )
    unlikelihood: UnlikelihoodConfig = field(default_factory=lambda: UnlikelihoodConfig(start=0.75))
    average: float = 0.98
    """Decay per step of the moving average of the weights that is kept, through the learning rate's decay."""
    validation_tokens: int = 32_768


PRESETS = {
    "cpu": TargetConfig(),
    "cpu-warm": TargetConfig(
        phases=(
            Phase(0.0, length=512, rows=16, num_layers=6),
            Phase(0.55, length=1024, rows=8, num_layers=6, functions=0.5),
            Phase(0.9, length=2048, rows=4, num_layers=6, functions=0.5),
        ),
        unlikelihood=UnlikelihoodConfig(start=0.75, weight=0.3),
        schedule=Schedule(decay_start=0.62),
        rates=Rates().times(0.6),
        average=0.97,
    ),
    "gpu30m": TargetConfig(
        model=TARGET_30M,
        tokens=1_000_000_000,
        phases=(
            Phase(0.0, length=512, rows=512, num_layers=8),
            Phase(0.2, length=1024, rows=512, num_layers=8),
            Phase(0.85, length=2048, rows=256, num_layers=8, functions=0.1),
        ),
        unlikelihood=UnlikelihoodConfig(start=0.97, rows=512, step_rows=64),
        schedule=Schedule(warmup=0.01, decay_start=0.4),
        rates=Rates(weight_decay=0.1),
        micro_tokens=65_536,
        validation_tokens=262_144,
    ),
}
"""`cpu` from scratch and `cpu-warm` from trained weights on two cores; `gpu30m` for one large GPU."""


class TargetTrainer(Trainer):
    """Trains next-token prediction over one stream."""

    name = "target"
    config: TargetConfig

    def __init__(
        self, config: TargetConfig, stream: Tokens, functions: Tokens, out: Path, group: Group = SOLO
    ) -> None:
        torch.manual_seed(config.seed)
        super().__init__(config, create_model(config.model, config.phases[0].num_layers), out, group)
        split = len(stream) - config.validation_tokens
        self.batches = Batches(stream[:split], seed=config.seed)
        self.validation = stream[split:]
        self.functions = Batches(functions, seed=config.seed)
        self.greedy_text = GreedyText(config.unlikelihood, self.functions, group)
        self.average: dict[str, Tensor] = {}

    def warm_start(self, directory: Path) -> None:
        """Take the weights of a saved target and train on at its full depth. Where the record of its training
        lies in the directory, or that of a pair beside it, what it says of them is kept.
        """
        from transformers import AutoModelForCausalLM

        pair = directory.parent
        places = directory / "training.json", pair / "training-polish.json", pair / "training-target.json"
        self._begin_after(*places)
        self._take_model(AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32))

    def _batch(self, phase: Phase) -> npt.NDArray[np.int64]:
        source = self.functions if self._draw() < phase.functions else self.batches
        return source.next(phase.length, phase.rows)

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        hidden = self.compute.last_hidden(self.model, ids[:, :-1])
        return linear_cross_entropy(hidden, self.model.get_output_embeddings().weight, ids[:, 1:].flatten())

    def _step(self, done: float) -> tuple[int, float]:
        self._deepen(phase_at(self.config.phases, done).num_layers)
        if done >= self.config.unlikelihood.start:
            self._add_repeat_gradients()
        figures = super()._step(done)
        if done >= self.config.schedule.decay_start:
            self._update_average()
        return figures

    def _add_repeat_gradients(self) -> None:
        config = self.config.unlikelihood
        rows = self.greedy_text.next(self.model, self.compute)
        loss = repeat_loss(self.model, self.compute, rows, config.prompt)
        torch.autograd.backward(loss * config.weight)

    @torch.no_grad()
    def _update_average(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(param, 1 - self.config.average)
            else:
                self.average[name] = param.detach().clone()

    def _deepen(self, num_layers: int) -> None:
        if len(self.model.model.layers) >= num_layers:
            return
        states = [optimizer.state for optimizer in self.optimizers]
        self.compute.place(grow(self.model, num_layers))
        self.optimizers = make_optimizers(self.model, self.config.rates, self.group)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            known = {param for group in optimizer.param_groups for param in group["params"]}
            optimizer.state.update({param: value for param, value in state.items() if param in known})

    @torch.no_grad()
    def validate(self) -> float:
        """Returns the cross-entropy in nats per token on the reserved end of the training stream."""
        length, group = 512, self.group
        starts = np.arange(0, len(self.validation) - length, length)
        num_rows = max(1, self.config.micro_tokens // length)
        totals = torch.zeros(2, dtype=torch.float64)  # loss, rows
        for first in range(group.rank * num_rows, len(starts), group.size * num_rows):
            rows = starts[first : first + num_rows, None] + np.arange(length + 1)
            loss = self._loss(self.compute.ids(self.validation[rows].astype(np.int64)), 1.0)[1]
            totals += torch.tensor([float(loss) * len(rows), len(rows)], dtype=torch.float64)
        group.add_up([totals])
        return float(totals[0] / totals[1])

    def _extra_state(self) -> dict[str, Any]:
        return {
            "num_layers": len(self.model.model.layers),
            "epoch": self.batches.epoch,
            "cursor": self.batches.cursor,
            "functions": (self.functions.epoch, self.functions.cursor),
            "greedy_text": self.greedy_text.rows,
            "average": self.average,
        }

    def _take_extra_state(self, saved: dict[str, Any]) -> None:
        self._deepen(saved["num_layers"])
        self.batches.epoch, self.batches.cursor = saved["epoch"], saved["cursor"]
        self.functions.epoch, self.functions.cursor = saved["functions"]
        self.greedy_text.rows = saved["greedy_text"]
        self.average = {name: value.to(self.compute.device) for name, value in saved["average"].items()}

    def _finish(self) -> dict[str, Any]:
        """Keeps whichever of the last and the averaged weights validates better."""
        last = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        loss_last = loss_average = self.validate()
        if self.average:
            self.model.load_state_dict(self.average, strict=False)
            loss_average = self.validate()
            if loss_last < loss_average:
                self.model.load_state_dict(last, strict=False)
        if self.group.is_first:
            save_model(self.model, self.out)
        return {
            "validation_loss": {"last": loss_last, "average": loss_average},
            "kept": "last" if loss_last < loss_average or not self.average else "average",
        }


def train_target(
    config: TargetConfig, data: Path, out: Path, warm_start: Path | None, is_resumed: bool, group: Group
) -> dict[str, Any] | None:
    """Runs one worker's part (a slice of it: None); resumes where there is a checkpoint."""
    trainer = TargetTrainer(config, load_train(data), load_functions(data), out, group)
    if warm_start is not None:
        trainer.warm_start(warm_start)
    if is_resumed:
        trainer.resume()
    return trainer.train()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.target.train", description="Train the target."
    )
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("training/runs/pair/target"))
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--warm-start", type=Path, help="directory of a saved target to train on from")
    parser.add_argument("--rates-scale", type=float, default=1.0, help="factor on the learning rates")
    add_run_options(parser)
    args = parser.parse_args()
    config = replace(PRESETS[args.preset], **run_options(args))
    config = replace(config, rates=config.rates.times(args.rates_scale))
    task = partial(train_target, config, args.data, args.out, args.warm_start, args.resume)
    if figures := run_training("target", args.workers, lambda: task):
        print(f"target: {figures['tokens'] / 1e6:.2f} M tokens, validation loss {figures['validation_loss']}")


if __name__ == "__main__":
    main()
