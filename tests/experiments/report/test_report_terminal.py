"""What a terminal shows of a sweep: the verdict of the report, and every cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.results_folders import Folder, Plan, Times, make_folder, matrix

from outrider.experiments.report.cautions import cautions
from outrider.experiments.report.headline import headlines
from outrider.experiments.report.terminal import lines_of
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import Metric, Results


def view_of(folder: Folder) -> View:
    results = Results(Path("nowhere"), folder.manifest, folder.requests, folder.rounds, [], folder.sweep)
    return View(results, folder.sweep)


def test_the_first_lines_are_the_reports_and_losses_come_first() -> None:
    view = view_of(make_folder(matrix((1, 30, 200)), seed=1))
    (said,) = headlines(view)
    lines = list(lines_of(view))
    assert lines[0].startswith("stand-in: 10 cells, ")
    told = lines[1 : 1 + len(said.statements)]
    assert [line[6:] for line in told] == [each.text for each in said.statements]
    assert told[0].startswith("LOSES Co-located is ") and not told[-1].startswith("LOSES")


def test_cells_that_lose_most_head_the_table() -> None:
    view = view_of(make_folder(matrix((1, 60)), Times(draft_ms=60), num_prompts=2, num_tokens=16))
    lines = list(lines_of(view))
    table = lines[lines.index("") + 2 :]
    assert table[0].startswith(("rtt1 ", "rtt60 ")) and "speculative" in table[0]
    ratios = [line.split("x ")[0].split()[-1] for line in table if "speculative" in line]
    assert ratios == sorted(ratios, key=float)


def test_a_difference_within_the_a_a_spread_is_no_loss_on_either_page() -> None:
    plans = matrix((1,))
    folder = make_folder([*plans, replace(plans[2], twin=plans[2].name, baseline="")])
    folder.sweep.comparisons[:] = [
        replace(each, ratio=0.9, low=0.85, high=0.95) for each in folder.sweep.comparisons
    ]
    folder.sweep.cells[-1].a_a["tpot_ms"] = {"speedup": 0.99, "low": 0.98, "high": 1.0}
    assert any(line.startswith("LOSES") for line in lines_of(view_of(folder)))
    folder.sweep.cells[-1].a_a["tpot_ms"] = {"speedup": 0.8, "low": 0.7, "high": 0.9}
    assert not any(line.startswith("LOSES") for line in lines_of(view_of(folder)))


def test_a_wrong_text_is_said_before_everything_else() -> None:
    folder = make_folder(matrix((1,)))
    wrong = folder.sweep.cells[2]
    texts = replace(wrong.texts, num_compared=12, num_different=2, examples=["a/0/0/p"])
    folder.sweep.cells[2] = replace(wrong, texts=texts)
    folder.sweep = replace(folder.sweep, num_different_texts=2)
    lines = list(lines_of(view_of(folder)))
    assert lines[0] == "TEXTS DIFFER: 2 texts are not cloud-only's that must be:"
    assert lines[1] == f"  {wrong.id}: 2 of 12: a/0/0/p"


def test_what_limits_the_figures_is_said_as_in_the_report() -> None:
    folder = make_folder(matrix((1,), is_synthetic=True))
    folder.sweep.cells[0] = replace(folder.sweep.cells[0], num_errors=3)
    folder.sweep = replace(folder.sweep, is_complete=False, missing_baselines=["edge-only"])
    view = view_of(folder)
    lines = list(lines_of(view))
    assert "SYNTHETIC MODELS" in lines[0] and "interrupted: --resume goes on" in lines[0]
    assert lines[-len(cautions(view)) :] == cautions(view)
    assert any("3 requests ended with an error" in line for line in lines)


@pytest.mark.parametrize("mode", ["speculative", "auto"])
def test_a_cell_that_keeps_tokens_unverified_is_no_exact_winner_and_its_losses_are_told(mode: str) -> None:
    """As a gate that commits does: the method is exact, the text is not."""
    plans = matrix((1,))
    folder = make_folder([*plans, Plan(plans[0].link, mode=mode, variant="gate commit")])
    gated = folder.sweep.cells[-1]
    gated.metrics["tpot_ms"] = Metric(0.5, "ms", 0.4, 0.6, 12)
    gated.metrics["unverified_share"] = Metric(0.25, "share")
    gated.metrics["target_nats_per_token"] = Metric(2.0, "nats")
    folder.sweep.cells[0].metrics["target_nats_per_token"] = Metric(1.5, "nats")
    folder.sweep.cells[-1] = replace(gated, texts=replace(gated.texts, share_equal=0.4))
    view = view_of(folder)
    (said,) = headlines(view)
    assert all(row.arm.startswith("speculative") and "gate" not in row.arm for row in said.rows)
    (told,) = [line for line in cautions(view) if "is not exact" in line]
    assert "on rtt1: 25 % of its tokens the target never confirmed; 40 % are cloud-only's" in told
    assert "loss of the text is 2 nats a token, cloud-only's 1.5" in told
