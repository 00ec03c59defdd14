"""A sweep's YAML: what it may say, and what is said of a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.common.errors import UsageError
from outrider.edge_client.commands.cli import main
from outrider.experiments.bench import EXAMPLE
from outrider.experiments.sweep.config.loading import load_sweep
from outrider.experiments.sweep.config.schema import SweepConfig, resolved
from outrider.experiments.sweep.config.settings import serve_flags


def load(tmp_path: Path, text: str, **flags: object) -> SweepConfig:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return load_sweep(path, flags)


def test_an_empty_file_is_a_sweep_with_every_default(tmp_path: Path) -> None:
    config = load(tmp_path, "{}")
    assert config.modes == ("speculative",) and config.repeats == 3
    assert config.baselines == ("cloud-only", "co-located", "edge-only", "fixed")
    assert config.edge_settings == {"on_timeout": "wait", "ignore_eos": True}


def test_a_single_value_stands_for_a_list_of_one(tmp_path: Path) -> None:
    config = load(tmp_path, "links: {rtt_ms: 30}\nsessions: 4\ntls: true\ndraft_lengths: null")
    assert [profile.rtt_ms for profile in config.profiles] == [30]
    assert (config.sessions, config.tls, config.draft_lengths) == ((4,), (True,), (None,))


def test_the_example_is_what_it_says_the_defaults_but_for_links_and_policies() -> None:
    config, plain = load_sweep(EXAMPLE), load_sweep(None)
    different = {key for key, value in resolved(config).items() if value != resolved(plain)[key]}
    assert different <= {"links", "policies", "edge", "serve", "variants"}
    assert config.edge_settings == plain.edge_settings


def test_the_example_is_printed_and_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--example"]) == 0
    text = capsys.readouterr().out
    assert text == EXAMPLE.read_text()
    missing = [key for key in resolved(load_sweep(None)) if f"{key}:" not in text]
    assert not missing


def test_a_resolved_sweep_loads_as_the_same_sweep(tmp_path: Path) -> None:
    config = load(tmp_path, "links: [4g, {rtt_ms: 5}, outage]\nslo: {tpot_ms: 50}\nedge: {top_p: 0.9}")
    again = load(tmp_path, json.dumps(resolved(config)))
    assert resolved(again) == resolved(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polices: [fixed]", r"unknown key polices \(file .*sweep.yaml\); did you mean policies"),
        ("slo: {tpot: 1}", r"unknown key slo.tpot .*did you mean slo.tpot_ms"),
        ("policies: [optimum]", r"policies: there is no 'optimum'; did you mean optimal"),
        ("modes: speculativ", r"modes: there is no 'speculativ'; did you mean speculative"),
        ("methods: coupeld", r"methods: there is no 'coupeld'; did you mean coupled"),
        ("baselines: [edge]", r"baselines: there is no 'edge'; did you mean edge-only"),
        ("links: [5gg]", r"no link profile is called '5gg'; did you mean 5g"),
        ("links: [4g, {base: 4g, name: 4g}]", r"links: two are called '4g'"),
        ("repeats: 0", r"repeats .*expected an integer, at least 1"),
        ("modes: []", r"modes: is empty"),
        ("edge: {temprature: 1}", r"unknown key temprature \(edge\); did you mean temperature"),
        ("edge: {temperature: 1}", r"edge: temperature is set by the sweep's own key `temperatures`"),
        ("serve: {kv_memroy: 1GiB}", r"unknown key kv_memroy \(serve\); did you mean kv_memory"),
        ("variants: [{name: a, edge: {top_k: 5}}]", r"top_k changes the text itself; set it for all cells"),
        ("variants: [{name: a, edge: {regex: x}}]", r"regex makes other texts.*give constraints: "),
        ("edge: {json_schema: '{}'}", r"json_schema makes other texts.*give constraints: "),
        ("constraints: [{name: a}]", r"constraints\[0\]: want a name and one of json_schema"),
        ("constraints: [{name: a, regex: x, grammar: y}]", r"constraints\[0\]: want a name and one of"),
        ("constraints: [{name: a, regexp: x}]", r"constraints\[0\]: there is no 'regexp'"),
        ("constraints: [x]", r"constraints\[0\]: is 'x'"),
        ("constraints: []", r"constraints: is empty"),
        ("constraints: [null, null]", r"constraints: two are called ''"),
        ("models: synthetic\nconstraints: [{name: a, regex: x}]", r"the synthetic pair has no texts"),
        ("variants: [{name: a}, {name: a, edge: {transport: unary}}]", r"variants: two are called 'a'"),
        ("variants: [{edge: {transport: unary}}]", r"variants\[0\]: has no name"),
        ("variants: [{name: a, modes: auto}]", r"variants\[0\].modes: there is no 'auto'"),
        ("num_speculative_tokens: 4", r"num_speculative_tokens .*; a sweep has it as `draft_lengths`"),
        ("tree: 16", r"unknown key tree .*; a sweep has it as `trees`"),
        ("variants: [{name: a, edge: {tree: 16}}]", r"tree is set by the sweep's own key `trees`"),
        ("trees: [off, 0]", r"trees .*expected a list, each item one of auto, off or an integer, at least 1"),
        ("{trees: 16, models: synthetic}", r"trees: the synthetic pair drafts chains"),
        ("edge: {tree_width: 2}", r"tree_width would change the baselines"),
        ("top_p: 0.9", r"unknown key top_p .*; a setting of the edge goes under `edge: {...}`"),
        ("pipeline: auto", r"unknown key pipeline .* goes under `variants: "),
        ("kv_memory: 1GiB", r"unknown key kv_memory .*; a setting of the verifier goes under `serve: {...}`"),
        ("edge: {pipeline: auto}", r"pipeline would change the baselines; .* edge: {pipeline: 'auto'}}"),
        ("edge: {otlp_endpoint: x}", r"edge: otlp_endpoint is of no use in a sweep"),
        ("edge: {learn: x}", r"edge: learn makes a figure depend on the texts before it; leave it out"),
        ("edge: {suffix_store: x}", r"edge: suffix_store makes a figure depend on the texts before it"),
        ("realisation: tunn", r"there is no 'tunn'; did you mean tun.* Known: direct, simulated, proxy"),
        ("realisation: simulated\ntls: true", r"tls: is not simulated"),
        ("realisation: simulated\nverifier: a:1", r"verifier: nobody is asked where"),
        ("verifier: nowhere", r"verifier: nowhere: want HOST:PORT"),
        ("models: synthetic\nsynthetic: {alpha: 2}", r"alpha 2: not a number between 0 and 1"),
        ("models: synthetic\nsynthetic: [0.8]", r"synthetic: is \[0.8\]; expected {alpha"),
        ("models: {target: /no/where}", r"models: target is /no/where; there is no such directory"),
        ("verifier: 127.0.0.1:7077\nmin_forward_ms: 30", r"min_forward_ms: is a setting of verifiers"),
        ("synthetic: {alpha: 0.8}", r"synthetic: goes with `models: synthetic`"),
        ("models: tiny", r"models: is 'tiny'; expected embedded, synthetic"),
        ("draft_lengths: [-1]", r"draft_lengths: is -1"),
        ("[1, 2]", r"expected keys and values; `edge-client bench --example`"),
        ("a: [", r"is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, text)


def run(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_the_command_wants_a_sweep_and_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 2
    assert "--example" in capsys.readouterr().err
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("links: [{rtt_ms: 5}]\nrealisation: direct")
    assert run(str(sweep)) == 2
    assert "proxy needs no privileges" in capsys.readouterr().err
    assert run(str(sweep), "--resume") == 2
    assert "--resume needs --out" in capsys.readouterr().err
    assert run(str(tmp_path / "none.yaml")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_listing_runs_nothing_and_only_picks_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("policies: [fixed, optimal]\nnum_prompts: 2")
    assert run(str(sweep), "--list", "--only", "optimal", "--repeats", "5") == 0
    shown = capsys.readouterr()
    cell = "loopback speculative optimal T0.8"
    assert shown.out.splitlines() == [cell, f"{cell} again"]
    assert "2 cells, 20 requests" in shown.err
    assert run(str(sweep), "--list", "--only", "nothing") == 2
    assert "no cell's name has it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: nope", "prompts: nope: No such file"),
        ("num_prompts: 9999", "num_prompts: is 9999, and there are "),
        (
            "variants: [{name: u, edge: {pipeline: on, transport: unary}}]",
            "cell 'loopback speculative fixed-4 T0.8 u': --pipeline on needs --transport stream",
        ),
        (
            "edge: {draft_strategy: prompt-lookup}",
            "has none; `baselines` without edge-only leaves it out",
        ),
    ],
)
def test_listing_refuses_what_a_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(text)
    assert run(str(sweep), "--list") == 2
    assert message in capsys.readouterr().err


def test_a_simulated_sweep_refuses_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("realisation: simulated")
    assert run(str(sweep), "--out", str(tmp_path / "out"), "--resume") == 2
    assert "--resume is for real links" in capsys.readouterr().err


def test_settings_of_the_verifier_become_flags_one_for_each_item_of_a_list() -> None:
    settings = {"heads": ["/a b", "/c"], "tokens": None, "max_sessions": 3, "hide_batch_size": False}
    expected = ["--heads", "/a b", "--heads", "/c", "--max-sessions", "3", "--no-hide-batch-size"]
    assert serve_flags(settings) == expected
