"""Training heads: what they learn from, resumption, the directory they are saved in, and refusals by name."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from support.models import add_token, make_tokenizer

from outrider.common.models.fingerprint import num_tokens, target_fingerprint
from outrider.training.common.model import create_model, save_model
from outrider.training.common.optim import Muon
from outrider.training.draft.drafts import num_common_ids
from outrider.training.heads.command import main
from outrider.training.heads.directory import read_heads, write_heads
from outrider.training.heads.joint import JointConfig, JointTrainer
from outrider.training.heads.model import KINDS, Heads, HeadsShape
from outrider.training.heads.trainer import HeadsConfig, HeadsTrainer
from tests.training.test_target import TOY, toy_stream
from tests.training.toy_heads import SHORT, kl, make_toy_heads_target, train_whole_and_in_slices

CONFIG = HeadsConfig(
    shape=HeadsShape(num_heads=3, num_blocks=2),
    tokens=64 * 60,
    rows_share=1.0,
    **SHORT,
)
both_kinds = pytest.mark.parametrize("kind", sorted(KINDS))


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_heads_target(tmp_path_factory.mktemp("target"))


def config_of(kind: str) -> HeadsConfig:
    return replace(CONFIG, shape=replace(CONFIG.shape, kind=kind))


def shaken(heads: Heads) -> Heads:
    """The same heads with weights that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in heads.parameters():
            param.normal_(std=0.2, generator=generator)
    return heads


@both_kinds
def test_heads_come_nearer_their_target_which_stays_as_it_is(
    kind: str, target_dir: Path, tmp_path: Path
) -> None:
    trainer = HeadsTrainer(config_of(kind), target_dir, toy_stream(), tmp_path)
    before = {name: value.clone() for name, value in trainer.target.state_dict().items()}
    figures = trainer.train()
    assert figures is not None and figures["sampled_tokens"] >= 150
    assert figures["loss"] < 0.9 * trainer.history[0]["loss"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.target.state_dict().items())
    muon, _ = trainer.optimizers
    assert isinstance(muon, Muon)
    assert {param.ndim for group in muon.param_groups for param in group["params"]} == {2}


@both_kinds
def test_a_head_learns_the_targets_row_of_the_token_it_guesses(
    kind: str, target_dir: Path, tmp_path: Path
) -> None:
    trainer = HeadsTrainer(config_of(kind), target_dir, toy_stream(), tmp_path)
    heads, target = shaken(trainer.model), trainer.target
    ids = torch.from_numpy(trainer.corpus.next(16, 2))
    with torch.no_grad():
        hidden = target.model(input_ids=ids[:, :-1]).last_hidden_state  # [rows, length, size]
        embedded = target.get_input_embeddings()(ids[:, :-1])
        expected, weights = 0.0, 0.0
        for k, head in enumerate(heads.heads):
            values = [
                kl(target.lm_head(hidden[row, t + k + 1]), target.lm_head(guess))
                for row in range(2)
                for t in range(2 - k, 16 - k - 1)  # row t + k + 1 is taught, and every head by the same rows
                for guess in [
                    head(hidden[row, t], [embedded[row, t + step] for step in range(1, k + 2)])
                    if kind == "hydra"
                    else head(hidden[row, t])
                ]
            ]
            expected += 0.8 ** (k + 1) * float(torch.stack(values).mean())
            weights += 0.8 ** (k + 1)
    loss, shown = trainer._loss(ids, 0.0)
    assert float(shown) == pytest.approx(expected / weights, rel=1e-4)
    torch.autograd.backward(loss)
    assert all(param.grad is not None and param.grad.abs().max() > 0 for param in heads.parameters())


@both_kinds
def test_slices_of_one_run_give_the_same_weights(kind: str, target_dir: Path, tmp_path: Path) -> None:
    config = replace(config_of(kind), tokens=64 * 4, rows_share=0.5)
    directories = train_whole_and_in_slices(HeadsTrainer, config, target_dir, tmp_path)
    whole, parts = ((each / "model.safetensors").read_bytes() for each in directories)
    assert whole == parts


