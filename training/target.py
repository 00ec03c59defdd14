"""Train the target: next-token cross-entropy over the corpus, within a budget of minutes.

    python -m training.target --data DIR --out DIR --minutes 66 [--resume]

Matrices are updated by Muon, embeddings and norms by AdamW. The model starts shallow and is deepened on the
way (`training.model.grow`), since early tokens teach a shallow model as much for half the arithmetic.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.checkpoint import load_checkpoint, save_checkpoint, write_json
from training.data import Batches, load_train
from training.loss import linear_cross_entropy
from training.model import TARGET, ModelConfig, create_model, grow, num_params, save_model
from training.optim import Rates, make_optimizers, scale_rates, take_step
from training.progress import Progress
from training.runtime import describe_machine, keep_freed_memory
from training.schedule import Phase, Schedule, phase_at


@dataclass(frozen=True)
class TargetConfig:
    """Everything that decides the run, beside the data."""

    model: ModelConfig = TARGET
    minutes: float = 66.0
    phases: tuple[Phase, ...] = (
        Phase(0.0, length=256, rows=16, num_layers=3),
        Phase(0.5, length=512, rows=8, num_layers=3),
        Phase(0.7, length=512, rows=8, num_layers=6),
        Phase(0.9, length=2048, rows=2, num_layers=6),
    )
    schedule: Schedule = field(default_factory=Schedule)
    rates: Rates = field(default_factory=Rates)
    clip_norm: float = 1.0
    average: float = 0.98
    """Decay per step of the moving average of the weights that is kept, through the learning rate's decay."""
    checkpoint_minutes: float = 4.0
    validation_tokens: int = 32_768
    seed: int = 0
    num_threads: int = 2


@dataclass
class TargetState:
    """Position in the run; with the weights and the optimisers it is the checkpoint."""

    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0


