"""Runs the stages one after the other, each in a process of its own with a limit, and keeps a record of them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.plan import Stage

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL_LIMIT_S = 240.0  # at least: a CPU may be shared, with other tests too
RESERVE_S = 5.0  # of the deadline, for the last stage's end and the table
# Triton reads the first when it is imported. The toys are too small for several threads.
REHEARSAL = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


@dataclass
class Outcome:
    """Holds how a stage went; `status` is "passed", "failed" or "not run"."""

    stage: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    measures: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Returns the ids of the figures that miss their targets."""
        return [measure["id"] for measure in self.measures if measure["met"] is False]


@dataclass
class Run:
    """Holds the options of a run, and what came of its stages so far."""

    out: Path
    is_rehearsal: bool
    deadline_s: float
    commit: str | None = None  # of the sources; None: this is a clone, which knows
    start_s: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    broken: str = ""  # a stage without which no other is run

    def __post_init__(self) -> None:
        if self.commit is None:
            self.commit = _commit()  # before anything is measured: there may be another one at the end

    @property
    def seconds(self) -> float:
        """Returns the time since the start."""
        return time.monotonic() - self.start_s

    def limit_s(self, stage: Stage, later: Sequence[Stage] = ()) -> float:
        """Returns after how long a stage is cut, which leaves those after it their share of the deadline."""
        if self.is_rehearsal:
            return max(stage.limit_s, REHEARSAL_LIMIT_S)
        if stage.is_needed:
            return stage.limit_s
        wanted_s = stage.limit_s + sum(each.limit_s for each in later)
        return stage.limit_s * (self.deadline_s - RESERVE_S - self.seconds) / wanted_s

    @property
    def name(self) -> str:
        """Returns the name of the files that are written."""
        return "gpu_rehearsal" if self.is_rehearsal else "gpu_check"

    @property
    def is_right(self) -> bool:
        """Returns whether every stage passed and no figure missed its target."""
        return all(each.status == "passed" and not each.missed for each in self.outcomes)

    @property
    def is_kept(self) -> bool:
        """Returns whether the record is written: without a GPU, not over that of a machine that had one."""
        return self.is_rehearsal or not self.broken

    def _flags(self) -> str:
        """Returns the options of the command but those that name places of this machine."""
        flags, is_left_out = list[str](), False
        for each in sys.argv[1:]:
            if not is_left_out and not each.startswith(("--out", "--commit")):
                flags.append(each)
            is_left_out = each in ("--out", "--commit")
        return " ".join(flags)

    def write(self) -> Path:
        """Writes the record so far, in the format of `benchmarks.results_file`; returns its path."""
        facts = next((each.details for each in self.outcomes if each.stage == "environment"), {})
        record = {
            "commit": self.commit,
            "machine": {
                "cpu": facts.get("cpu", platform.processor()),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "gpu": facts.get("gpu"),
            },
            "command": f"python -m benchmarks.gpu_check {self._flags()}".strip(),
            "measures": [measure for each in self.outcomes for measure in each.measures],
            "details": {
                each.stage: {
                    "status": each.status,
                    "reason": each.reason,
                    "seconds": round(each.seconds, 1),
                    "skipped": each.skipped,
                    **each.details,
                }
                for each in self.outcomes
            },
        }
        path = self.out / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return path


def run_stages(run: Run, stages: Sequence[Stage], say: Callable[[str], None] = print) -> None:
    """Runs all stages, writing the record after each, unless there is nothing to run them on. Output of theirs goes to
    a log beside it."""
    for number, stage in enumerate(stages, start=1):
        later = stages[number:]
        outcome = _refusal(run, stage, later) or _run_stage(run, stage, later)
        run.outcomes.append(outcome)
        if stage.is_needed and outcome.status != "passed":
            run.broken = stage.name
        if run.is_kept:
            run.write()
        notes = filter(None, (outcome.reason, ", ".join(f"{id} missed" for id in outcome.missed)))
        head = f"[{number}/{len(stages)}] {stage.name} {outcome.status} after {outcome.seconds:.1f} s"
        say(": ".join((head, *notes)))


def _refusal(run: Run, stage: Stage, later: Sequence[Stage]) -> Outcome | None:
    """Returns why a stage is not run, None where it is."""
    left_s = run.deadline_s - RESERVE_S - run.seconds
    limit_s = min(left_s, run.limit_s(stage, later))
    if run.broken:
        return Outcome(stage.name, "not run", f"{run.broken} did not pass")
    if sys.version_info < (3, 11) and not stage.is_needed:
        return Outcome(stage.name, "not run", f"Python {platform.python_version()}; outrider needs 3.11")
    if missing := stage.missing_packages():
        return Outcome(stage.name, "not run", f"not installed: {', '.join(missing)}")
    if limit_s < stage.limit_s / 3:
        return Outcome(stage.name, "not run", f"{max(0.0, left_s):.0f} s left of {run.deadline_s:g}")
    return None


def _run_stage(run: Run, stage: Stage, later: Sequence[Stage]) -> Outcome:
    found = run.out / f"{run.name}.stage"
    found.unlink(missing_ok=True)
    limit_s = min(run.limit_s(stage, later), run.deadline_s - RESERVE_S - run.seconds)
    command = [sys.executable, "-m", "benchmarks.gpu_check.stage", stage.module, str(found)]
    command += ["--limit", f"{limit_s:.1f}", *(["--rehearse"] if run.is_rehearsal else [])]
    start_s = time.monotonic()
    with (run.out / f"{run.name}.log").open("ab") as log:
        log.write(f"\n--- {stage.name}\n".encode())
        log.flush()
        status = _status_of(command, _environment(run, stage), log, limit_s)
        tail = "" if status == 0 else _last_line(Path(log.name))
    outcome = Outcome(stage.name, "passed", seconds=time.monotonic() - start_s)
    if found.exists():  # also of a stage that was cut: what it had measured until then
        record = json.loads(found.read_text(encoding="utf-8"))
        outcome.measures, outcome.skipped = record["measures"], record["skipped"]
        outcome.details = record["details"]
        found.unlink()
    if status is None:
        outcome.status, outcome.reason = "failed", f"cut at its limit of {limit_s:.0f} s"
    elif status:
        outcome.status, outcome.reason = "failed", f"exit status {status}: {tail}"
    return outcome


def _environment(run: Run, stage: Stage) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    rehearsal = REHEARSAL if run.is_rehearsal else {}
    return os.environ | rehearsal | stage.environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _status_of(command: Sequence[str], environment: dict[str, str], log: Any, limit_s: float) -> int | None:
    """Returns the exit status, None where the process and those that it started were killed at the limit."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # after Ctrl-C too
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]


def _commit() -> str:
    """Returns the clone's commit, "" where there is none; the benchmarks' results do not count as changes."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"),
            )
        )
    except OSError:
        return ""
    return commit + ("-dirty" if changes else "")
