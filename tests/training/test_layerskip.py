"""Training a target whose first layers draft: what learns from what, dropout, resumption, what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.common.models.fingerprint import target_fingerprint
from outrider.training.heads.layerskip import LayerSkipConfig, LayerSkipTrainer
from tests.training.test_target import toy_stream
from tests.training.toy_heads import SHORT, kl, make_toy_heads_target, train_whole_and_in_slices

NUM_LAYERS = 4
CONFIG = LayerSkipConfig(
    exit_layer=2,
    tokens=64 * 60,
    rows_share=1.0,
    **SHORT,
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_heads_target(tmp_path_factory.mktemp("target"), NUM_LAYERS)


def test_the_exit_comes_nearer_and_what_is_written_names_the_new_target(
    target_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = LayerSkipTrainer(CONFIG, target_dir, toy_stream(), tmp_path)
    before = {name: value.clone() for name, value in trainer.target.state_dict().items()}
    figures = trainer.train()
    assert figures is not None and figures["loss"] < 0.8 * trainer.history[0]["loss"]
    assert 0 < figures["divergence"] < figures["loss"]
    saved = AutoModelForCausalLM.from_pretrained(str(tmp_path / "target")).state_dict()
    moved = {
        name for name, value in before.items() if not torch.equal(saved[name].bfloat16(), value.bfloat16())
    }
    assert moved and not any("embed" in name or "lm_head" in name for name in moved)
    assert json.loads((tmp_path / "config.json").read_text())["outrider"] == {
        "format_version": 1,
        "kind": "early_exit",
        "layers": [0, 1],
        "target_fingerprint": target_fingerprint(tmp_path / "target"),
    }


def test_all_exits_learn_the_targets_row_by_its_own_norm_with_the_weights_of_the_step(
    target_dir: Path, tmp_path: Path
) -> None:
    trainer = LayerSkipTrainer(replace(CONFIG, exit_scale=0.5), target_dir, toy_stream(), tmp_path)
    trainer.state.step = 1  # the turn of the exit after layer 3
    target = trainer.target
    ids = torch.from_numpy(trainer.corpus.next(16, 2))
    with torch.no_grad():
        out = target.model(input_ids=ids[:, :-1], output_hidden_states=True)
        teacher = target.lm_head(out.last_hidden_state).flatten(0, 1)

        def exit_loss(layer: int) -> float:
            rows = target.lm_head(target.model.norm(out.hidden_states[layer])).flatten(0, 1)
            return float(torch.stack([kl(*pair) for pair in zip(teacher, rows, strict=True)]).mean())

        weighted = exit_loss(2) + 0.5 * (3 * 4) / (4 * 3) * exit_loss(3)
    loss, shown = trainer._loss(ids, 0.0)
    assert float(loss.detach()) == pytest.approx(weighted, rel=1e-4)  # the target's own is 0 at first
    assert float(shown) == pytest.approx(exit_loss(2), rel=1e-4)


def test_the_other_exits_take_turns() -> None:
    turns = [CONFIG.exits(5, step) for step in range(4)]
    assert [sorted(each) for each in turns] == [[1, 2], [2, 3], [2, 4], [1, 2]]
    assert all(each[2] == 1.0 for each in turns) and turns[2][4] == pytest.approx(0.2)
    assert replace(CONFIG, exit_scale=0.0).exits(5, 1) == {2: 1.0}


def test_dropout_rises_over_depth_and_over_the_run_and_a_dropped_layer_adds_nothing(
    target_dir: Path, tmp_path: Path
) -> None:
    rates = [[CONFIG.dropout(layer, 5, done) for layer in range(5)] for done in (0.0, 0.5, 1.0)]
    assert rates[0] == [0.0] * 5
    assert rates[1][0] == 0 and rates[1] == sorted(rates[1]) and rates[1][4] < rates[2][4]
    assert rates[2][4] == pytest.approx(0.1)
    trainer = LayerSkipTrainer(CONFIG, target_dir, toy_stream(), tmp_path)
    ids = torch.from_numpy(trainer.corpus.next(16, 2))[:, :-1]
    with torch.no_grad():
        trainer.layers.watch([1, 2, 3], [0.0, 0.0, 1.0, 0.0], np.random.default_rng(0), 2)
        trainer.model.model(input_ids=ids)
    states = trainer.layers.states
    assert torch.equal(states[3], states[2]) and not torch.equal(states[2], states[1])


def test_slices_of_one_run_give_the_same_weights(target_dir: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, tokens=64 * 4, rows_share=0.5, layer_dropout=0.9)
    directories = train_whole_and_in_slices(LayerSkipTrainer, config, target_dir, tmp_path)
    whole, parts = ((each / "target/model.safetensors").read_bytes() for each in directories)
    assert whole == parts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_layer": 4}, "--exit-layer 4: want 1 to 3 of 4"),
        ({"exit_layer": 0}, "--exit-layer 0: want 1 to 3 of 4"),
        ({"layer_dropout": 1.0}, "--layer-dropout 1.0: give a share"),
        ({"exit_weight": 0.0}, "--exit-weight and --target-rates must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, float], message: str, target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSkipTrainer(replace(CONFIG, **fields), target_dir, toy_stream(), tmp_path)
