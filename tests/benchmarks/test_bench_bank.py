"""The bank of pairs in virtual time, and constants fitted on some pairs and judged on the others."""

from __future__ import annotations

import dataclasses
import signal
import statistics
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.controller import fit
from benchmarks.controller.bank import (
    CLOUD_ONLY,
    DEFAULT,
    Case,
    Rivals,
    all_cases,
    bank,
    draw_cases,
    fixed,
    power_mean,
)
from benchmarks.controller.fit import Judged, Trial, all_changes, choose, play
from benchmarks.controller.simulated import Place, play_edges
from outrider.edge_client.controller.settings import SETTINGS
from outrider.experiments.shared.acceptance_traces import TextTrace

NEAR = Case("embedded/trained T=0", 32, 5, "recorded", is_later=False)


def test_cases_of_every_pair_are_drawn_by_the_seed() -> None:
    cases = draw_cases(3, seed=1)
    assert cases == draw_cases(3, seed=1) != draw_cases(3, seed=2)
    pairs = [case.pair for case in cases]
    assert {pairs.count(pair) for pair in pairs} == {3} and len(set(pairs)) == 11
    assert len(all_cases()) == len(bank()) * 3 * 5 * 4 * 2


def test_a_stretched_case_takes_its_stretched_times() -> None:
    stretched = Case("embedded/random T=0", 32, 5, "forward 70 draft 12", is_later=True)
    assert stretched.place().draft["token_ms"] == 12.0
    assert stretched.play(CLOUD_ONLY) == pytest.approx(0.070, rel=0.05)
    assert stretched.play(fixed(4)) > 0.070 + 4 * 0.012


def test_an_edges_own_time_between_two_rounds_is_measured() -> None:
    text = TextTrace(np.array([0] * 12, np.uint8), np.zeros((12, 0), np.float32))
    place = Place(20, {"step_ms": 5.0}, {"token_ms": 1.0}, {"commit_ms": 3.0})
    ((played,),) = play_edges([[text]], place, fixed(2))
    own_ms = [each.edge_ms for each in played.stats.rounds]
    assert own_ms[0] is None, "no answer was before it"
    assert statistics.median(ms for ms in own_ms[1:] if ms is not None) == pytest.approx(3.0, abs=0.5)


@pytest.mark.parametrize(
    ("is_right", "mode"), [(True, "speculative"), (False, "cloud-only"), (None, "speculative")]
)
def test_a_first_text_begins_with_what_the_prompt_shows(is_right: bool | None, mode: str) -> None:
    told = None if is_right is None else np.full(16, is_right)
    text = TextTrace(np.array([2] * 12, np.uint8), np.zeros((12, 0), np.float32), prompt=told)
    place = Place(5, {"step_ms": 15.0, "token_ms": 0.2}, {"token_ms": 0.5})
    edge = {**DEFAULT, "pipeline": "off"}
    ((played,),) = play_edges([[text]], place, edge, num_prompt_tokens=20)
    assert played.stats.stretches[0].mode == mode


def test_constants_change_in_the_processes_that_play_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = SETTINGS.usual_share
    doubtful = {"usual_accepted_tokens": 1.0, "usual_rejected_tokens": 400.0, "usual_share": 0.999}
    case = dataclasses.replace(NEAR, stretch="forward 30")  # where rounds are worth it on any machine
    assert play(doubtful, [case]) != play({}, [case]) == play({}, [case])
    assert SETTINGS.usual_share == before


def test_the_processes_of_a_pool_end_with_their_owner() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, signal\n"
            "from benchmarks.controller.pool import fresh_processes\n"
            "if __name__ == '__main__':\n"
            "    with fresh_processes() as pool:\n"
            "        pool.submit(os.getpid).result()\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n",
        ],
        stdout=subprocess.PIPE,
    )
    output, _ = owner.communicate(timeout=60)  # until the last process that holds this pipe has ended
    assert (owner.returncode, output) == (-signal.SIGKILL, b"")


def test_what_is_best_without_a_pair_is_chosen_without_it() -> None:
    shipped = Trial({}, [1.0, 1.0, 1.0])
    trials = [
        Trial({"a": 1}, [0.5, 1.0, 1.0]),  # good for the pair that is left out alone
        Trial({"b": 1}, [1.0, 0.9, 0.9]),
        Trial({"b": 2}, [1.0, 0.8, 0.9]),
        Trial({"c": 1}, [1.0, 1.1, 0.95]),
    ]
    assert choose(trials, shipped, lambda seconds: power_mean(seconds[1:])) == {"b": 2}
    assert choose(trials, shipped, lambda seconds: power_mean(seconds[:1])) == {"a": 1}


def test_no_change_of_the_grid_is_what_ships() -> None:
    for changes in all_changes():
        assert changes != {name: getattr(SETTINGS, name) for name in changes}
    assert {name for changes in all_changes() for name in changes} == {n for names in fit.GRID for n in names}


def test_every_constant_is_fitted_or_its_reason_is_named() -> None:
    known = [name for names in (*fit.GRID, *fit.NOT_FITTED.values()) for name in names]
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(SETTINGS))


def test_every_judgement_is_measured_and_told_of_each_case() -> None:
    judgements = {name: Judged([1.0, 1.2], [0.9, 1.0]) for name in fit._WHAT}
    cases = [NEAR, NEAR]
    found = {each.id: each.value for each in fit._measures(cases, judgements, [1.0, 1.1])}
    assert len(found) == 3 * len(judgements) + 1
    assert found["ctl.bank"] == pytest.approx(1.1) and found["ctl.bank_worst_left_out"] == 1.2
    rivals = [Rivals({"cloud-only": 0.01})] * 2
    details = fit._details(cases, rivals, Trial({}, [0.01, 0.012]), judgements, {"prose/trained": {}})
    assert "(1.200), left out 1.200" in details["cases"][str(NEAR)]
