"""Variants of a draft trained from one target and judged by their INT4 graphs."""

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.training.common.schedule import Phase
from outrider.training.data.prompts import Prompt, save_prompts
from outrider.training.draft.distiller import DistillConfig
from outrider.training.judge.compare import VARIANTS, Comparison, Variant, table
from outrider.training.judge.yardstick import Costs, Yardstick

DETAILS = {
    "parts_ms": {"target_ms": 5.0, "verify_ms": 7.0, "overhead_ms": 2.0},
    "forwards": {"float32": {"forward_ms": {"1": 5.0, "5": 6.0, "9": 7.0}}},
}
CONFIG = DistillConfig(
    phases=(Phase(0.0, 32, 8),),
    tokens=1024,
    target_text_tokens=2000,
    sample_rows=8,
    num_threads=1,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("target"), "llama", vocab=448, hidden=64, num_layers=2)


@pytest.fixture
def costs(tmp_path: Path) -> Costs:
    (tmp_path / "main.json").write_text(json.dumps({"details": DETAILS}))
    return Costs.read(tmp_path / "main.json")


def test_costs_are_the_benchmarks(costs: Costs) -> None:
    assert costs == Costs(
        target_token_s=0.005,
        verify_fixed_s=pytest.approx(0.006),  # type: ignore[arg-type]
        verify_token_s=pytest.approx(0.00025),  # type: ignore[arg-type]
        overhead_s=0.002,
    )


def test_variants_share_the_targets_text_and_what_is_done_is_kept(
    target: Path, costs: Costs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VARIANTS, "fkl", Variant(size="32x1"))
    monkeypatch.setitem(VARIANTS, "easiest 40 %", Variant({"easy_share": 0.4}, "32x1", reference="fkl"))
    stream = np.tile(np.arange(1, 400, dtype=np.uint16), 20)
    comparison = Comparison(CONFIG, target, stream, tmp_path / "runs")
    selected = comparison.run("easiest 40 %")
    reference = comparison.run("fkl")  # trained before, as the reference
    assert json.loads((selected / "training.json").read_text())["config"]["easy_share"] == 0.4
    assert not (reference / "checkpoint.pt").exists()
    assert len(comparison._known) == 4  # both saw the same 4 batches; the target answered once
    written = (reference / "training.json").stat().st_mtime_ns
    assert Comparison(CONFIG, target, stream, tmp_path / "runs").run("fkl") == reference
    assert (reference / "training.json").stat().st_mtime_ns == written


def test_the_target_itself_is_the_best_draft(target: Path, costs: Costs, tmp_path: Path) -> None:
    from outrider.training.common.model import save_model
    from outrider.training.draft.drafts import copy_tokenizer, create_draft, draft_shape, load_target

    save_prompts([Prompt("a", "def function_1("), Prompt("b", "return value_3")], tmp_path / "prompts.jsonl")
    yardstick = Yardstick(target, tmp_path / "prompts.jsonl", costs, num_prompts=2, num_new=24)
    import torch

    model = load_target(target, torch.float32)
    save_model(create_draft(draft_shape("32x1", 448, 512), model), tmp_path / "new", torch.float32)
    copy_tokenizer(target, tmp_path / "new")
    rows = {"itself": yardstick.measure(target), "new": yardstick.measure(tmp_path / "new")}
    assert rows["itself"]["overlap"] > 0.7 > rows["new"]["overlap"]
    assert rows["itself"]["tokens_per_round_4"] > rows["new"]["tokens_per_round_4"] >= 1
    for row in rows.values():
        assert row["loopback"]["tokens_per_s"] > row["rtt_50ms"]["tokens_per_s"] > 0
        assert row["rtt_50ms"]["num_draft_tokens"] >= row["loopback"]["num_draft_tokens"]
    assert table(rows).splitlines()[2].startswith("| itself | 0.1 M | ")
