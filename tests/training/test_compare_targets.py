"""Variants of the target's recipe: each differs in what its name says, and what is done is kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from outrider.training.common.model import ModelConfig, create_model
from outrider.training.common.muon import Muon
from outrider.training.common.optim import Rates, make_optimizers
from outrider.training.common.schedule import Phase
from outrider.training.judge.compare_targets import _BASE, VARIANTS, run_variant, table

TOY = ModelConfig(
    32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64, tied=False, vocab_size=64
)
CONFIG = replace(
    _BASE,
    model=TOY,
    tokens=1024,
    phases=(Phase(0.0, 16, 4, num_layers=2),),
    validation_tokens=1100,
    num_threads=1,
)


def test_every_variant_is_another_recipe_with_batches_of_whole_windows() -> None:
    configs = [replace(_BASE, **changes) for changes in VARIANTS.values()]
    assert len({repr(config) for config in configs}) == len(VARIANTS)
    for config in configs:
        assert len({phase.length * phase.rows for phase in config.phases}) == 1


def test_adamw_takes_the_matrices_where_it_has_a_rate() -> None:
    model = create_model(TOY)
    every = set(model.parameters())
    for rates, kinds in ((Rates(), [Muon, None]), (Rates(adamw=0.002), [None])):
        optimizers = make_optimizers(model, rates)
        assert [isinstance(each, Muon) for each in optimizers] == [kind is Muon for kind in kinds]
        owned = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        assert len(owned) == len(every) and set(owned) == every
    assert Rates(adamw=0.002).times(0.5).adamw == 0.001


def test_a_variant_is_trained_once_and_leaves_its_figures(tmp_path: Path) -> None:
    stream = np.tile(np.arange(1, 60, dtype=np.uint16), 80)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "functions"):
        np.savez_compressed(data / f"{name}.npz", **{name: stream})
    runs = tmp_path / "runs"
    rows = {name: run_variant(name, CONFIG, data, runs) for name in ("base", "AdamW, 0.003")}
    files = sorted(path.relative_to(runs).as_posix() for path in runs.rglob("*") if path.is_file())
    assert files == ["AdamW,-0.003/training.json", "base/training.json"]
    assert rows["base"]["validation_loss"] != rows["AdamW, 0.003"]["validation_loss"]
    written = (runs / "base" / "training.json").stat().st_mtime_ns
    assert run_variant("base", CONFIG, data, runs) == rows["base"]
    assert (runs / "base" / "training.json").stat().st_mtime_ns == written
    assert table(rows).splitlines()[2].startswith("| base | 0.00 M | ")
