"""Benchmarks whose stages are modules: each is run by its name, and what it found is written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import results_file
from benchmarks.gpu_paths import run as gpu_paths
from benchmarks.library import run as library
from benchmarks.quantised import run as quantised
from benchmarks.results_file import run_modules
from benchmarks.trees import run as trees
from outrider.common.errors import UsageError
from outrider.experiments.shared.results import Measure, git_state


@pytest.mark.parametrize("bench", [trees, gpu_paths, library, quantised])
def test_every_stage_has_its_module(bench: SimpleNamespace) -> None:
    package = bench.__name__.rpartition(".")[0]
    assert [each for each in bench.STAGES if not importlib.util.find_spec(f"{package}.{each}")] == []


def test_a_machine_without_git_knows_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks read it as they are imported, there too."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == ("", False)


def test_the_stages_that_are_asked_for_run_and_write_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(results_file, "ROOT", tmp_path)
    monkeypatch.setattr(results_file, "_STATE_AT_START", ("aaaaaaaaaaaa", False))
    monkeypatch.setattr(results_file, "git_state", lambda: ("aaaaaaaaaaaa", False))
    for name, value in (("one", 1.0), ("two", 2.0), ("three", 3.0)):
        found = [Measure(f"fake.{name}", "text", value, "ratio")], {"seen": name}
        module = SimpleNamespace(run=lambda found=found: found)
        monkeypatch.setitem(sys.modules, f"benchmarks.fake.{name}", module)
    stages = ("one", "two", "three")
    monkeypatch.setattr("sys.argv", ["run", "--only", "three,fake.one"])
    assert run_modules("fake", stages, "What it is.", "fake.") == 0
    record = json.loads((tmp_path / "fake.json").read_text())
    assert [each["value"] for each in record["measures"]] == [1, 3]
    assert [record["details"][name]["seen"] for name in record["details"]] == ["one", "three"]
    monkeypatch.setattr("sys.argv", ["run", "--only", "two"])
    monkeypatch.setattr(results_file, "git_state", lambda: ("bbbbbbbbbbbb", False))  # by a commit meanwhile
    assert run_modules("fake", stages, "What it is.", "fake.") == 0
    record = json.loads((tmp_path / "fake.json").read_text())
    assert [each["value"] for each in record["measures"]] == [1, 2, 3]
    one, two, three = record["details"].values()
    assert one["command"].endswith(" --only three,fake.one") and one["command"] == three["command"]
    assert two["command"].endswith(" --only two") and record["command"] == two["command"]
    for run in (record, one, two, three):
        is_of_last = run in (record, two)
        assert run["commit"] == "aaaaaaaaaaaa" and ("commit_at_end" in run) is is_of_last
    assert record["commit_at_end"] == "bbbbbbbbbbbb"
    monkeypatch.setattr("sys.argv", ["run", "--only", "four"])
    with pytest.raises(UsageError, match="want one of one, two, three"):
        run_modules("fake", stages, "What it is.", "fake.")
