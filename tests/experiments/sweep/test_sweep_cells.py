"""Which cells a sweep has: the baselines always, equal work once, and the A/A twin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sweep_rows import make_cell

from outrider.common.errors import ConfigError
from outrider.common.types import Method
from outrider.edge_client.config.tree import tree_budget
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.experiments.sweep.checking import check_cells
from outrider.experiments.sweep.config.cells import Cell, find_baselines, make_cells
from outrider.experiments.sweep.config.schema import SweepConfig, Variant
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.experiments.sweep.results.records import BASELINES
from outrider.experiments.sweep.running import Plan, make_plan


def cells_of(**keys: Any) -> list[Cell]:
    return make_cells(SweepConfig(**keys))


def ids_of(**keys: Any) -> list[str]:
    return [cell.id for cell in cells_of(a_a=False, **keys)]


def test_every_sweep_has_the_four_baselines_and_the_twin() -> None:
    found = cells_of(links=("4g",), policies=("optimal",))
    assert [(cell.id, cell.baseline) for cell in found] == [
        ("4g cloud-only T0.8", "cloud-only"),
        ("4g co-located fixed-4 T0.8", "co-located"),
        ("none edge-only T0.8", "edge-only"),
        ("4g speculative fixed-4 T0.8", "fixed"),
        ("4g speculative optimal T0.8", ""),
        ("4g speculative optimal T0.8 again", ""),
    ]
    assert found[-1].twin == "4g speculative optimal T0.8"


def test_a_baseline_left_out_is_written_on_every_cell() -> None:
    config = SweepConfig(baselines=("cloud-only",), a_a=False, repeats=2)
    found = make_cells(config)
    assert "none edge-only T0.8" not in [cell.id for cell in found]
    expected = ["no co-located baseline", "no edge-only baseline", "no fixed baseline", "2 repeats"]
    assert all(cell.labels(config) == expected for cell in found)


def test_what_does_not_concern_a_mode_makes_no_further_cell() -> None:
    links = ("loopback", "4g")
    found = ids_of(links=links, tls=(False, True), min_forward_ms=(0.0, 30.0), min_draft_ms=(0.0, 10.0))
    alone = [id for id in found if "edge-only" in id]
    assert alone == ["none edge-only T0.8", "none edge-only T0.8 draft10"]  # no link, no verifier
    streamed = [id for id in found if "4g cloud-only" in id]
    assert len(streamed) == 4 and not any("draft10" in id for id in streamed)  # no draft at the edge


def test_a_policy_that_finds_its_length_is_one_cell_for_all_lengths() -> None:
    found = ids_of(policies=("fixed", "optimal"), draft_lengths=(2, 8), baselines=("cloud-only",))
    assert found[1:] == [
        "loopback speculative fixed-2 T0.8",
        "loopback speculative fixed-8 T0.8",
        "loopback speculative optimal T0.8",
    ]


def test_an_asked_cell_that_is_a_baseline_is_run_once_as_the_baseline() -> None:
    found = cells_of(modes=("cloud-only", "speculative"), draft_lengths=(4,), a_a=False)
    assert [cell.baseline for cell in found] == ["cloud-only", "co-located", "edge-only", "fixed"]


def test_every_mode_and_policy_of_the_product_makes_cells_that_the_product_takes() -> None:
    plan = make_plan(SweepConfig(modes=REQUESTABLE_MODES, links=("loopback", "4g"), policies=DEPTH_POLICIES))
    assert {cell.mode for cell in plan.cells} == {*REQUESTABLE_MODES}
    check_cells(plan)


def test_settings_of_other_methods_do_not_concern_a_cell() -> None:
    common = {"support_size": 32, "threshold_pass": 0.5, "logprobs": 1, "transport": "unary"}
    sparse = make_cell(method="sparse").edge_settings(common)
    assert sparse["support_size"] == 32 and "threshold_pass" not in sparse
    assert make_edge_config(sparse).connection.transport == "unary"
    assert "logprobs" not in make_cell("edge-only").edge_settings(common)


def test_a_variant_of_one_method_leaves_the_others_as_they_are() -> None:
    variants = ({"name": "wide", "edge": {"support_size": 64}},)
    found = ids_of(methods=("coupled", "sparse"), variants=variants, baselines=("cloud-only",))
    assert found[1:] == ["loopback speculative fixed-4 T0.8", "loopback speculative fixed-4 sparse T0.8 wide"]


@pytest.mark.parametrize(
    ("method", "temperature", "is_exact"),
    [("coupled", 0.8, True), ("sparse", 0.8, False), ("sparse", 0.0, True), ("typical", 0.0, False)],
)
def test_only_what_promises_cloud_onlys_tokens_is_held_to_them(
    method: str, temperature: float, is_exact: bool
) -> None:
    assert make_cell(method=method, temperature=temperature).is_exact_text is is_exact
    assert Method(method).is_exact or not is_exact


def test_a_cell_is_compared_with_the_baselines_of_its_own_setting() -> None:
    cells = cells_of(
        links=("loopback", "4g"), min_draft_ms=(0.0, 10.0), temperatures=(0.0, 0.8), draft_lengths=(8,)
    )
    cell = next(each for each in cells if each.id == "4g speculative fixed-8 T0 draft10")
    found = {kind: [each.id for each in find_baselines(cell, kind, cells)] for kind in BASELINES}
    assert found == {
        "cloud-only": ["4g cloud-only T0"],
        "co-located": ["4g co-located fixed-4 T0"],
        "edge-only": ["none edge-only T0 draft10"],
        "fixed": ["4g speculative fixed-4 T0 draft10"],
    }


def make(**keys: Any) -> Plan:
    return make_plan(SweepConfig(links=("loopback", "lan"), **keys))


def test_repeats_are_whole_and_each_has_an_order_of_its_own_by_the_seed() -> None:
    plan = make(repeats=3)
    visits = [(repeat, cell.id) for repeat, cell in plan.visits()]
    assert [repeat for repeat, _ in visits] == sorted(repeat for repeat, _ in visits)
    orders = [[id for repeat, id in visits if repeat == r] for r in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(cell.id for cell in plan.cells)
    assert orders[0] != orders[1]
    assert visits == [(repeat, cell.id) for repeat, cell in make(repeats=3).visits()]
    assert visits != [(repeat, cell.id) for repeat, cell in make(repeats=3, seed=2).visits()]


def test_every_session_decodes_every_prompt_and_starts_with_another() -> None:
    plan = make(sessions=(2,), num_prompts=3)
    requests = plan.requests_of(plan.cells[0], 1)
    by_session = [[r.prompt.id for r in requests if r.session == s] for s in range(2)]
    assert set(by_session[0]) == set(by_session[1]) and by_session[0][0] != by_session[1][0]
    assert len({r.id for r in requests}) == 6 and plan.num_requests == 3 * 6 * len(plan.cells)


def test_a_variant_of_one_mode_makes_cells_of_that_mode_alone() -> None:
    variants = ({"name": ""}, {"name": "piped", "edge": {"pipeline": "on"}, "modes": "speculative"})
    found = ids_of(modes=("speculative", "auto", "co-located"), variants=variants, baselines=("cloud-only",))
    assert found[1:] == [
        "loopback speculative fixed-4 T0.8",
        "loopback speculative fixed-4 T0.8 piped",
        "loopback auto fixed-4 T0.8",
        "loopback co-located fixed-4 T0.8",
    ]


def test_a_way_to_speculate_makes_no_further_cell_of_a_mode_that_has_none() -> None:
    variants = ({"name": ""}, {"name": "piped", "edge": {"pipeline": "on"}})
    found = ids_of(modes=("cloud-only", "co-located"), variants=variants, baselines=())
    assert found == ["loopback cloud-only T0.8", "loopback co-located fixed-4 T0.8"]


@pytest.mark.parametrize("name", ["again", "tls"])
def test_a_variants_name_that_makes_two_cells_one_is_refused(name: str) -> None:
    variants = ({"name": ""}, {"name": name, "edge": {"transport": "unary"}})
    with pytest.raises(ConfigError, match=f"two cells .* 'loopback speculative optimal T0.8 {name}'"):
        cells_of(policies=("optimal",), tls=(False, True), variants=variants)


def test_a_constraint_is_a_setting_with_baselines_of_its_own() -> None:
    schema = {"type": "array", "items": {"enum": ["a"]}}
    constraints = (None, {"name": "list", "json_schema": schema})
    found = cells_of(constraints=constraints, modes=("auto",), policies=("optimal",), a_a=False)
    asked = [cell for cell in found if not cell.baseline]
    assert [cell.id for cell in asked] == [
        "loopback auto optimal T0.8",
        "loopback auto optimal T0.8 list",
    ]
    for cell in asked:
        (baseline,) = find_baselines(cell, "cloud-only", found)
        assert baseline.constraint == cell.constraint
        config = make_edge_config(baseline.edge_settings({"ignore_eos": True}))
        assert bool(config.grammar.json_schema) is not config.stop.ignore_eos
    assert json.loads(config.grammar.json_schema) == schema


def test_a_variant_is_named_in_its_cells() -> None:
    cell = make_cell(variant=Variant("unary", {"transport": "unary"}))
    assert cell.id == "loopback speculative fixed-4 T0.8 unary"
    assert cell.edge_settings({})["transport"] == "unary"


def test_trees_take_the_place_of_draft_lengths_and_leave_baselines_alone() -> None:
    found = ids_of(draft_lengths=(4, 8), trees=("off", 16, "auto"), policies=("fixed", "optimal"))
    assert found[4:] == [
        "loopback speculative tree-16 T0.8",
        "loopback speculative fixed-4 tree-auto T0.8",
        "loopback speculative fixed-8 T0.8",
        "loopback speculative fixed-8 tree-auto T0.8",
        "loopback speculative optimal T0.8",
        "loopback speculative optimal tree-auto T0.8",
    ]


def test_every_cell_of_trees_is_one_that_the_product_takes() -> None:
    variants = (
        {},
        {"name": "keep", "edge": {"gate": "commit"}},
        {"name": "narrow", "edge": {"tree_width": 2}},
    )
    found = make_cells(
        SweepConfig(
            modes=tuple(str(mode) for mode in REQUESTABLE_MODES),
            policies=DEPTH_POLICIES,
            methods=tuple(map(str, Method)),
            trees=("off", 16, "auto"),
            variants=variants,
            a_a=False,
        )
    )
    for cell in found:
        tree_budget(make_edge_config(cell.edge_settings({})))
    assert {cell.tree for cell in found if cell.variant.name == "keep"} == {"off"}
    assert {cell.tree for cell in found if cell.variant.name == "narrow"} == {16, "auto"}
    assert {cell.mode for cell in found if cell.tree == 16} == {
        "speculative",
        "pipelined",
        "co-located",
        "auto",
    } & {str(mode) for mode in REQUESTABLE_MODES}
