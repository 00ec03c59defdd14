"""`python -m benchmarks.gpu_check`: its rehearsal, and what becomes of stages that break, hang or cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.notes import Note

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check.plan import STAGES, Stage
from benchmarks.gpu_check.runner import ROOT, Outcome, Run, run_stages

DEADLINE_S = 800  # of the rehearsal here: a busy machine takes several times what `gpu.rehearse` says

MODULE = """
import sys, time
from pathlib import Path
from outrider.experiments.shared.results import at_most

def run(setting, report):
    report.figure("gpu.first", "judged on a GPU alone", 3.0, "ms", at_most(1.0))
    report.check("gpu.second", "judged anywhere", 1.0, "rows", at_most(1.0))
    report.skip("a part", "not here")
    {ending}
"""


def run_of(
    stages: dict[str, str], out: Path, monkeypatch: pytest.MonkeyPatch, **limits: float
) -> list[Outcome]:
    """Runs stages of given last lines; `limits` by name, 30 s each otherwise."""
    folder = out / "modules"
    folder.mkdir()
    for name, ending in stages.items():
        (folder / f"{name}.py").write_text(MODULE.format(ending=ending))
    # The stage's process finds them as modules of the folder `gpu_check`.
    start = "import sys, benchmarks.gpu_check as package; package.__path__.append(sys.argv.pop(1)); "
    start += "from benchmarks.gpu_check.stage import main; sys.exit(main())"
    real_popen = subprocess.Popen

    def popen(arguments: list[str], **options: object) -> object:
        if arguments[1:3] == ["-m", "benchmarks.gpu_check.stage"]:
            arguments = [sys.executable, "-c", start, str(folder), *arguments[3:]]
        return real_popen(arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("benchmarks.gpu_check.runner.REHEARSAL_LIMIT_S", 0.0)
    run = Run(out, is_rehearsal=True, deadline_s=limits.pop("deadline", 100.0))
    run_stages(run, [Stage(name, name, limits.get(name, 30.0), ()) for name in stages], lambda line: None)
    return run.outcomes


def test_a_stage_that_breaks_or_hangs_keeps_its_figures_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"broken": "raise ValueError('no such thing')", "hung": "time.sleep(60)", "right": "pass"}
    broken, hung, _ = outcomes = run_of(stages, tmp_path, monkeypatch, hung=3.0)
    assert [each.status for each in outcomes] == ["failed", "failed", "passed"]
    assert broken.reason == "exit status 1: ValueError: no such thing" and "limit of 3 s" in hung.reason
    for each in outcomes:
        assert [(m["id"], m["met"]) for m in each.measures] == [("gpu.first", None), ("gpu.second", True)]
    record = json.loads((tmp_path / "gpu_rehearsal.json").read_text())
    assert len(record["measures"]) == 6 and record["details"]["right"]["skipped"] == {"a part": "not here"}
    lines = command.table(outcomes)
    assert any("FAILED: cut at its limit" in line for line in lines)
    assert any(line.split()[:2] == ["gpu.second", "1"] and " pass " in line for line in lines)


def test_what_finds_no_package_or_no_time_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, is_rehearsal=True, deadline_s=20.0)
    stages = (
        Stage("no_package", "x", 5, ("numpy", "no_such_package", "no.such.package")),
        Stage("no_time", "x", 500, ()),
        Stage("needed", "x", 5, ("no_such_package",), is_needed=True),
        Stage("after", "x", 5, ()),
    )
    run_stages(run, stages, lambda line: None)
    assert {each.status for each in run.outcomes} == {"not run"} and not run.is_right
    reasons = [each.reason for each in run.outcomes]
    assert reasons[0] == "not installed: no_such_package, no.such.package"
    assert reasons[1].endswith("s left of 20") and reasons[3] == "needed did not pass"


def test_stages_share_what_is_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "seconds", 0.0)
    first, later = Stage("first", "x", 10), [Stage("second", "x", 30)]
    run = Run(Path(), is_rehearsal=False, deadline_s=25.0)  # of which 5 are kept for the end
    assert run.limit_s(first, later) == pytest.approx(5.0)
    assert run.limit_s(later[0]) == pytest.approx(20.0), "what the first leaves"
    assert run.limit_s(Stage("needed", "x", 60, is_needed=True), later) == 60.0, "without it none is run"


def test_a_copys_record_has_the_commit_that_is_named_and_no_places_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "gpu_check --out /root/out --deadline 60 --commit=0123456789ab --only step"
    monkeypatch.setattr(sys, "argv", flags.split())
    path = Run(tmp_path, is_rehearsal=True, deadline_s=1.0, commit="0123456789ab").write()
    record = json.loads(path.read_text())
    assert record["commit"] == "0123456789ab"
    assert record["command"] == "python -m benchmarks.gpu_check --deadline 60 --only step"


def test_a_clones_record_has_the_commit_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.runner._commit", lambda: "aaaaaaaaaaaa")
    run = Run(tmp_path, is_rehearsal=True, deadline_s=1.0)
    monkeypatch.setattr("benchmarks.gpu_check.runner._commit", lambda: "bbbbbbbbbbbb")
    assert json.loads(run.write().read_text())["commit"] == "aaaaaaaaaaaa"


def test_all_stages_together_fit_the_default_deadline() -> None:
    assert sum(stage.limit_s for stage in STAGES) <= 560
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_a_rehearsal_is_not_kept_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rehearse", "--out", str(ROOT / "benchmarks" / "results")])
    assert "a rehearsal measures no GPU" in capsys.readouterr().err


def test_without_the_packages_the_command_itself_starts(tmp_path: Path) -> None:
    """Its own modules import the standard library alone, so that it can name what is missing."""
    code = "import sys; sys.path.insert(0, '.'); from benchmarks.gpu_check.__main__ import main; "
    code += f"sys.exit(main(['--out', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "environment not run" in done.stdout, done.stderr
    assert "not installed: torch" in done.stdout and "environment did not pass" in done.stdout
    assert "nothing is written" in done.stdout and not list(tmp_path.glob("*.json")), (
        "no GPU's record is lost"
    )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_stage_passes_in_a_rehearsal(tmp_path: Path, note: Note) -> None:
    pytest.importorskip("triton")
    arguments = ("--rehearse", "--out", str(tmp_path), "--deadline", str(DEADLINE_S))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    record = json.loads((tmp_path / "gpu_rehearsal.json").read_text())
    status = {stage: details["status"] for stage, details in record["details"].items()}
    assert set(status.values()) == {"passed"}, done.stdout + done.stderr
    *others, rehearsal = record["measures"]
    assert rehearsal["id"] == "gpu.rehearse"
    assert not [each["id"] for each in others if each["met"] is False], done.stdout
    note(f"gpu.rehearse: {rehearsal['value']:g} s")
