"""The target's trainer on a toy: it learns, deepens without a jump, and resumes where it stopped."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training.common.model import ModelConfig, create_model, grow, num_params, save_model
from outrider.training.common.schedule import Phase, Schedule, phase_at
from outrider.training.target.train import TargetConfig, TargetTrainer
from outrider.training.target.unlikelihood import UnlikelihoodConfig

TOY = ModelConfig(
    32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64, tied=False, vocab_size=64
)
CONFIG = TargetConfig(
    model=TOY,
    tokens=64 * 120,
    phases=(Phase(0.0, 16, 4, num_layers=1), Phase(0.5, 32, 2, num_layers=2, functions=0.5)),
    unlikelihood=UnlikelihoodConfig(start=0.75, prompt=4, tokens=20, rows=8, step_rows=4, weight=0.01),
    schedule=Schedule(decay_start=0.5),
    validation_tokens=1100,
    num_threads=1,
)


def toy_stream(num_tokens: int = 6000) -> np.ndarray:
    """A cycle of 8 ids with noise: easy to learn, not trivial."""
    rng = np.random.default_rng(0)
    return np.where(
        rng.random(num_tokens) < 0.1, rng.integers(0, 64, num_tokens), np.arange(num_tokens) % 8
    ).astype(np.uint16)


def test_growing_changes_no_output_and_every_new_layer_gets_a_gradient() -> None:
    model = create_model(TOY, 1)
    torch.nn.init.normal_(model.model.layers[0].mlp.down_proj.weight, std=0.1)
    ids = torch.randint(0, 64, (2, 9))
    before = model(input_ids=ids, use_cache=False).logits
    grown = grow(model, 3)
    torch.testing.assert_close(grown(input_ids=ids, use_cache=False).logits, before)
    grown(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert len(grown.model.layers) == grown.config.num_hidden_layers == 3
    assert all(layer.mlp.down_proj.weight.grad.abs().sum() > 0 for layer in grown.model.layers)
    with pytest.raises(ValueError, match="cannot grow"):
        grow(grown, 4)


def test_training_learns_deepens_and_saves_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = TargetTrainer(CONFIG, toy_stream(), toy_stream(2000), tmp_path)
    figures = trainer.train()
    assert figures is not None
    assert figures["validation_loss"]["last"] < 2.5 < trainer.history[0]["loss"]
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.num_hidden_layers == 2
    assert num_params(loaded) == num_params(trainer.model)


def test_a_resumed_run_takes_the_next_step_exactly_as_the_unbroken_one(tmp_path: Path) -> None:
    unbroken = TargetTrainer(CONFIG, toy_stream(), toy_stream(2000), tmp_path)
    for done in (0.1, 0.2, 0.6, 0.7):
        unbroken._step(done)
    unbroken._save()
    expected = unbroken._step(0.8)[1], unbroken._step(0.9)[1]
    resumed = TargetTrainer(replace(CONFIG, seed=CONFIG.seed), toy_stream(), toy_stream(2000), tmp_path)
    assert resumed.resume()
    assert (resumed._step(0.8)[1], resumed._step(0.9)[1]) == pytest.approx(expected, abs=1e-6)


def test_a_warm_start_keeps_the_record_of_what_went_before(tmp_path: Path) -> None:
    first = TargetTrainer(
        replace(CONFIG, tokens=64 * 3), toy_stream(), toy_stream(2000), tmp_path / "1/target"
    )
    assert first.train() is not None
    (tmp_path / "1/target/training.json").rename(tmp_path / "1/training-target.json")
    second = TargetTrainer(
        replace(CONFIG, tokens=64 * 2), toy_stream(), toy_stream(2000), tmp_path / "2/target"
    )
    second.warm_start(tmp_path / "1/target")
    assert len(second.model.model.layers) == 2
    figures = second.train()
    assert figures is not None
    assert [(run["tokens"], run["steps"]) for run in figures["before"]] == [(64 * 3, 3)]


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert not TargetTrainer(CONFIG, toy_stream(), toy_stream(2000), tmp_path).resume()


def test_saved_shards_stay_under_fifteen_megabytes(tmp_path: Path) -> None:
    save_model(create_model(replace(TOY, hidden_size=512, ffn_size=2048, vocab_size=8192)), tmp_path)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert max(path.stat().st_size for path in shards) <= 15_000_000


def test_the_schedule_warms_up_holds_and_decays_to_its_floor() -> None:
    schedule = Schedule(warmup=0.1, decay_start=0.5, final=0.02)
    assert [round(schedule.scale(done), 2) for done in (0.0, 0.05, 0.1, 0.49, 0.75, 1.0)] == [
        0.05,
        0.5,
        1,
        1,
        0.5,
        0.02,
    ]
    phases = (Phase(0.0, 8, 1, 1), Phase(0.5, 16, 1, 2))
    assert [phase_at(phases, done).length for done in (0.0, 0.49, 0.5, 1.0)] == [8, 8, 16, 16]
