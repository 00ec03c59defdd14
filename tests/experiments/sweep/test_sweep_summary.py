"""Texts against cloud-only's, cells against baselines, predictions, and the files they are written to."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import make_cell, make_request, make_round, make_visit

from outrider.experiments.shared.short_texts import tree_token_s
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.results.predicting import predict_all
from outrider.experiments.sweep.results.records import (
    SUMMARY,
    RequestRow,
    RoundRow,
    Sweep,
    TextCheck,
    read_sweep,
)
from outrider.experiments.sweep.results.summarising import (
    best_of,
    by_cell,
    compare,
    compare_all,
    summarise,
    write_summary,
)
from outrider.experiments.sweep.results.texts import (
    check_texts,
    collect_references,
    first_difference,
    num_failures,
)

CLOUD = make_cell("cloud-only", depth_policy="fixed", num_speculative_tokens=None, baseline="cloud-only")
SPECULATIVE = make_cell()
THERE = make_cell("co-located", baseline="co-located")
TYPICAL = make_cell(method="typical")


def requests_of(cell: Cell, ms: float, num: int = 4, **changes: Any) -> list[RequestRow]:
    """`num` requests of three tokens, one each `ms`, with a little of their own."""
    gaps = [ms * (1 + repeat / 100) for repeat in range(num)]
    return [
        make_request(cell.id, repeat=repeat, token_times_ms=[5.0, 5 + gap, 5 + 2 * gap], **changes)
        for repeat, gap in enumerate(gaps)
    ]


def never(row: RequestRow, index: int, token_id: int) -> bool | None:
    raise AssertionError("nobody should be asked")


def check(cell: Cell, ids: Sequence[int], reference: Sequence[int], is_tie: bool | None = False) -> TextCheck:
    rows = {CLOUD.id: [make_request(CLOUD.id, token_ids=list(reference))]}
    references = collect_references([CLOUD, cell], rows)
    return check_texts(cell, [make_request(cell.id, token_ids=list(ids))], references, lambda *_: is_tie)


# -------------------------------------------------------------------------------------------- texts


def test_equal_texts_are_equal_and_a_difference_without_excuse_fails() -> None:
    assert check(SPECULATIVE, [1, 2, 3], [1, 2, 3]).num_equal == 1
    found = check(SPECULATIVE, [1, 9, 3], [1, 2, 3])
    assert (found.num_different, found.share_equal) == (1, round(2 / 3, 6))
    assert found.examples == [make_request(SPECULATIVE.id).request]
    assert num_failures([found], 3, is_complete=True) == 1


def test_a_tie_is_an_excuse_and_what_nobody_can_judge_is_none() -> None:
    tie, unknown = check(SPECULATIVE, [1, 9], [1, 2], True), check(SPECULATIVE, [1, 9], [1, 2], None)
    assert (tie.num_ties, num_failures([tie], 2, is_complete=True)) == (1, 0)
    assert (unknown.num_unjudged, num_failures([unknown], 2, is_complete=True)) == (1, 1)
    assert num_failures([unknown], 2, is_complete=False) == 0, "a sweep that goes on judges it later"
    assert num_failures([tie, tie], 100, is_complete=True) == 2  # one in fifty is no float error
    assert num_failures([tie, tie], 100_000, is_complete=True) == 0


def test_a_text_that_goes_on_where_the_other_ended_is_different_whatever_a_judge_says() -> None:
    assert check(SPECULATIVE, [1, 2, 3], [1, 2], True).num_different == 1
    assert (first_difference([1, 2], [1, 2, 3]), first_difference([1], [1])) == (2, None)


def test_an_approximate_cell_is_measured_not_judged() -> None:
    found = check(TYPICAL, [1, 9], [1, 2])
    assert not found.is_exact_text and found.share_equal == 0.5
    assert num_failures([found], 2, is_complete=True) == 0


def test_marked_tokens_are_no_failure_and_no_reference() -> None:
    marked = make_request(CLOUD.id, token_ids=[7, 7], num_unverified_tokens=1)
    plain = make_request(CLOUD.id, repeat=1, token_ids=[1, 2], seed=1)
    references = collect_references([CLOUD], {CLOUD.id: [marked, plain]})
    row = make_request(SPECULATIVE.id, token_ids=[1, 9], num_unverified_tokens=1)
    found = check_texts(SPECULATIVE, [row], references, never)
    assert (found.num_skipped, found.num_compared, found.share_equal) == (1, 0, 0.5)


def test_cloud_only_over_another_link_is_held_to_the_same_text() -> None:
    far = dataclasses.replace(CLOUD, link=make_cell().link.with_changes(name="far", rtt_ms=50.0))
    rows = {CLOUD.id: [make_request(CLOUD.id, token_ids=[1])], far.id: [make_request(far.id, token_ids=[2])]}
    references = collect_references([CLOUD, far], rows)
    assert check_texts(far, rows[far.id], references, lambda *_: False).num_different == 1


# -------------------------------------------------------------------------------------- comparisons


def test_a_ratio_above_one_says_the_cell_is_faster_and_pairs_are_of_one_prompt_and_repeat() -> None:
    rows = {SPECULATIVE.id: requests_of(SPECULATIVE, 10.0), CLOUD.id: requests_of(CLOUD, 20.0, num=3)}
    found = compare(SPECULATIVE.id, CLOUD.id, "cloud-only", "tpot_ms", rows)
    assert found is not None and (found.ratio, found.n) == (2.0, 3)
    assert (found.low, found.high) == (2.0, 2.0)
    back = compare(CLOUD.id, SPECULATIVE.id, "", "tpot_ms", rows)
    assert back is not None and back.ratio == 0.5
    assert compare(SPECULATIVE.id, "nobody", "fixed", "tpot_ms", rows) is None


def test_a_baseline_of_several_lengths_stands_with_its_best() -> None:
    four, eight = (make_cell(num_speculative_tokens=n, baseline="fixed") for n in (4, 8))
    ours = make_cell(depth_policy="optimal", num_speculative_tokens=None)
    rows = {c.id: requests_of(c, ms) for c, ms in zip((four, eight, ours), (9.0, 7.0, 8.0), strict=True)}
    assert best_of([four, eight], rows) is eight
    found = [c for c in compare_all([four, eight, ours], rows) if c.cell == ours.id and c.metric == "tpot_ms"]
    assert [(c.baseline, c.kind, c.ratio) for c in found] == [(eight.id, "fixed", 0.875)]


def summarised(cells: list[Cell], rows: dict[str, list[RequestRow]], **changes: Any) -> Sweep:
    config = SweepConfig(a_a=False)
    rounds = [make_round(4, 2, cell=SPECULATIVE.id, request=r.request) for r in rows.get(SPECULATIVE.id, [])]
    visits = [make_visit(cell.id) for cell in cells]
    grouped = by_cell([row for group in rows.values() for row in group], rounds, visits)
    return dataclasses.replace(summarise(config, cells, grouped, never, {}, True), **changes)


def test_rounds_of_requests_that_failed_are_in_no_figure() -> None:
    good, failed = make_request(SPECULATIVE.id), make_request(SPECULATIVE.id, prompt="f", error="gone")
    slow = make_round(4, 0, cell=SPECULATIVE.id, request=failed.request, forward_ms=3000.0)
    fast = make_round(4, 4, cell=SPECULATIVE.id, request=good.request, forward_ms=30.0)
    grouped = by_cell([good, failed], [fast, slow], [])
    assert grouped.rounds[SPECULATIVE.id] == [fast]


def test_the_summary_is_read_back_as_it_was_written_and_csv_has_a_line_a_cell(tmp_path: Path) -> None:
    cells = [CLOUD, SPECULATIVE]
    sweep = summarised(cells, {c.id: requests_of(c, 10.0) for c in cells})
    write_summary(tmp_path, sweep)
    assert read_sweep(tmp_path) == sweep
    lines = list(csv.DictReader((tmp_path / SUMMARY).read_text().splitlines()))
    assert [line["id"] for line in lines] == [cell.id for cell in cells]
    assert float(lines[0]["tpot_ms"]) == pytest.approx(sweep.cells[0].metrics["tpot_ms"].value)
    assert lines[0]["link"] == "loopback" and lines[0]["num_speculative_tokens"] == ""


# -------------------------------------------------------------------------------------- predictions


def test_the_cost_model_predicts_a_link_from_parts_measured_on_another() -> None:
    near, far = SPECULATIVE, make_cell(link=make_cell().link.with_changes(name="far", rtt_ms=100.0))
    cells = [CLOUD, near, far]
    rounds = {near.id: _rounds(near, 2.0), far.id: _rounds(far, 102.0)}
    seven = [make_request(cell.id, num_tokens=7, verifier_calls=10, forward_s=0.1) for cell in cells]
    requests = {row.cell: [row] for row in seven}
    found = {p.cell: p for p in predict_all(cells, requests, rounds)}
    # Two tokens stand for certain and the third never: 3 tokens in n t_draft + RTT + overhead + verify. Six
    # are to write: the last round has three of them left and drafts two.
    assert found[near.id].value == pytest.approx((4 + 2 + 2 * (2 + 8)) / 6, rel=1e-3)
    assert found[far.id].value == pytest.approx((4 + 2 + 2 * (102 + 8)) / 6, rel=1e-3)
    assert found[CLOUD.id].value == pytest.approx(10 + 1 + 2 / 6, rel=1e-3)  # asking for the stream: a trip
    assert found[far.id].inputs["rtt_s"] == pytest.approx(0.102)


def test_a_length_that_no_cell_drafted_is_predicted_by_replaying_the_texts() -> None:
    there = make_cell("co-located", num_speculative_tokens=1, baseline="co-located")
    requests = {
        cell.id: [make_request(cell.id, num_tokens=7, verifier_calls=10, forward_s=0.1)]
        for cell in (CLOUD, SPECULATIVE, there)
    }
    rounds = {SPECULATIVE.id: _rounds(SPECULATIVE, 2.0)}
    found = {p.cell: p for p in predict_all([CLOUD, SPECULATIVE, there], requests, rounds)}
    # Two stand and the third does not, again and again: rounds of one stand where they start there, and the
    # next starts at the third, which falls. By position of rounds of four the first stands always.
    assert found[SPECULATIVE.id].inputs["acceptance"][:3] == [1.0, 1.0, 0.0]
    assert found[there.id].inputs["acceptance"] == [0.5]


def test_rounds_of_trees_are_predicted_from_the_times_of_trees_over_any_link() -> None:
    near, far = (
        make_cell(
            link=make_cell().link.with_changes(name=name, rtt_ms=rtt_ms), tree=8, num_speculative_tokens=None
        )
        for name, rtt_ms in (("near", 0.0), ("far", 100.0))
    )
    cells = [CLOUD, SPECULATIVE, near, far]
    requests = {
        cell.id: [make_request(cell.id, num_tokens=7, verifier_calls=10, forward_s=0.1)] for cell in cells
    }
    tree = make_round(8, 2, near.id, draft_ms=6.0, verifier_ms=12.0, main_path=[2, 5])
    rest = make_round(3, 2, near.id, draft_ms=1.0, verifier_ms=1.0, main_path=[2, 3])
    found = {
        p.cell: p
        for p in predict_all(
            cells, requests, {SPECULATIVE.id: _rounds(SPECULATIVE, 2.0), near.id: [tree, rest]}
        )
    }
    # Two nodes are accepted: six tokens take two rounds. The shorter round at the end is no whole tree's.
    assert found[near.id].value == pytest.approx(2 * (6 + 2 + 12) / 6, rel=1e-4)
    assert found[far.id].value == pytest.approx(2 * (6 + 102 + 12) / 6, rel=1e-4)
    assert found[near.id].inputs["draft_s"] == pytest.approx(0.006)
    assert found[near.id].inputs["tokens_per_round"] == 3


def test_a_last_token_that_leaves_nothing_to_draft_takes_a_round_alone() -> None:
    assert tree_token_s([2], 7, 20.0, 5.0) == pytest.approx((20 + 20 + 5) / 7)
    assert tree_token_s([0, 2], 2, 20.0, 5.0) == pytest.approx((0.5 * 20 + 0.5 * (20 + 5)) / 2)


def test_several_sessions_at_once_are_not_the_cost_models() -> None:
    cells = [dataclasses.replace(cell, num_sessions=4) for cell in (CLOUD, SPECULATIVE)]
    requests = {cell.id: [make_request(cell.id)] for cell in cells}
    assert predict_all(cells, requests, {cells[1].id: _rounds(cells[1], 2.0)}) == []


def test_without_cloud_only_or_a_fixed_length_nothing_is_predicted() -> None:
    assert predict_all([SPECULATIVE], {}, {SPECULATIVE.id: _rounds(SPECULATIVE, 2.0)}) == []
    optimal = make_cell(depth_policy="optimal", num_speculative_tokens=None)
    assert predict_all([CLOUD, optimal], {CLOUD.id: [make_request(CLOUD.id)]}, {}) == []


def _rounds(cell: Cell, net_ms: float) -> list[RoundRow]:
    return [make_round(4, 2, cell=cell.id, draft_ms=4.0, net_ms=net_ms, verifier_ms=8.0) for _ in range(40)]
