"""What the report says is true of the folder it says it of. Nothing is drawn here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.results_folders import (
    CLOUD_ONLY,
    CO_LOCATED,
    Folder,
    Plan,
    Times,
    make_folder,
    make_manifest,
    matrix,
)

from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.report.cautions import cautions
from outrider.experiments.report.figures import (
    bandwidth,
    commit_gap,
    draft_length,
    outage,
    round_parts,
    speedup_map,
    tpot_rtt,
)
from outrider.experiments.report.findings import crossing, standings
from outrider.experiments.report.headline import headlines, statements
from outrider.experiments.report.naming import EDGE_ONLY, Arm
from outrider.experiments.report.numbers import plain, times
from outrider.experiments.report.tables import cells_table
from outrider.experiments.report.verdicts import Relation, verdicts
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import Comparison, Metric, Results

RTTS = (1, 30, 60, 200)


def view_of(folder: Folder) -> View:
    results = Results(Path("nowhere"), folder.manifest, folder.requests, folder.rounds, [], folder.sweep)
    return View(results, folder.sweep)


def kinds_of(view: View) -> list[list[str]]:
    return [[statement.kind for statement in each.statements] for each in headlines(view)]


@pytest.fixture(scope="module")
def mixed() -> View:
    """Speculation wins over cloud-only on short links and loses on long ones; co-located wins everywhere."""
    return view_of(make_folder(matrix(RTTS, (2, 4, 8)), seed=1))


def test_where_cloud_only_wins_everywhere_the_report_says_nothing_else() -> None:
    view = view_of(make_folder(matrix(RTTS), Times(draft_ms=60)))
    (headline,) = headlines(view)
    assert [statement.kind for statement in headline.statements] == ["loss", "loss"]
    assert "Cloud-only is" in headline.statements[1].text and "on every link" in headline.statements[1].text
    assert all(row.winner == "co-located" for row in headline.rows)
    finding = tpot_rtt.charts(view)[0].finding
    assert finding == (
        "Co-located beats speculation at every RTT measured (1 to 200 ms); "
        "cloud-only beats speculation at every RTT measured (1 to 200 ms)"
    )


def test_losses_come_before_wins(mixed: View) -> None:
    (kinds,) = kinds_of(mixed)
    assert set(kinds) >= {"loss", "win"} and kinds == sorted(kinds, key=["loss", "even", "win"].index)
    (headline,) = headlines(mixed)
    kinds = [row.kind for row in headline.rows]
    assert kinds == sorted(kinds, key=["loss", "even", "win", "note"].index)


def test_ratios_of_the_headline_are_those_of_the_comparisons(mixed: View) -> None:
    (headline,) = headlines(mixed)
    won = next(s.text for s in headline.statements if s.kind == "win" and "cloud-only" in s.text)
    best = {}
    for each in mixed.sweep.comparisons:
        cell = mixed.sweep.cell(each.cell)
        if each.kind == CLOUD_ONLY and cell.mode == "speculative" and each.low and each.low > 1:
            best[cell.rtt_ms] = max(each.ratio, best.get(cell.rtt_ms, 0))
    assert f"{times(min(best.values()))} to {times(max(best.values()))} times as fast as cloud-only" in won


def test_the_break_even_lies_between_the_last_win_and_the_first_loss(mixed: View) -> None:
    shaped = tpot_rtt.shape(mixed, mixed.settings[0])
    assert shaped is not None and shaped.break_even is not None and shaped.predicted_break_even is not None
    outcomes = {v.rtt_ms: v.outcomes[CLOUD_ONLY] for v in shaped.verdicts}
    assert outcomes[30] is Relation.BETTER and outcomes[200] is Relation.WORSE
    assert 30 < shaped.break_even < 200
    assert shaped.predicted_break_even == pytest.approx(shaped.break_even, rel=0.15)
    assert f"break-even with cloud-only near {plain(shaped.break_even)} ms" in tpot_rtt.finding(shaped)


def test_a_difference_smaller_than_between_equal_cells_is_none() -> None:
    folder = make_folder(
        [*matrix((1,)), replace(matrix((1,))[2], twin="rtt1 speculative fixed-4 T0.8", baseline="")]
    )
    speculation = next(cell.id for cell in folder.sweep.cells if cell.mode == "speculative")
    folder.sweep.comparisons[:] = [Comparison(speculation, "x", CLOUD_ONLY, "tpot_ms", 1.05, 1.02, 1.08, 12)]
    folder.sweep.cells[-1].a_a["tpot_ms"] = {"speedup": 0.99}
    assert kinds_of(view_of(folder)) == [["win"]]
    folder.sweep.cells[-1].a_a["tpot_ms"] = {"speedup": 0.9}
    assert kinds_of(view_of(folder)) == [["even"]]
    assert any("as 0.90" in line and "1 are no further" in line for line in cautions(view_of(folder)))


def test_without_an_interval_nobody_wins() -> None:
    folder = make_folder(matrix((1,)))
    folder.sweep.comparisons[:] = [replace(each, low=None, high=None) for each in folder.sweep.comparisons]
    assert kinds_of(view_of(folder)) == [["even", "even"]]


@pytest.mark.parametrize(
    ("signs", "told"),
    [
        ("++++", ["us beats them at every RTT measured (1 to 4 ms)"]),
        ("----", ["them beats us at every RTT measured (1 to 4 ms)"]),
        ("++--", ["them beats us from 3 ms RTT on", "us beats them up to 2 ms RTT"]),
        ("+=--", ["them beats us from 3 ms RTT on", "us beats them at 1 ms RTT"]),
        ("-+-=", ["them beats us at 1 and 3 ms RTT", "us beats them at 2 ms RTT"]),
        ("====", ["us and them cannot be told apart at every RTT measured (1 to 4 ms)"]),
        ("", []),
    ],
)
def test_standings_say_where_and_losses_first(signs: str, told: list[str]) -> None:
    meaning = {"+": Relation.BETTER, "-": Relation.WORSE, "=": Relation.EVEN}
    outcomes = {float(place): meaning[sign] for place, sign in enumerate(signs, start=1)}
    assert standings({"them": outcomes}, "us", "RTT", "ms") == told


def test_a_crossing_is_told_only_where_there_is_one() -> None:
    flat = {0.0: 2.0, 1.0: 2.0, 2.0: 2.0}
    assert crossing({0.0: 1.0, 1.0: 3.0, 2.0: 4.0}, flat) == 0.5
    assert crossing({0.0: 1.0, 1.0: 1.0, 2.0: 1.0}, flat) is None
    assert crossing({0.0: 3.0, 1.0: 1.0, 2.0: 3.0}, flat) is None


def test_the_fastest_draft_length_is_the_one_of_the_highest_rate(mixed: View) -> None:
    (chart,) = draft_length.charts(mixed)
    (shaped,) = draft_length.shapes(mixed, mixed.settings[0])
    for line in shaped.lines:
        best = max(line.measured, key=lambda n: line.measured[n].value)
        assert best in line.as_good
        assert str(best) in chart.finding and line.link in chart.finding.replace("every link", line.link)


def test_lengths_that_cannot_be_told_apart_are_a_range() -> None:
    folder = make_folder(matrix((1,), (2, 3, 4, 5)))
    for cell in folder.sweep.cells:
        cell.metrics["tpot_ms"] = replace(cell.metrics["tpot_ms"], value=10.0, low=9.0, high=11.0)
    (chart,) = draft_length.charts(view_of(folder))
    assert chart.finding == "Drafting 2 to 5 tokens is fastest on rtt1"


def test_trees_are_lines_of_their_own_beside_chains_and_named_in_plain_words() -> None:
    folder = make_folder(matrix((1, 50), (4, 8, 16)))
    for number, cell in enumerate(folder.sweep.cells):
        if cell.mode == "speculative" and cell.num_speculative_tokens == 16:
            tree = replace(cell, tree=16, num_speculative_tokens=None)
            metric = tree.metrics["tpot_ms"]
            tree.metrics["tpot_ms"] = replace(metric, value=1.0, low=0.9, high=1.1)
            folder.sweep.cells[number] = tree
    view = view_of(folder)
    chart = next(chart for chart in draft_length.charts(view) if "tree" in chart.finding)
    assert chart.finding == "Fastest on every link are trees of 16 tokens"
    assert {row[1] for row in chart.table.rows} == {"4", "8", "16, tree"}
    (shaped,) = [each for each in draft_length.shapes(view, view.settings[0]) if each.has_trees]
    assert [(line.link, line.is_tree) for line in shaped.lines] == [
        (link, is_tree) for link in ("rtt1", "rtt50") for is_tree in (False, True)
    ]
    labels = {view.label(Arm.of(cell)) for cell in view.cells if cell.tree == 16}
    assert len(labels) == 1 and "trees of 16 tokens" in labels.pop()
    table = cells_table(view)
    assert {row[table.columns.index("trees")] for row in table.rows} == {"off", "16"}


def test_the_map_counts_its_places(mixed: View) -> None:
    shaped = speedup_map.shape(mixed, mixed.settings)
    assert shaped is not None and shaped.rtts == list(RTTS)
    lost = [tile for tile in shaped.tiles if tile.comparison.high < 1]
    assert (
        f"co-located is faster in {len(lost)} of {len(shaped.tiles)} places"
        in speedup_map.finding(shaped).lower()
    )
    assert all(row.acceptance == pytest.approx(0.8, abs=0.05) for row in shaped.rows)


def test_gaps_have_the_quantiles_of_the_requests(mixed: View) -> None:
    values, low, high = commit_gap.quantiles([[1.0, 2.0], [3.0, 4.0, 5.0]], commit_gap.SHARES[[24]])
    assert (values[0], low[0] <= values[0] <= high[0]) == (3.0, True)
    shaped = commit_gap.shapes(mixed, mixed.settings[0])[0]
    steady = min(shaped.curves, key=lambda curve: curve.told[1][0])
    assert commit_gap.finding(shaped).lower().startswith(f"{steady.label} has the shortest long waits")


def test_parts_of_a_round_add_up_to_its_wall_time(mixed: View) -> None:
    for bar in round_parts.shape(mixed, mixed.settings[0]):
        assert sum(bar.parts.values()) == pytest.approx(bar.wall_ms, rel=0.02)
        assert bar.low <= bar.wall_ms <= bar.high and not bar.is_overlapping
        assert bar.largest == ("network" if bar.rtt_ms >= 60 else bar.largest)


def test_bandwidth_compares_links_that_differ_in_rate_alone() -> None:
    links = [
        LinkProfile(name=f"up{rate:g}", rtt_ms=30, up_mbit=rate, down_mbit=rate) for rate in (0.05, 1, 0)
    ]
    plans = [
        plan for link in links for plan in (Plan(link, CLOUD_ONLY, None, baseline=CLOUD_ONLY), Plan(link))
    ]
    view = view_of(make_folder([*plans, Plan(LinkProfile(name="other", rtt_ms=90))]))
    (shaped,) = bandwidth.shapes(view, view.settings[0])
    assert shaped.rates == [0.05, 1, float("inf")] and shaped.rtt_ms == 30
    slowed = {s.label: s.points[0][1].value / s.points[-1][1].value for s in shaped.series}
    finding = bandwidth.finding(shaped)
    assert finding.startswith("From no limit down to 0.05 Mbit/s")
    assert all(f"{times(ratio)} times" in finding for ratio in slowed.values())


def test_an_outage_tells_unverified_tokens_from_silence() -> None:
    link = LinkProfile(name="gone", rtt_ms=50, outages=(Outage(1, 2),))
    keeping = Plan(link, variant="first-token", on_timeout="first_token")
    view = view_of(make_folder([Plan(link, variant="wait"), keeping]))
    silent, marked = (outage.shape(view, cell) for cell in view.cells)
    assert silent is not None and silent.unverified == 0 and marked is not None and marked.unverified > 0
    assert "every one verified" in outage.finding(silent) or "writes nothing" in outage.finding(silent)
    assert "unverified" in outage.finding(marked)
    assert silent.back_after_s is not None and silent.back_after_s > 0
    num_requests = len(view.requests_of(view.cells[1]))
    assert marked.num_requests == num_requests > 1, "outages begin anew with each"
    during = [
        origin
        for row in view.requests_of(view.cells[1])
        for at_ms, origin in zip(row.token_times_ms, row.token_origins, strict=True)
        if 1 <= at_ms / 1e3 < 3
    ]
    assert marked.written == pytest.approx(len(during) / num_requests)


def test_edge_drafting_alone_is_told_apart_by_a_slow_draft() -> None:
    """Cloud-only and co-located belong to every draft's setting, as the sweep has them once."""
    plans = [
        *matrix((1, 60)),
        *(p for p in matrix((1, 60), min_draft_ms=10) if p.mode in ("speculative", EDGE_ONLY)),
    ]
    plans = [replace(plan, id=f"{plan.name} draft{plan.min_draft_ms:g}") for plan in plans]
    view = view_of(make_folder(plans))
    assert [setting.min_draft_ms for setting in view.settings] == [0, 10]
    for setting in view.settings:
        assert {Arm.of(cell).mode for cell in view.cells_of(setting)} == {
            "speculative",
            CLOUD_ONLY,
            CO_LOCATED,
        }
        edge_only = view.edge_only_of(setting)
        assert edge_only is not None and edge_only.min_draft_ms == setting.min_draft_ms


