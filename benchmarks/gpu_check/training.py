"""The preset `gpu30m` for a few steps over a random stream: tokens a second, eager and compiled."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.environment import product_tflops
from benchmarks.gpu_check.stage import Report, Setting
from outrider.training.common.compute import Compute
from outrider.training.common.model import ModelConfig, num_params
from outrider.training.common.schedule import Phase
from outrider.training.target.train import PRESETS, TargetConfig, TargetTrainer
from outrider.training.target.unlikelihood import UnlikelihoodConfig

NUM_STEPS, NUM_WARMUP = 12, 4
TOY = ModelConfig(
    32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64, tied=True, vocab_size=64
)


def run(setting: Setting, report: Report) -> None:
    """Trains twice from the start."""
    ceiling = product_tflops(setting)
    for name, is_compiled in (("eager", False), ("compiled", True)):
        if is_compiled and setting.is_rehearsal:
            report.skip(name, "a rehearsal compiles no C++")
            continue
        if setting.seconds_left < 15 and not setting.is_rehearsal:
            report.skip(name, "the stage's time is over")
            continue
        tokens_per_s, num_weights = train(setting, is_compiled)
        share = 6 * num_weights * tokens_per_s / 1e12 / ceiling
        report.figure(f"gpu.training.{name}", f"gpu30m, {name}", tokens_per_s, "tokens/s")
        report.figure(
            f"gpu.training_share.{name}", "6 x weights x tokens : the product's rate", share, "ratio"
        )


class TimedTrainer(TargetTrainer):
    """Trains and keeps nothing: to validate once would be to compile once more."""

    def _finish(self) -> dict[str, Any]:
        return {}


def train(setting: Setting, is_compiled: bool) -> tuple[float, int]:
    """Returns the tokens a second after the first steps, and the number of weights."""
    config = make_config(setting, is_compiled)
    stream = np.random.default_rng(0).integers(
        0, config.model.vocab_size, 2 * _batch(config) + config.validation_tokens
    )
    with tempfile.TemporaryDirectory() as out:
        trainer = TimedTrainer(config, stream.astype(np.uint16), stream[:4096].astype(np.uint16), Path(out))
        trainer.train()
        first, last = trainer.history[NUM_WARMUP - 1], trainer.history[-1]
        seconds = last["elapsed_s"] - first["elapsed_s"]
        return (last["tokens"] - first["tokens"]) / seconds, num_params(trainer.model)


def make_config(setting: Setting, is_compiled: bool) -> TargetConfig:
    """Returns the preset cut to a few steps of its first phase, without what comes late in a run."""
    preset = PRESETS["gpu30m"]
    phase = setting.pick(preset.phases[0], Phase(0.0, length=16, rows=8, num_layers=2))
    return replace(
        preset,
        model=setting.pick(preset.model, TOY),
        phases=(phase,),
        tokens=NUM_STEPS * phase.length * phase.rows,
        unlikelihood=UnlikelihoodConfig(start=2.0),
        micro_tokens=setting.pick(preset.micro_tokens, 64),
        validation_tokens=setting.pick(8192, 1100),
        num_threads=1,
        compute=Compute(setting.device, is_compiled),
    )


def _batch(config: TargetConfig) -> int:
    return config.phases[0].length * config.phases[0].rows
