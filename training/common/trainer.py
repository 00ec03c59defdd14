"""Trains within a budget: the step, progress, checkpoints, resumption, and a history.

A budget is of minutes or of tokens; schedules follow the share of it that is spent. A process may stop after
a slice of it and another go on. With several workers (`common.workers`) each computes its rows of the same
batches; the first keeps the clock and the files.
"""

import json
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.training.common.checkpoint import load_checkpoint, save_checkpoint, write_json
from outrider.training.common.compute import Compute
from outrider.training.common.model import num_params
from outrider.training.common.optim import Rates, make_optimizers, scale_rates, take_step
from outrider.training.common.progress import Progress
from outrider.training.common.runtime import describe_machine
from outrider.training.common.schedule import Phase, Schedule, phase_at
from outrider.training.common.workers import SOLO, Group


@dataclass(frozen=True)
class RunConfig:
    """Holds what decides a run beside the model and the data."""

    phases: tuple[Phase, ...]
    minutes: float = 60.0
    tokens: int | None = None
    """Where given, the budget is this many tokens, and `minutes` is not used."""
    slice_minutes: float | None = None
    """Save and stop after this long, to be resumed; None to go on to the end of the budget."""
    schedule: Schedule = field(default_factory=Schedule)
    rates: Rates = field(default_factory=Rates)
    clip_norm: float = 1.0
    micro_tokens: int = 2048
    """Tokens in one forward and backward pass; the gradients of a batch are added up."""
    checkpoint_minutes: float = 4.0
    seed: int = 0
    num_threads: int = 2
    compute: Compute = field(default_factory=Compute)


@dataclass
class RunState:
    """Holds the position in the run; with the weights and the optimisers it is the checkpoint."""

    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0


class StepClock:
    """Counts time. A step that took far longer than those before it was suspended from outside, and counts
    as four median steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._recent: deque[float] = deque(maxlen=31)

    def lap_s(self, is_step: bool = True) -> float:
        """Returns the seconds to count since the last lap."""
        now_s = self._clock()
        lap_s, self._last_s = now_s - self._last_s, now_s
        if not is_step:
            return lap_s
        counted_s = min(lap_s, 4 * statistics.median(self._recent)) if len(self._recent) >= 3 else lap_s
        self._recent.append(lap_s)
        return counted_s

    def skip(self) -> None:
        """Begin a lap now: what was done since the last one is not a step's."""
        self._last_s = self._clock()