def test_every_reason_for_doubt_is_named() -> None:
    folder = make_folder(matrix((1, 30), is_synthetic=True), repeats=1)
    folder.manifest = make_manifest(is_dirty=True)
    wrong = folder.sweep.cells[0]
    folder.sweep.cells[0] = replace(wrong, texts=replace(wrong.texts, num_different=2), num_errors=3)
    folder.sweep.cells[1].metrics.clear()
    folder.sweep = replace(folder.sweep, is_complete=False, missing_baselines=["edge-only"])
    lines = "\n".join(cautions(view_of(folder)))
    words = (
        "2 texts",
        "interrupted",
        "synthetic",
        "uncommitted",
        "No A/A",
        "3 requests ended with an error",
    )
    for word in (*words, "1 cell without a figure", "1 repeats", "edge-only"):
        assert word in lines, word


def test_a_clean_folder_has_nothing_to_warn_of() -> None:
    first = matrix((1, 30))[2]
    folder = make_folder([*matrix((1, 30)), replace(first, twin=first.name, baseline="")], num_prompts=10)
    folder.sweep.cells[-1].a_a["tpot_ms"] = {"speedup": 1.0, "low": 1.0, "high": 1.0}
    assert cautions(view_of(folder)) == []


def test_load_calibration_and_few_requests_are_warned_of() -> None:
    folder = make_folder(matrix((1, 30)), num_prompts=4)
    points = [{"what": "rtt", "share": 0.4}, {"what": "rtt", "share": 2.5}]
    machine = {"cores": 2, "usable_cores": 2, "load_average": 1.3}
    lines = cautions(view_of(replace(folder, manifest=make_manifest(machine=machine, calibration=points))))
    assert "Other work ran when the sweep began: a load of 1.3 on 2 cores." in lines
    missed = "1 of 2 calibration points missed the nominal value by more than its tolerance, the worst by 2.5 times"
    assert any(line.startswith(missed) for line in lines)
    assert any(line.startswith("A point is the mean of 12 requests; fewer than 30") for line in lines)
    lines = cautions(view_of(replace(folder, manifest=make_manifest(calibration=[]))))
    assert "Whether the links gave their nominal delay was not measured with this sweep." in lines