def test_a_joint_run_moves_the_target_too_and_saves_both(target_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    given = {each.name: getattr(CONFIG, each.name) for each in fields(CONFIG)}
    config = JointConfig(**given | {"tokens": 64 * 40, "target_rates": 0.05})
    trainer = JointTrainer(config, target_dir, toy_stream(), tmp_path)
    before, start = trainer.target.state_dict(), trainer.model.target.state_dict()
    assert all(torch.equal(start[name], value.float()) for name, value in before.items())
    figures = trainer.train()
    assert figures is not None and figures["loss"] < 0.9 * trainer.history[0]["loss"]
    assert 0 < figures["divergence"] < 0.2
    saved = AutoModelForCausalLM.from_pretrained(str(tmp_path / "target")).state_dict()
    moved = {
        name for name, value in before.items() if not torch.equal(saved[name].bfloat16(), value.bfloat16())
    }
    assert moved and not any("embed" in name or "lm_head" in name for name in moved)
    _, heads = read_heads(tmp_path)
    assert heads["outrider"]["target_fingerprint"] == target_fingerprint(tmp_path / "target")
    resumed = JointTrainer(config, target_dir, toy_stream(), tmp_path)
    assert resumed.resume() and resumed.divergences == trainer.divergences


def test_heads_are_trained_on_from_a_directory(target_dir: Path, tmp_path: Path) -> None:
    write_heads(shaken(Heads(CONFIG.shape, TOY.hidden_size)), target_dir, tmp_path)
    trainer = HeadsTrainer(CONFIG, target_dir, toy_stream(), tmp_path, heads_dir=tmp_path)
    found, _ = read_heads(tmp_path)
    assert all(
        torch.equal(value, found.state_dict()[name]) for name, value in trainer.model.state_dict().items()
    )
    with pytest.raises(ValueError, match=r"--heads .* are 32 wide"):
        HeadsTrainer(config_of("hydra"), target_dir, toy_stream(), tmp_path, heads_dir=tmp_path)


def test_text_of_an_earlier_run_is_not_written_again_and_another_targets_is_refused(
    target_dir: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, tokens=64 * 2)
    first = HeadsTrainer(config, target_dir, toy_stream(), tmp_path / "first")
    assert first.train()
    second = HeadsTrainer(config, target_dir, toy_stream(), tmp_path / "second", text_of=tmp_path / "first")
    assert not second.target_text.is_short
    assert torch.equal(torch.cat(second.target_text.rows), torch.cat(first.target_text.rows))
    with pytest.raises(ValueError, match=r"--text-of .*nowhere has no finished run"):
        HeadsTrainer(config, target_dir, toy_stream(), tmp_path, text_of=tmp_path / "nowhere")
    other = tmp_path / "other"
    save_model(create_model(TOY), other)
    with pytest.raises(ValueError, match="was written by another target"):
        HeadsTrainer(config, other, toy_stream(), tmp_path, text_of=tmp_path / "first")


def test_the_directory_has_medusas_published_layout_and_ours_under_one_key(
    target_dir: Path, tmp_path: Path
) -> None:
    write_heads(Heads(HeadsShape("medusa", 2, 2), 32), target_dir, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "base_model_name_or_path": target_dir.name,
        "outrider": {
            "format_version": 1,
            "kind": "medusa",
            "hidden_size": 32,
            "target_fingerprint": target_fingerprint(target_dir),
            "shares_output_embedding": True,
        },
    }
    blocks = [f"{head}.{block}.linear" for head in (0, 1) for block in (0, 1)]
    assert tensors_of(tmp_path) == {
        **{f"{block}.weight": ((32, 32), torch.float16) for block in blocks},
        **{f"{block}.bias": ((32,), torch.float16) for block in blocks},
    }


def test_hydras_inputs_are_beside_its_blocks(target_dir: Path, tmp_path: Path) -> None:
    write_heads(Heads(HeadsShape("hydra", 2, 1), 32), target_dir, tmp_path)
    assert {name: shape for name, (shape, _) in tensors_of(tmp_path).items()} == {
        "0.inputs.weight": (32, 64),
        "0.inputs.bias": (32,),
        "0.0.linear.weight": (32, 32),
        "0.0.linear.bias": (32,),
        "1.inputs.weight": (32, 96),
        "1.inputs.bias": (32,),
        "1.0.linear.weight": (32, 32),
        "1.0.linear.bias": (32,),
    }


def tensors_of(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@both_kinds
def test_saved_heads_are_read_again(kind: str, target_dir: Path, tmp_path: Path) -> None:
    heads = shaken(Heads(HeadsShape(kind, 3, 2), 32))
    write_heads(heads, target_dir, tmp_path)
    found, _ = read_heads(tmp_path)
    assert found.shape == heads.shape
    for name, value in found.state_dict().items():
        assert torch.equal(value, heads.state_dict()[name].half().float()), name
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--heads"):
        read_heads(tmp_path)


def test_special_ids_without_a_row_do_not_exist(tmp_path: Path) -> None:
    """Gemma 3's 1B has a token for images and no row for it."""
    make_tokenizer(tmp_path)
    number = num_tokens(tmp_path / "tokenizer.json")
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Embedding(number, 2))
    add_token(tmp_path / "tokenizer.json", number)
    assert num_common_ids(tmp_path, model) == number
    add_token(tmp_path / "tokenizer.json", number + 1, is_special=False)
    with pytest.raises(ValueError, match=f"but the embedding only {number} rows"):
        num_common_ids(tmp_path, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("medusa --num-heads 0", "--num-heads 0: give at least 1"),
        ("medusa --num-blocks 0", "--num-blocks 0: medusa takes at least 1"),
        ("hydra --target-share 1.5", "--target-share 1.5"),
        ("hydra --rows-share 0", "--rows-share 0.0"),
        ("medusa --length 4", "--length: windows longer than the 4 heads look ahead"),
        ("medusa --batch-tokens 64", "--batch-tokens 64: at least one window of --length 256"),
        ("medusa --tokens 0", "--tokens must be above 0"),
        ("medusa --joint --heads-alone 1", "--heads-alone 1.0"),
        ("medusa --joint --target-rates 0", "--heads-weight and --target-rates must be above 0"),
        ("medusa --heads nowhere", "--heads nowhere has no heads of this training"),
        ("medusa --text-of nowhere", "--text-of nowhere has no finished run"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: str, message: str, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    import numpy as np

    np.savez(data / "train.npz", train=toy_stream())
    np.savez(data / "functions.npz", functions=toy_stream(2000))
    given = f"heads {options} --target {target_dir} --data {data} --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", given.split())
    with pytest.raises(SystemExit, match=message):
        main()
