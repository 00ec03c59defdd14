"""A system's description: what it may say, how mistakes are told, what the command makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from played_systems import edges, system

from outrider.common.errors import UsageError
from outrider.experiments.simulator.command import find_capacity, main, parse_objective
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.parts.times import DEFAULT_TIMES, load_times
from outrider.experiments.simulator.run import play
from outrider.experiments.simulator.shards import num_parts, play_parts

SYSTEMS = Path(__file__).resolve().parents[3] / "experiments" / "simulator" / "systems"


def write(path: Path, description: dict) -> Path:
    path.write_text(json.dumps(description))  # which is YAML
    return path


@pytest.mark.parametrize(
    "description, words",
    [
        ({"secnds": 3}, "secnds .*did you mean seconds"),
        ({"edges": "many"}, "edges: .*expected a list of groups"),
        ({"edges": [{"cuont": 3}]}, r"edges\[0\].*did you mean count"),
        ({"edges": [{"edge": {"mode": "fast"}}]}, r"mode .*edges\[0\]: edge.*one of speculative"),
        ({"edges": [{"draft": {"token": 1}}]}, r"edges\[0\]: draft.*token_ms"),
        ({"edges": [{"output_tokens": [9, 3]}]}, r"output_tokens.*\[lowest, highest\]"),
        ({"edges": [{"rate": 1, "think_s": 1}]}, "give one of them"),
        ({"edges": [{"verifiers": "b"}]}, "there are verifiers"),
        ({"edges": [{"link": "moon"}]}, "moon"),
        ({"verifiers": [{"name": "a"}, {"name": "a"}]}, "called alike"),
        ({"verifiers": [{"serve": {"max_sesions": 1}}]}, "did you mean max_sessions"),
        ({"times": "slow"}, "times: cannot read"),
        ({"seconds": 5, "warmup_s": 5}, "warmup_s is 5 and seconds 5, so that nothing would count"),
    ],
)
def test_mistakes_are_named_with_their_place(description, words):
    with pytest.raises(UsageError, match=words):
        load_system(description)


@pytest.mark.parametrize("acceptance", ["embedded T=9", 1.5, [], [0.5, "x"]])
def test_acceptance_is_the_name_of_traces_or_chances(acceptance):
    with pytest.raises(UsageError, match=r"edges\[0\]: acceptance"):
        play(load_system(system(edges(acceptance=acceptance))))


def test_times_of_a_real_system_are_committed():
    times = load_times(DEFAULT_TIMES)
    assert times.verifier.step_ms > 0 and times.draft.token_ms > 0 and "measure" in times.source


@pytest.mark.parametrize("path", sorted(SYSTEMS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_committed_systems_play(path):
    found = figures_of(play(load_system(path, seconds=2.0, warmup_s=0.0).with_edges(6)))
    assert found.total.num_edges >= 3


def test_as_many_edges_as_asked_for_keep_the_proportions():
    asked = load_system(system(edges(name="a", count=30), edges(name="b", count=10))).with_edges(8)
    assert [plan.group.count for plan in asked.edges] == [6, 2]


def test_parts_on_cores_of_their_own_give_the_same_figures():
    verifier = {"count": 4, "balance": "edge", "serve": {"prefill_chunk_tokens": 256}}
    group = edges(count=500, think_s=20, prompt_tokens=8, link="5g")
    description = load_system(system(group, verifier=verifier, seconds=3.0))
    assert num_parts(description, 2) == 2
    assert figures_of(play_parts(description, num_processes=2)) == figures_of(play(description))


def test_edges_that_may_meet_any_verifier_stay_in_one_process():
    description = load_system(system(edges(count=500), verifier={"count": 4, "balance": "session"}))
    assert num_parts(description, 2) == 1


def test_capacity_is_the_most_edges_that_meet_the_objective():
    heard = []
    group = edges(prompt_tokens=4, output_tokens=16)
    slow = {"times": {"step_ms": 20, "token_ms": 2}}
    description = load_system(system(group, verifier=slow, seconds=8.0))
    objective = parse_objective("p95_commit_gap=250ms")
    found = find_capacity(description, objective, lambda n, outcome, is_met: heard.append((n, is_met)))
    assert 4 < found.num_edges < 200 and found.too_many == found.num_edges + 1
    assert (found.num_edges, True) in heard and (found.too_many, False) in heard
    assert objective.is_met(found.outcome) and not objective.is_met(found.missed)


def test_the_capacity_found_is_a_number_that_was_played():
    groups = [edges(name=name, count=count, requests=1, output_tokens=1) for name, count in
              (("a", 10), ("b", 1), ("c", 1))]  # fmt: skip
    description = load_system(system(*groups, seconds=2.0))  # begins with three, of which there are none
    heard = []
    objective = parse_objective("p95_ttft=1us")
    found = find_capacity(description, objective, lambda n, outcome, is_met: heard.append(n))
    assert (found.num_edges, found.too_many, heard) == (0, 4, [4])


@pytest.mark.parametrize("text", ["p95=3ms", "p95_commit_gap=3", "max_ttft=1s", ""])
def test_an_objective_is_a_figure_and_a_limit(text):
    with pytest.raises(UsageError, match=r"--find-capacity|not a duration"):
        parse_objective(text)


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    path = write(tmp_path / "system.yaml", system(edges(name="phones", count=2, requests=1)))
    assert main([str(path)]) == 0
    assert "phones" in capsys.readouterr().out
    assert main([str(path), "--json", "--edges", "3", "--seed", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["num_finished"] == 3 and found["seed"] == 5


def test_the_command_asks_for_a_system():
    with pytest.raises(UsageError, match="no system given"):
        main([])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.yaml", "--edges", "0"], "--edges 0: want at least 1"),
        (
            ["x.yaml", "--find-capacity", "p95_ttft=1s", "--edges", "3"],
            "--edges has no effect with --find-cap",
        ),
        (["x.yaml", "--find-capacity", "p95_ttft=1s", "--out", "d"], "--out has no effect with --find-cap"),
        (["x.yaml", "--sweep", "s.yaml", "--out", "d"], "SYSTEM.yaml has no effect with --sweep"),
        (["--sweep", "s.yaml", "--out", "d", "--seed", "0"], "--seed has no effect with --sweep"),
        (["--sweep", "s.yaml", "--out", "d", "--json"], "--json has no effect with --sweep"),
    ],
)
def test_arguments_without_effect_are_refused_by_name(arguments, words):
    with pytest.raises(UsageError, match=words):
        main(arguments)