class TargetTrainer:
    """Owns the model, its optimisers and the position in the stream."""

    def __init__(self, config: TargetConfig, stream: Any, out: Path) -> None:
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.num_threads)
        self.config, self.out, self.state = config, out, TargetState()
        split = len(stream) - config.validation_tokens
        self.batches = Batches(stream[:split], seed=config.seed)
        self.validation = stream[split:]
        self.model = create_model(config.model, config.phases[0].num_layers)
        self.average: dict[str, Tensor] = {}
        self.history: list[dict[str, float]] = []
        self.optimizers = make_optimizers(self.model, self.config.rates)

    def train(self) -> dict[str, Any]:
        """Run to the end of the budget, save the weights and return the figures of the run."""
        budget_s = self.config.minutes * 60
        saved_at = time.monotonic()
        with Progress("target", budget_s, self.state.elapsed_s) as progress:
            while self.state.elapsed_s < budget_s:
                started = time.monotonic()
                num_tokens, loss = self._step(self.state.elapsed_s / budget_s)
                duration = time.monotonic() - started
                self.state.elapsed_s += duration
                self.state.step += 1
                self.state.tokens += num_tokens
                progress.update(
                    self.state.elapsed_s, self.state.step, loss, self.state.tokens, num_tokens / duration
                )
                self.history.append(
                    {"tokens": self.state.tokens, "elapsed_s": self.state.elapsed_s, "loss": loss}
                )
                if time.monotonic() - saved_at > self.config.checkpoint_minutes * 60:
                    self._save()
                    saved_at = time.monotonic()
        return self._finish()

    def resume(self) -> bool:
        """Go on from the checkpoint in the output directory; False if there is none."""
        saved = load_checkpoint(self.out / "checkpoint.pt")
        if saved is None:
            return False
        self.state = TargetState(**saved["state"])
        self._deepen(saved["num_layers"])
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.batches.epoch, self.batches.cursor = saved["epoch"], saved["cursor"]
        self.average, self.history = saved["average"], saved["history"]
        return True

    def warm_start(self, directory: Path) -> None:
        """Take the weights of a saved target and train on at its full depth."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        self.optimizers = make_optimizers(self.model, self.config.rates)

    def _step(self, done: float) -> tuple[int, float]:
        """One optimiser step: tokens seen, and the cross-entropy before it."""
        phase = phase_at(self.config.phases, done)
        self._deepen(phase.num_layers)
        scale_rates(self.optimizers, self.config.schedule.scale(done))
        batch = torch.from_numpy(self.batches.next(phase.length, phase.rows))
        hidden = self.model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        loss, cross_entropy = linear_cross_entropy(
            hidden.flatten(0, 1), self.model.get_output_embeddings().weight, batch[:, 1:].flatten()
        )
        torch.autograd.backward(loss)
        take_step(self.model, self.optimizers, self.config.clip_norm)
        if done >= self.config.schedule.decay_start:
            self._update_average()
        return batch[:, 1:].numel(), float(cross_entropy)

    def _deepen(self, num_layers: int) -> None:
        """Grow to `num_layers`; the momentum of the layers that stay is kept."""
        if len(self.model.model.layers) >= num_layers:
            return
        states = [optimizer.state for optimizer in self.optimizers]
        grow(self.model, num_layers)
        self.optimizers = make_optimizers(self.model, self.config.rates)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            known = {param for group in optimizer.param_groups for param in group["params"]}
            optimizer.state.update({param: value for param, value in state.items() if param in known})

    @torch.no_grad()
    def _update_average(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(param, 1 - self.config.average)
            else:
                self.average[name] = param.detach().clone()

    @torch.no_grad()
    def validate(self) -> float:
        """Cross-entropy in nats per token on the reserved end of the training stream."""
        losses = []
        for start in range(0, len(self.validation) - 513, 512 * 8):
            flat = self.validation[start : start + 512 * 8 + 1].astype(np.int64)
            batch = torch.from_numpy(flat)
            inputs = batch[:-1][: (len(batch) - 1) // 512 * 512].view(-1, 512)
            hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            losses.append(
                linear_cross_entropy(
                    hidden, self.model.get_output_embeddings().weight, batch[1 : len(hidden) + 1]
                )[1]
            )
        return float(torch.stack(losses).mean())

    def _save(self) -> None:
        save_checkpoint(
            self.out / "checkpoint.pt",
            {
                "state": asdict(self.state),
                "num_layers": len(self.model.model.layers),
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "epoch": self.batches.epoch,
                "cursor": self.batches.cursor,
                "average": self.average,
                "history": self.history,
            },
        )

    def _finish(self) -> dict[str, Any]:
        """Keep whichever of the last and the averaged weights validates better."""
        self._save()
        last = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        loss_last = loss_average = self.validate()
        if self.average:
            self.model.load_state_dict(self.average, strict=False)
            loss_average = self.validate()
            if loss_last < loss_average:
                self.model.load_state_dict(last, strict=False)
        save_model(self.model, self.out)
        figures = {
            "machine": describe_machine(),
            "num_params": num_params(self.model),
            "tokens": self.state.tokens,
            "steps": self.state.step,
            "minutes": round(self.state.elapsed_s / 60, 1),
            "validation_loss": {"last": loss_last, "average": loss_average},
            "kept": "average" if loss_average < loss_last else "last",
            "config": asdict(self.config),
            "history": self.history[:: max(1, len(self.history) // 100)],
        }
        write_json(self.out / "training.json", figures)
        return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.target", description="Train the target of the pair."
    )
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("training/runs/pair/target"))
    parser.add_argument("--minutes", type=float, default=TargetConfig.minutes)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=TargetConfig.num_threads)
    args = parser.parse_args()
    keep_freed_memory()
    config = TargetConfig(minutes=args.minutes, num_threads=args.threads)
    trainer = TargetTrainer(config, load_train(args.data), args.out)
    if args.resume and not trainer.resume():
        print(f"no checkpoint in {args.out}: starting from scratch")
    figures = trainer.train()
    print(f"target: {figures['tokens'] / 1e6:.2f} M tokens, validation loss {figures['validation_loss']}")


if __name__ == "__main__":
    main()