class Trainer(ABC):
    """Owns a model, its optimisers and the position in the run. A subclass says what a batch and its loss
    are.
    """

    name: str

    def __init__(self, config: RunConfig, model: Any, out: Path, group: Group = SOLO) -> None:
        self.config, self.out, self.group, self.state = config, out, group, RunState()
        self.compute = config.compute
        if group.size == 1:
            torch.set_num_threads(config.num_threads)
        self.history: list[dict[str, float]] = []
        self.before: list[dict[str, Any]] = []
        """What the weights it begins with were trained for."""
        self._take_model(model)

    @abstractmethod
    def _batch(self, phase: Phase) -> npt.NDArray[np.int64]:
        """Returns the next batch of all workers: [rows, length + 1] ids."""

    def _draw(self) -> float:
        """Returns a number from 0 to 1 for the step: the same on every worker, and in a run that was
        resumed."""
        return float(np.random.default_rng([self.config.seed, self.state.step]).random())

    @abstractmethod
    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        """Returns of [rows, length + 1] ids the mean loss to differentiate, and the figure to print."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """Saves the weights to be used, and returns the figures that are this training's own."""

    @abstractmethod
    def _extra_state(self) -> dict[str, Any]:
        """Returns what a subclass adds to the checkpoint."""

    @abstractmethod
    def _take_extra_state(self, saved: dict[str, Any]) -> None:
        """Restores it."""

    def _prepare(self) -> int:
        """Does a piece of what must be done before the next step, and returns its tokens; 0: there is
        none."""
        return 0

    def train(self) -> dict[str, Any] | None:
        """Run to the end of the budget, save the weights and return the figures; None where the slice ended
        first.
        """
        clock, config = StepClock(), self.config
        slice_s = math.inf if config.slice_minutes is None else config.slice_minutes * 60
        spent_s = unsaved_s = 0.0
        with Progress(self.name, self.done, self.group.is_first) as progress:
            while True:
                done, slice_left_s = self.group.follow([self.done, slice_s - spent_s])
                if done >= 1:
                    break
                if slice_left_s <= 0:
                    self._save()
                    return None
                num_prepared = self._prepare()
                num_tokens, loss = (num_prepared, None) if num_prepared else self._step(done)
                lap_s = clock.lap_s(is_step=not num_prepared)
                spent_s, unsaved_s = spent_s + lap_s, unsaved_s + lap_s
                self._note(num_tokens, loss, lap_s)
                progress.update(self.done, self.state.step, loss, self.state.tokens, num_tokens / lap_s)
                if unsaved_s > config.checkpoint_minutes * 60:
                    self._save()
                    unsaved_s = 0.0
                    clock.skip()
        self._save()
        figures = self._figures() | self._finish()
        if self.group.is_first:
            write_json(self.out / "training.json", figures)
        return figures

    @property
    def done(self) -> float:
        """Returns the share of the budget that is spent."""
        if self.config.tokens is not None:
            return self.state.tokens / self.config.tokens
        return self.state.elapsed_s / (self.config.minutes * 60)

    def resume(self) -> bool:
        """Go on from the checkpoint in the output directory; False if there is none."""
        saved = load_checkpoint(self.out / "checkpoint.pt")
        if saved is None:
            return False
        self.state = RunState(**saved["state"])
        self._take_extra_state(saved)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.history = saved["history"]
        return True

    def _begin_after(self, *records: Path) -> None:
        """Keep what the first of the records that exists says of the training that made the weights."""
        record = next(filter(Path.is_file, records), None)
        if record is not None:
            figures = json.loads(record.read_text())
            spent = {name: figures[name] for name in ("tokens", "steps", "minutes")}
            self.before = [*figures.get("before", []), spent]

    def _take_model(self, model: Any) -> None:
        self.model = self.compute.place(model)
        self.optimizers = make_optimizers(self.model, self.config.rates, self.group)

    def _step(self, done: float) -> tuple[int, float]:
        config, phase = self.config, phase_at(self.config.phases, done)
        scale_rates(self.optimizers, config.schedule.scale(done))
        batch = self._batch(phase)
        own = batch[self.group.own(len(batch))]
        num_rows = max(1, config.micro_tokens // phase.length)
        figure = torch.zeros((), device=self.compute.device)
        for start in range(0, len(own), num_rows):
            ids = self.compute.ids(own[start : start + num_rows])
            share = len(ids) / len(own)
            loss, value = self._loss(ids, done)
            torch.autograd.backward(loss * share)
            figure += value * share
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        self.group.average([*gradients, figure])
        take_step(self.model, self.optimizers, config.clip_norm)
        return batch[:, 1:].size, float(figure)

    def _note(self, num_tokens: int, loss: float | None, duration_s: float) -> None:
        if loss is None:  # what was prepared is no training: it takes time of the slice, not of the budget
            return
        self.state.elapsed_s += duration_s
        self.state.step += 1
        self.state.tokens += num_tokens
        self.history.append({"tokens": self.state.tokens, "elapsed_s": self.state.elapsed_s, "loss": loss})

    def _save(self) -> None:
        if not self.group.is_first:
            return
        save_checkpoint(
            self.out / "checkpoint.pt",
            {
                "state": asdict(self.state),
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "history": self.history,
                **self._extra_state(),
            },
        )

    def _figures(self) -> dict[str, Any]:
        return {
            "machine": describe_machine(self.compute.device),
            "num_workers": self.group.size,
            "num_params": num_params(self.model),
            "tokens": self.state.tokens,
            "steps": self.state.step,
            "minutes": round(self.state.elapsed_s / 60, 1),
            "before": self.before,
            "config": asdict(self.config),
            "history": self.history[:: max(1, len(self.history) // 100)],
        }
