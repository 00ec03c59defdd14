"""`edge-client plan`: what it prints, what it refuses, and that measured parts are the true ones."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import pytest
from support.edge.edge_fakes import make_model
from support.processes.pairs import EMBEDDED
from support.processes.server import serving
from support.timed import timed

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.lookahead import Lookahead
from outrider.common.config.units import (
    parse_bandwidth,
    parse_duration,
    parse_flops,
    parse_num_params,
    parse_rate,
    show_duration,
)
from outrider.common.errors import UsageError
from outrider.common.types import Method
from outrider.edge_client.commands.cli import main
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, fastest_round, tokens_per_s
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import tree_costs, tree_tokens
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning import measure as measuring
from outrider.edge_client.planning.measure import Samples, measure, parts_from, rarely_measured
from outrider.edge_client.planning.memory import MemoryPlan, memory_text, nearest_shape
from outrider.edge_client.planning.plan import (
    GIVEN,
    MEASURED,
    TREE,
    Known,
    PlanParts,
    make_plan,
)
from outrider.edge_client.planning.report import advice, headline, plan_json, plan_text
from outrider.edge_client.planning.roofline import Roofline
from outrider.edge_client.planning.samples import (
    acceptance_by_position,
    cost_line,
    replay_rounds,
    sequence_of,
    source_rounds,
    streamed_rounds,
)
from outrider.edge_client.planning.trees import accepted_chances
from outrider.edge_client.session.factory import Edge
from outrider.experiments.synthetic.draft import SyntheticDraft, SyntheticTokenizer
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.target import SyntheticBackend

FLAGS = ["plan", "--t-draft", "10ms", "--t-target", "70ms", "--rtt", "50ms", "--alpha", "0.8"]


def parts(rtt_s: float, target_s: float = 0.07, draft_s: float = 0.01, alpha: float = 0.8) -> PlanParts:
    def given(value: float) -> Known:
        return Known(value, GIVEN)

    return PlanParts(
        draft_token=given(draft_s),
        draft_fixed=given(0.0),
        target_token=given(target_s),
        verify_fixed=given(target_s),
        verify_token=given(0.0),
        colocated_draft_token=given(draft_s),
        tree_base=given(8 * draft_s),
        tree_node=given(0.6 * draft_s),
        rtt=given(rtt_s),
        rate_up=given(math.inf),
        rate_down=given(math.inf),
        acceptance=(given(alpha),),
    )


def test_a_plan_is_what_the_cost_model_says() -> None:
    plan = make_plan(parts(0.05))
    models, link = ModelCosts(0.01, 0.07, 0.07), LinkCosts(rtt_s=0.05)
    n, rate = fastest_round([0.8], models, link, 64)
    best = plan.modes[ExecutionMode.SPECULATIVE]
    assert best.num_draft_tokens == n == 6 and best.tokens_per_s == pytest.approx(rate)
    assert plan.lengths[3].token_s == pytest.approx(1 / tokens_per_s(0.8, 4, models, link))
    assert (
        plan.modes[ExecutionMode.CLOUD_ONLY].token_s == 0.07
        and plan.modes[ExecutionMode.EDGE_ONLY].token_s == 0.01
    )
    assert (
        plan.modes[ExecutionMode.CO_LOCATED].token_s
        < plan.modes[ExecutionMode.PIPELINED].token_s
        < best.token_s
    )


def test_at_a_modes_break_even_rtt_it_takes_as_long_as_its_rival() -> None:
    plan = make_plan(parts(0.05))
    for mode in (ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED):
        rtt_s = plan.break_even_rtt_s(mode)
        assert make_plan(parts(rtt_s)).modes[mode].token_s == pytest.approx(0.07)
    assert plan.break_even_rtt_s(ExecutionMode.SPECULATIVE, ExecutionMode.CO_LOCATED) == pytest.approx(0), (
        "the same without the trip"
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (parts(0.05), "Speculation pays: 6 drafted tokens a round, 45.6 ms a token"),
        (parts(0.17), "Speculation pays only pipelined: 5 drafted tokens a round"),
        (parts(0.17, target_s=0.02), "Speculation does not pay on this link: cloud-only takes 20 ms a token"),
    ],
)
def test_the_first_line_says_whether_speculation_pays(made: PlanParts, words: str) -> None:
    assert headline(make_plan(made))[0].startswith(words)


def test_a_tree_of_a_plan_brings_and_costs_what_the_policy_of_trees_expects() -> None:
    made = parts(0.1, draft_s=0.001)
    plan = make_plan(made)
    costs = tree_costs(made.models, made.link, (0.008, 0.0006))
    for tree in plan.trees:
        assert tree.round_s == pytest.approx(costs.round_s + tree.num_nodes * costs.node_s)
        unbounded = tree_tokens((0.8,), tree.num_nodes)[tree.num_nodes]
        assert unbounded * 0.98 <= tree.tokens_per_round <= unbounded + 1e-9, "no path is longer than 12"
    assert [tree.num_nodes for tree in plan.trees] == [8, 16, 32, 64]


def test_a_tree_has_no_path_longer_than_its_depth_however_many_nodes_it_has() -> None:
    assert accepted_chances((0.8,), 64, 0) == [1.0]
    none, one = accepted_chances((0.8,), 64, 1)
    assert none == 1.0 and 0.99 < one <= 1.0, "all choices after the root"
    deep = accepted_chances((0.8,), 64, 12)
    assert len(deep) == 13 and deep == sorted(deep, reverse=True)


def test_a_tree_is_advised_where_it_is_faster_by_the_margin_that_auto_wants_too() -> None:
    near, far = make_plan(parts(0.02)), make_plan(parts(0.1, draft_s=0.001))
    assert near.best_edge.mode != TREE and "--tree" not in advice(near)
    assert far.best_edge.mode == TREE and "edge-client run --tree 64;" in advice(far)
    assert "trees of 64 tokens" in headline(far)[0]
    tied = make_plan(replace(parts(0.1, draft_s=0.001), tree_base=Known(0.03, GIVEN)))
    tree, pipelined = tied.modes[TREE], tied.modes[ExecutionMode.PIPELINED]
    assert tied.best_edge.mode == (
        TREE if tree.token_s * (1 + SETTINGS.min_tree_gain_share) < pipelined.token_s else "pipelined"
    )


def test_trees_pay_alone_where_chains_do_not() -> None:
    plan = make_plan(parts(0.22, draft_s=0.001, alpha=0.7))
    assert headline(plan)[0].startswith(
        "Speculation pays only with trees: 64 drafted tokens a round, as a tree"
    )


def test_short_drafts_alone_leave_no_room_for_trees(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_plan(parts(0.05), 4).trees == ()
    assert main([*FLAGS, "--max-draft-tokens", "4"]) == 0
    assert "tree, predicted" not in capsys.readouterr().out


def test_a_draft_that_is_never_right_has_trees_that_bring_the_correction() -> None:
    assert 1 <= make_plan(parts(0.05, alpha=0.0)).trees[0].tokens_per_round < 1.1


def test_a_price_counts_the_time_on_the_targets_machine() -> None:
    plan = make_plan(parts(0.05))
    assert plan.modes[ExecutionMode.CLOUD_ONLY].cost_per_million(3.6) == pytest.approx(0.07 * 1e6 / 1000)
    speculative = plan.modes[ExecutionMode.SPECULATIVE]
    assert speculative.target_s == pytest.approx(0.07 / plan.lengths[5].tokens_per_round)


def test_the_command_needs_no_models_and_prints_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--price-per-hour", "3"]) == 0
    out = capsys.readouterr().out
    first, *rest = out.splitlines()
    assert first.startswith("Speculation pays: 6 drafted tokens a round") and "\x1b" not in out
    assert rest[1].startswith("To run so: edge-client run --pipeline on --num-speculative-tokens 5;")
    assert any(line.split()[:3] == ["6", "*", "best"] for line in rest)
    assert (
        "  against cloud-only  speculative below 153.0 ms · tree below 112.5 ms · pipelined below 192.3 ms"
        in rest
    )
    assert any(line.split() == ["draft,", "a", "token", "10", "ms", "given"] for line in rest)
    assert any("assumed: as fast as at the edge" in line for line in rest)


def test_json_labels_what_is_given_assumed_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--alpha", "0.9,0.7", "--bandwidth-up", "1mbit", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pays"] is True and plan["best"] == "co-located" and plan["schema"] == 2
    assert plan["parts"]["rtt"] == {"value": 50.0, "source": "given"}
    assert plan["parts"]["rate_up"] == {"value": 125_000.0, "source": "given"}
    assert plan["parts"]["rate_down"] == {"value": None, "source": "assumed"}
    assert [each["value"] for each in plan["parts"]["acceptance"]] == [0.9, 0.7]
    assert set(plan["predicted"]["modes"]) == {
        ExecutionMode.SPECULATIVE,
        "tree",
        ExecutionMode.PIPELINED,
        ExecutionMode.CLOUD_ONLY,
        ExecutionMode.CO_LOCATED,
        ExecutionMode.EDGE_ONLY,
    }
    assert len(plan["predicted"]["draft_lengths"]) == 64
    assert plan["predicted"]["break_even_rtt_ms"]["speculative"]["cloud-only"] > 50


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--t-draft", "10"], "--t-draft 10: not a duration; write a number and its unit: 10ms"),
        (["--alpha", "0.8,1.2"], "--alpha 1.2: not a number between 0 and 1"),
        (["--t-target", "0"], "--t-target 0: want a time above 0"),
        (["--bandwidth-up", "0"], "--bandwidth-up 0: not a rate above 0; write 10mbit"),
        (["--max-draft-tokens", "0"], "--max-draft-tokens 0: want 1 to 1024"),
        (["--max-draft-tokens", "1025"], "--max-draft-tokens 1025: want 1 to 1024"),
        (["--price-per-hour", "-1"], "--price-per-hour -1.0: want a price of at least 0"),
        (["--regex", "a+"], "--regex goes with --measure HOST:PORT"),
        (["--draft-strategy", "suffix"], "--draft-strategy goes with --measure HOST:PORT"),
        (["--temperature", "0"], "--temperature goes with --measure HOST:PORT"),
        (["--measure-s", "3"], "--measure-s goes with --measure HOST:PORT"),
        (["--edge-flops", "1T"], "--edge-flops needs --draft-params too"),
        (["--cloud-bandwidth", "2TB/s"], "--cloud-bandwidth needs --target-params or --draft-params too"),
        (["--bytes-per-param", "1"], "--bytes-per-param needs --target-params or --draft-params too"),
        (["--json-schema", "schema.json"], "--json-schema goes with --measure HOST:PORT"),
    ],
)
def test_a_mistake_is_named_with_its_flag(
    change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, *change]) == 2
    assert words in capsys.readouterr().err


def test_what_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--t-draft", "10ms", "--alpha", "0.8"]) == 2
    told = capsys.readouterr().err
    assert "plan needs --t-target, --rtt: give for example --t-target 70ms --rtt 50ms" in told
    assert "--measure HOST:PORT" in told


def test_a_verifier_that_is_not_there_is_a_link_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", "127.0.0.1:1", "--measure-s", "0.2"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_verifier_with_tls_and_tokens_can_be_measured_by_flags_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--tls-ca", "/no/ca.crt", "--token-file", "/no/token"]
    assert main(["plan", "--measure", "127.0.0.1:1", "--measure-s", "1", *flags]) == 2
    assert "/no/" in capsys.readouterr().err


@timed
def test_measured_parts_are_the_true_ones_of_a_synthetic_pair(is_timed: bool) -> None:
    pair = SyntheticPair((0.8,), draft_token_s=0.001, target_s=0.008, verify_token_s=0.0005)
    drafter = CoLocatedDrafter(SyntheticDraft(pair))
    with serving(SyntheticBackend(pair), drafter=drafter) as server:
        config = run_config(verifier=f"127.0.0.1:{server.port}", seed=1)
        edge = Edge(config, SyntheticTokenizer(), SyntheticDraft(pair), 0.0, ())  # type: ignore[arg-type]
        shares: list[float] = []
        samples = measure(edge, seconds=3.0, on_progress=lambda share, num: shares.append(share))
    found = parts_from(samples)
    assert found.draft_token.source == MEASURED and shares[-1] == 1.0
    # Never less than the pair's own times; by how much more is the machine's doing.
    round_s = found.verify_fixed.value + 4 * found.verify_token.value
    assert 0.008 < found.target_token.value and 0.008 < round_s and 0 < found.rtt.value
    if is_timed:
        assert 0.0008 < found.draft_token.value < 0.003 and found.draft_fixed.value < 0.003
        assert max(found.target_token.value, round_s, found.rtt.value) < 0.03
    first = found.acceptance[0]
    assert first.low is not None and first.high is not None and first.low <= 0.8 <= first.high


MS = 1_000_000


@pytest.mark.parametrize("rtt_ms", [0, 200])
def test_the_round_trip_is_in_no_round_of_a_stream_but_the_first(rtt_ms: int) -> None:
    begin = (5 + rtt_ms) * MS  # the request follows the opening's token
    arrivals_ms = [(0, 3), (10, 2), (20, 3), (30, 1), (40, 2)]
    times = [5 * MS, *(begin + after * MS for after, num in arrivals_ms for _ in range(num))]
    rounds = streamed_rounds(times)
    assert rounds == [(0.01, 2), (0.01, 3), (0.01, 1)], "the first waits for the link, the last is cut"
    found = source_rounds("medusa", rounds)
    assert (found.name, found.round.value, found.tokens_per_round) == ("medusa", pytest.approx(0.01), 2.0)
    assert streamed_rounds(times[:1]) == streamed_rounds([]) == []


def test_a_measured_source_is_a_mode_and_is_advised_where_nothing_is_faster() -> None:
    medusa = source_rounds("medusa", [(0.02, 2), (0.02, 3)])
    hydra = source_rounds("hydra", [(0.1, 2)])
    plan = make_plan(replace(parts(0.05), sources=(medusa, hydra)))
    found = plan.modes["co-located, medusa"]
    assert plan.fastest is found and (found.token_s, found.target_s) == (pytest.approx(0.008),) * 2
    assert headline(plan)[-1] == (
        "Of what this verifier has, co-located, medusa is the fastest: 2.5 tokens a round, 8 ms a token (measured)."
    )
    assert advice(plan) == "To run so: edge-client run --mode co-located --draft-source medusa"
    rows = [line.split() for line in plan_text(plan, price_per_hour=3.6).splitlines()]
    row = ["co-located,", "medusa", "-", "8.00", "125.0", "8.75", "8.00"]
    assert [*row, "2.5", "tokens", "a", "round,", "measured"] in rows
    told = plan_json(plan, price_per_hour=None, labels=(), more={})
    assert told["best"] == "co-located, medusa" and list(told["parts"]["draft_sources"]) == [
        "medusa",
        "hydra",
    ]
    mode = told["predicted"]["modes"]["co-located, medusa"]
    assert (mode["source"], mode["tokens_per_round"]) == (MEASURED, 2.5)


def test_a_source_slower_than_a_draft_there_is_advised_only_where_there_is_none() -> None:
    made = replace(parts(0.05), sources=(source_rounds("medusa", [(0.08, 2)]),))
    assert make_plan(made).fastest.mode == ExecutionMode.CO_LOCATED
    assert "--draft-source" not in advice(make_plan(made))
    alone = make_plan(replace(made, lacks_draft=True))
    assert alone.fastest.draft_source == "medusa" and "--draft-source medusa" in advice(alone)


def test_a_slow_link_holds_a_measured_stream_up_too() -> None:
    made = replace(parts(0.05), sources=(source_rounds("medusa", [(0.02, 2)]),), rate_down=Known(1.0, GIVEN))
    found = make_plan(made).modes["co-located, medusa"]
    assert found.token_s == made.link.stream_token_bytes_down / 2 and found.target_s == pytest.approx(0.01)


def test_without_other_sources_a_plan_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "draft_sources" not in told["parts"] and "fastest" not in told["headline"]


def test_heads_of_a_verifier_are_measured_beside_the_edges_draft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = itertools.count()  # so that a slow machine measures as much
    monkeypatch.setattr(measuring, "measure", partial(measure, clock=lambda: next(ticks) / 100))
    backend = load_target(EMBEDDED / "target", kv_bytes=64 << 20)
    sources = [load_head(EMBEDDED / "heads" / "medusa", backend), Lookahead(backend)]
    with serving(backend, drafter=CoLocatedDrafter(None, sources)) as server:
        flags = ["plan", "--measure", f"127.0.0.1:{server.port}", "--measure-s", "5", "--seed", "1", "--json"]
        assert main([*flags, "--temperature", "0"]) == 0
        coupled = json.loads(capsys.readouterr().out)
        assert main([*flags, "--method", "sparse", "--support-size", "8"]) == 0
        sparse = json.loads(capsys.readouterr().out)
    found = coupled["parts"]["draft_sources"]
    assert list(found) == ["medusa", "lookahead"] and list(sparse["parts"]["draft_sources"]) == ["medusa"]
    assert 1.5 < found["medusa"]["tokens_per_round"] < 6 and 1 <= found["lookahead"]["tokens_per_round"] < 6
    for name, each in found.items():
        mode = coupled["predicted"]["modes"][f"co-located, {name}"]
        assert mode["tpot_ms"] == pytest.approx(each["round"]["value"] / each["tokens_per_round"])
        assert each["round"]["source"] == MEASURED and each["round"]["n"] >= 6
    assert not any("too little" in label for label in coupled["labels"])


def test_a_source_that_the_time_did_not_reach_is_said() -> None:
    model = make_model(draft_sources=("draft", "medusa", "lookahead"))
    samples = Samples(source_rounds={"medusa": [(0.01, 2)]}, model=model)
    assert rarely_measured(samples, run_config()) == [
        "co-located, medusa: too little was measured (1 rounds): give --measure-s more",
        "co-located, lookahead: too little was measured (0 rounds): give --measure-s more",
    ]


def test_too_little_is_not_taken_for_a_measurement() -> None:
    with pytest.raises(UsageError, match=r"too little was measured \(0 rounds.*--measure-s more"):
        parts_from(Samples())


def test_a_cost_is_a_line_through_the_means_of_its_lengths() -> None:
    times = [(n, 0.010 + 0.001 * n) for n in (0, 4, 8) for _ in range(10)]
    fixed, token = cost_line([*times, (8, 5.0)], is_flat=True)
    assert (fixed.value, token.value) == (pytest.approx(0.010), pytest.approx(0.001))
    through_zero = [(n, 0.003 * n - 0.0001 * (n == 1)) for n in (1, 4, 8)]
    fixed, token = cost_line(through_zero, is_flat=False)
    assert fixed.value == pytest.approx(0, abs=1e-4) and token.value == pytest.approx(0.003, rel=0.01)


def test_a_slow_round_at_the_end_of_a_text_does_not_tilt_the_line() -> None:
    times = [(n, 0.030 + 0.0005 * n) for n in (1, 4, 8) for _ in range(40)]
    fixed, token = cost_line([*times, (6, 0.080)], is_flat=True)
    assert (fixed.value, token.value) == (pytest.approx(0.030, rel=0.01), pytest.approx(0.0005, rel=0.01))


def test_one_length_alone_tells_nothing_apart() -> None:
    assert [known.value for known in cost_line([(4, 0.02)] * 3, is_flat=True)] == [0.02, 0.0]
    assert [known.value for known in cost_line([(4, 0.02)] * 3, is_flat=False)] == [0.0, 0.005]


def test_positions_judged_too_seldom_share_an_acceptance() -> None:
    rounds = [(3, 3)] * 30 + [(0, 3)] * 10 + [(4, 8)] * 5
    shares = acceptance_by_position(rounds)
    assert [(each.value, each.num_samples) for each in shares] == [
        (pytest.approx(35 / 45), 45),
        (1.0, 35),
        (pytest.approx(40 / 45), 45),  # token 3, and those behind it
    ]


def test_rounds_of_any_length_are_replayed_through_a_text() -> None:
    text = sequence_of([(2, 4), (4, 4), (0, 4), (1, 1)], alphas=[0.0, 1.0])
    assert text == (True, True, False, *(True,) * 5, False, True, True)
    assert list(replay_rounds([text], 1)) == [(1, 1), (0, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert list(replay_rounds([text], 64)) == [(2, 11), (5, 8), (2, 2)], "what the end cut off fell nowhere"


def test_easy_and_hard_stretches_give_each_length_its_own_acceptance() -> None:
    text = ((True,) * 20 + (False,) * 10) * 20
    short, long = (make_plan(replace(parts(0.05), sequences=(text,))).lengths[n - 1] for n in (1, 16))
    assert short.alphas[0] == 0.5, "of each stretch, rounds of one begin ten times in the easy part"
    assert long.alphas[0] == pytest.approx(2 / 11, abs=0.01), "rounds of sixteen twice"


@pytest.mark.parametrize(
    ("text", "seconds"), [("10ms", 0.01), ("1.5s", 1.5), ("800us", 8e-4), ("800 µs", 8e-4), ("0", 0.0)]
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == pytest.approx(seconds)


def test_rates_are_bits_a_second_and_durations_show_three_digits() -> None:
    assert (parse_rate("10mbit", "--x"), parse_rate("8 kbit/s", "--x")) == (1.25e6, 1000.0)
    shown = [show_duration(s) for s in (0.04553, 0.9999, 8e-4, 0.1, 12.345, 0.0)]
    assert shown == ["45.5 ms", "1 s", "800 µs", "100 ms", "12.3 s", "0 ms"]


ROOFLINE_FLAGS = (
    *("plan", "--rtt", "50ms", "--alpha", "0.8", "--target-params", "70B", "--cloud-bandwidth", "2TB/s"),
    *(
        "--cloud-flops",
        "280T",
        "--draft-params",
        "5e8",
        "--edge-bandwidth",
        "50GB/s",
        "--edge-flops",
        "1TFLOPS",
    ),
)


def test_a_forward_takes_the_longer_of_reading_weights_and_computing_rows() -> None:
    roofline = Roofline(num_params=70e9, bytes_per_param=2, bandwidth=2e12, flops=280e12)
    assert roofline.forward_s(1) == roofline.forward_s(140) == pytest.approx(0.07)
    assert roofline.forward_s(280) == pytest.approx(0.14)
    assert roofline.compute_bound_rows == 140


def test_sizes_and_machines_stand_in_for_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ROOFLINE_FLAGS, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    acceptance = plan["parts"].pop("acceptance")
    assert acceptance == [{"value": 0.8, "source": "given"}]
    found = {name: (part["value"], part["source"]) for name, part in plan["parts"].items()}
    assert found["draft_token"] == (pytest.approx(5.0), "computed") and found["rtt"] == (50.0, "given")
    assert found["target_token"] == found["verify_fixed"] == (pytest.approx(70.0), "computed")
    assert found["colocated_draft_token"] == (pytest.approx(0.125), "computed")
    assert plan["rooflines"]["target"]["compute_bound_rows"] == 140
    assert main([*ROOFLINE_FLAGS, "--t-draft", "10ms"]) == 0
    text = capsys.readouterr().out
    assert "computed: one row of the target" in text and "compute-bound from 140 rows on" in text
    assert any(line.split() == ["draft,", "a", "token", "10", "ms", "given"] for line in text.splitlines())


def test_a_verification_costs_more_once_it_is_compute_bound(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [*ROOFLINE_FLAGS, "--cloud-flops", "14T", "--json"]  # compute-bound from 7 rows on
    assert main(slow) == 0
    lengths = json.loads(capsys.readouterr().out)["predicted"]["draft_lengths"]
    rounds_ms = [each["round_ms"] for each in lengths]
    assert rounds_ms[5] - rounds_ms[4] == pytest.approx(5.0), "six tokens and one: still bound by memory"
    assert rounds_ms[6] - rounds_ms[5] == pytest.approx(15.0), "a row more takes 10 ms"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--target-params", "many"], "--target-params many: not a number of parameters above 0; write 7B"),
        (["--cloud-bandwidth", "900GHz"], "--cloud-bandwidth 900GHz: not a memory bandwidth above 0"),
        (
            ["--cloud-bandwidth", "900Gb/s"],
            "--cloud-bandwidth 900Gb/s: not a memory bandwidth above 0",
        ),  # bits
        (["--edge-flops", "0T"], "--edge-flops 0T: not operations a second above 0"),
        (["--bytes-per-param", "1,2,3"], "--bytes-per-param 1,2,3: want one number above 0, or two"),
    ],
)
def test_a_size_that_cannot_be_read_is_named_with_its_flag(
    change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ROOFLINE_FLAGS, *change]) == 2
    assert words in capsys.readouterr().err


def test_a_size_without_its_machine_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rtt", "5ms", "--alpha", "0.8", "--t-draft", "1ms", "--target-params", "7B"]) == 2
    told = capsys.readouterr().err
    assert "--target-params needs --cloud-bandwidth, --cloud-flops too; or give --t-target instead" in told


def test_scaled_quantities_are_read_with_their_prefixes() -> None:
    assert parse_num_params("7B", "--x") == parse_num_params("7e9", "--x") == 7e9
    assert parse_bandwidth("900 GB/s", "--x") == 9e11 and parse_flops("300T", "--x") == 3e14


# ------------------------------------------------------------------------------------------- memory

MEMORY = ["plan", "--target-params", "8.03B", "--weights", "nf4"]


def test_what_fits_is_said_without_any_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MEMORY, "--kv", "fp8", "--gpu-memory", "24GiB", "--sessions", "16"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "A target of 8.03B parameters with nf4 weights and 16 sessions of 4,096 tokens fits on"
    )
    assert any(
        "65KiB   fp8; 32 layers, 8 KV heads of 128 (assumed, as Llama 3.1 8B)" in line for line in lines
    )
    assert lines[-1].split()[0] == "24GiB" and "16" in head


def test_memory_is_what_the_weights_the_kv_and_a_step_take() -> None:
    shape = nearest_shape(7e9)
    assert shape.name == "Llama 3.1 8B" and nearest_shape(5e8).name == "Llama 3.2 1B"
    plan = MemoryPlan(8.03e9, "nf4", "fp8", shape, (28, 4, 128), 1000, 4, (24 << 30,))
    tables = 2 * 128_256 * 4096
    assert plan.weight_bytes == pytest.approx(
        2 * tables + (8.03e9 - tables) * (4 + 8 / 64 + 32 / 64 / 256) / 8
    )
    assert plan.token_bytes == 2 * 28 * 4 * (128 + 2), "a byte each, and a float16 scale"
    wide = replace(plan, weights="float32", kv="auto")
    assert (wide.weight_bytes, wide.token_bytes) == (4 * 8.03e9, 2 * 28 * 4 * 128 * 4)
    left = plan.left_for_kv(24 << 30)
    assert plan.sessions_on(24 << 30) == left // (1000 * plan.token_bytes) >= 4 and plan.fits(24 << 30)
    least = plan.least_gpu_bytes
    assert plan.fits(least) and not plan.fits(least - (1 << 20))
    assert plan.sessions_on(1 << 30) == 0 and "do not fit" in memory_text(replace(plan, gpus=(1 << 30,)))


def test_usual_gpus_are_listed_and_json_has_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target-params", "70B", "--kv", "auto", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [each["fits"] for each in memory["gpus"]] == [False] * 7, "140 GB of bfloat16"
    assert memory["weight_bytes"] == 140e9 and memory["least_gpu_bytes"] > memory["gpus"][-1]["bytes"]
    assert main(["plan", "--target-params", "70B", "--weights", "nf4", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [each["fits"] for each in memory["gpus"]] == [False] * 4 + [True] * 3


def test_beside_times_nf4_is_what_a_forward_reads(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--cloud-bandwidth", "900GB/s", "--cloud-flops", "300T"]
    assert main([*MEMORY, *machine, "--t-draft", "3ms", "--rtt", "20ms", "--alpha", "0.8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected_ms = told["memory"]["weight_bytes"] / 900e9 * 1e3
    assert told["parts"]["target_token"]["value"] == pytest.approx(expected_ms, rel=1e-3)


def test_a_method_that_drafts_no_trees_has_none_in_its_plan_and_is_in_its_advice() -> None:
    tied = replace(parts(0.1, draft_s=0.001), tree_base=Known(0.001, GIVEN))
    assert "--tree" in advice(make_plan(tied))
    block = make_plan(replace(tied, method=Method.BLOCK))
    assert not block.trees and TREE not in block.modes
    assert advice(block).endswith("--method block; --mode auto decides as it goes.")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["plan", "--kv", "fp8"], "--kv needs --target-params too"),
        ([*MEMORY, "--sessions", "0"], "--sessions 0: want at least 1"),
        ([*MEMORY, "--target-kv", "28x4"], "--target-kv 28x4: want layers, KV heads and their size"),
        ([*MEMORY, "--gpu-memory", "lots"], "--gpu-memory lots: not a size"),
        ([*MEMORY, "--bytes-per-param", "1", "--rtt", "3ms"], "--bytes-per-param 1 beside --weights nf4"),
        ([*MEMORY, "--bytes-per-param", "1"], "--bytes-per-param 1 beside --weights nf4"),
        (
            ["plan", "--target-params", "7B", "--sessions", "2", "--bytes-per-param", "1"],
            "beside --sessions 2",
        ),
        ([*MEMORY, "--max-draft-tokens", "-5"], "--max-draft-tokens -5: want 1 to"),
        ([*MEMORY, "--price-per-hour", "2"], "needs --cloud-bandwidth, --cloud-flops too"),
    ],
)
def test_what_memory_cannot_be_planned_by_is_refused_by_its_flag(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert words in capsys.readouterr().err
