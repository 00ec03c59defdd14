"""Two processes train as one does, a run stops after its slice, and the clock leaves out suspensions."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training.common.optim import Muon
from outrider.training.common.trainer import StepClock
from outrider.training.common.workers import SOLO, Group, run_workers
from outrider.training.target.train import TargetTrainer, train_target
from tests.training.test_target import CONFIG, toy_stream


@pytest.mark.slow
@pytest.mark.ci
def test_two_workers_train_as_one_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", train=toy_stream())
    np.savez(tmp_path / "functions.npz", functions=toy_stream(2000))
    config = replace(CONFIG, tokens=64 * 12, num_threads=1)
    figures = {
        size: run_workers(size, partial(train_target, config, tmp_path, tmp_path / str(size), None, False))
        for size in (1, 2)
    }
    alone, shared = figures[1], figures[2]
    assert alone is not None and shared is not None
    assert shared["steps"] == alone["steps"] == 12
    assert shared["num_workers"] == 2
    losses = [[entry["loss"] for entry in run["history"]] for run in (alone, shared)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert shared["validation_loss"]["last"] == pytest.approx(alone["validation_loss"]["last"], rel=1e-3)


class _CannotBeLoaded:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)

    def __call__(self, group: Group) -> None:
        raise AssertionError("no worker got as far as this")


def test_a_worker_that_cannot_begin_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="ended with 3 before it had begun"):
        run_workers(2, _CannotBeLoaded())


def test_a_slice_saves_stops_and_the_next_one_ends_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, tokens=64 * 6, slice_minutes=1e-6)
    figures = None
    for step in range(1, 7):
        assert figures is None
        trainer = TargetTrainer(config, toy_stream(), toy_stream(2000), tmp_path)
        assert trainer.resume() == (step > 1)
        figures = trainer.train()
        assert trainer.state.step == step
    assert figures is not None and figures["tokens"] == 64 * 6
    assert (tmp_path / "model.safetensors").is_file()


def test_a_budget_in_tokens_ends_with_them_whatever_the_minutes(tmp_path: Path) -> None:
    config = replace(CONFIG, tokens=64 * 5, minutes=1e-9)
    figures = TargetTrainer(config, toy_stream(), toy_stream(2000), tmp_path).train()
    assert figures is not None and figures["tokens"] == 64 * 5


def test_a_suspended_step_counts_as_four() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 603.0, 604.0, 644.0])
    clock = StepClock(lambda: next(times))
    assert [clock.lap_s() for _ in range(5)] == [1.0, 1.0, 1.0, 4.0, 1.0]
    assert clock.lap_s(is_step=False) == 40.0


def test_a_batch_that_workers_cannot_share_is_refused() -> None:
    assert Group(1, 2).own(6) == slice(3, 6)
    with pytest.raises(ValueError, match="--workers 2 does not divide a batch of 5 rows"):
        Group(0, 2).own(5)


def test_muon_makes_only_its_share_of_the_matrices() -> None:
    calls: list[int] = []

    class Half(Group):
        def add_up(self, tensors) -> None:  # type: ignore[no-untyped-def]
            calls.append(sum(bool(tensor.any()) for tensor in tensors))

    params = [torch.ones(4, 4).requires_grad_() for _ in range(6)]
    for param in params:
        param.grad = torch.randn(4, 4)
    Muon(params, group=Half(1, 2)).step()
    assert calls == [3]
    assert SOLO.is_first