def test_the_fastest_of_a_link_and_the_sentences_agree() -> None:
    """Speculation beats one rival there and cannot be told apart from the other: both are the fastest."""
    view = view_of(make_folder(matrix((1,))))
    (found,) = verdicts(view, view.settings[0])
    found = replace(found, outcomes={"cloud-only": Relation.BETTER, "co-located": Relation.EVEN})
    assert not found.winner and found.contenders == ["speculation", "co-located"]
    tags = [each.tag for each in statements([found])]
    assert tags == ["even with co-located", "faster than cloud-only"]


def test_one_cell_compares_with_nothing_and_says_so() -> None:
    view = view_of(make_folder([Plan(LinkProfile(name="lan", rtt_ms=0.5))]))
    assert kinds_of(view) == [["note"]]
    assert tpot_rtt.charts(view) == [] and speedup_map.charts(view) == [] and draft_length.charts(view) == []
    assert len(cells_table(view).rows) == 1


def test_a_mode_that_chose_to_stream_is_no_speculation_that_lost() -> None:
    plans = matrix((1, 60))
    folder = make_folder([*plans, Plan(plans[0].link, mode="auto"), Plan(plans[3].link, mode="auto")])
    modes = {cell.id: cell.mode for cell in folder.sweep.cells}
    for index, row in enumerate(folder.requests):
        if modes[row.cell] == "auto":
            folder.requests[index] = replace(row, token_origins=["target"])
    view = view_of(folder)
    best = [verdict.best for verdict in verdicts(view, view.settings[0])]
    assert [cell.mode for cell in best if cell] == ["speculative", "speculative"]


def test_an_empty_sweep_has_no_figures() -> None:
    view = view_of(make_folder([]))
    assert headlines(view) == [] and tpot_rtt.charts(view) == [] and cells_table(view).rows == ()


def test_an_unknown_mode_and_metric_are_shown_like_any_other() -> None:
    """Modes and metrics that come later need no change here."""
    folder = make_folder([*matrix((1, 60)), *(Plan(p.link, mode="telepathy") for p in matrix((1, 60))[:6:3])])
    folder.sweep.cells[0].metrics["joy_per_token"] = Metric(3.0, "joys")
    view = view_of(folder)
    shaped = tpot_rtt.shape(view, view.settings[0])
    assert shaped is not None and "telepathy" in {series.label for series in shaped.series}
    assert any("joy per token, joys" in name for name in cells_table(view).columns)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (1.0, "1"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (0, "0"),
        (None, "–"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    assert plain(value) == text
