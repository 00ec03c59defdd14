"""`make experiments` as a program: its cases, and sweeps that load."""

from __future__ import annotations

import pytest

from benchmarks.experiments import CASES, FULL_SWEEPS, QUICK_SWEEPS
from benchmarks.matrix import SWEEPS
from benchmarks.results_file import pick_names
from outrider.common.errors import UsageError
from outrider.experiments.sweep.config.loading import load_sweep
from outrider.experiments.sweep.results.records import BASELINES

RTTS_MS = [1, 15, 30, 60, 100, 200, 600]


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_of_ours_has_every_baseline_an_a_a_and_three_repeats(path: object) -> None:
    config = load_sweep(path)  # type: ignore[arg-type]
    assert config.baselines == BASELINES and config.a_a and config.repeats >= 3


def test_the_full_matrix_has_the_round_trips_and_slow_downs_asked_for() -> None:
    slow_downs = set()
    for name in FULL_SWEEPS:
        config = load_sweep(SWEEPS / f"{name}.yaml")
        assert [profile.rtt_ms for profile in config.profiles] == RTTS_MS
        slow_downs |= {(f, d) for f in config.min_forward_ms for d in config.min_draft_ms}
    assert slow_downs == {(0, 0), (30, 0), (30, 10), (70, 0), (70, 10)}
    assert all((SWEEPS / f"{name}.yaml").exists() for name in QUICK_SWEEPS)


def test_cases_are_picked_by_name_and_an_unknown_one_is_named() -> None:
    assert pick_names("", CASES) == list(CASES)
    assert pick_names("ci, links", CASES) == ["links", "ci"]
    with pytest.raises(UsageError, match=r"speed.*want one of links, plan"):
        pick_names("speed", CASES)
