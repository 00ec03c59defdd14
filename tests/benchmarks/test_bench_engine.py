"""The engine's benchmark as a program: its cases, its processes, its stub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.engine.run import CASES, pick_cases
from benchmarks.engine.setup import Bench, generate_load, pinned, running_stub
from outrider.common.errors import UsageError

IDS = {"stub_rounds", "overhead_ms", "batch8", "outside", "prefix_ttft", "prefill_stall", "vs_hf_batch"}


def test_every_asked_measure_has_a_case() -> None:
    assert {id for ids in CASES.values() for id in ids} == IDS


def test_cases_are_picked_by_id_and_an_unknown_one_is_named() -> None:
    assert pick_cases("engine.overhead_ms, batch8") == [
        "benchmarks.engine.rounds:measure_overhead",
        "benchmarks.engine.inside:measure_batch8",
    ]
    assert pick_cases("") == list(CASES)
    with pytest.raises(UsageError, match=r"speed.*want one of"):
        pick_cases("speed")


def test_the_stub_verifier_answers_a_generator_in_another_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_quick=True)
    with running_stub() as stub:
        flags = ("--closed", "--sessions", "8", "--seconds", "0.5", "--warmup-s", "0.2")
        report = generate_load(stub.address, bench.stub_file, *flags)
    assert report.is_right and report.num_rounds > 100, report


def test_pinning_lasts_as_long_as_its_block() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned(core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
