"""Writes what a benchmark measured: a table for a person, `benchmarks/results/NAME.json` for a machine. Runs the stages
of benchmarks that have some."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.shared.results import Measure, git_state, print_table
from outrider.experiments.sweep.machine import cpu_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_STATE_AT_START = git_state()  # this is imported before anything is measured

Found = tuple[list[Measure], dict[str, Any]]  # measures, and details by name


def write_results(name: str, measures: Sequence[Measure], details: dict[str, Any]) -> Path:
    """Writes the JSON and prints the table; returns the file."""
    path = save_results(name, measures, details)
    print_table(measures)
    print(f"\nwritten to {path.relative_to(ROOT)}")
    return path


def measured_commit() -> dict[str, str]:
    """Returns the fields that name what was measured: `commit`, at which the program started, and `commit_at_end` where
    there is another one by now, which processes that it started since may have run."""
    commit, was_dirty = _STATE_AT_START
    commit_at_end, is_dirty = git_state()
    named = {"commit": commit + ("-dirty" if was_dirty or is_dirty else "")}
    return named if commit_at_end == commit else named | {"commit_at_end": commit_at_end}


def save_results(name: str, measures: Sequence[Measure], details: dict[str, Any]) -> Path:
    """Writes the JSON; returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        **measured_commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "gpu": None,
        },
        "command": _command(),
        "measures": [asdict(measure) for measure in measures],
        "details": details,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec else Path(sys.argv[0]).name
    return f"python -m {module} {' '.join(sys.argv[1:])}".strip()


class StageRecord:
    """Holds what every stage of a benchmark measured last, in its results file.

    Each stage stands by itself: what other stages measured stays, with the commit and the command that measured it.
    """

    def __init__(self, name: str, stages: Iterable[str]) -> None:
        self._name, self._stages = name, tuple(stages)
        path = RESULTS / f"{name}.json"
        read = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self._measures = {each["id"]: Measure(**each) for each in read.get("measures", ())}
        self._details: dict[str, Any] = read.get("details", {})

    def details(self, stage: str) -> dict[str, Any]:
        """Returns what a stage found the last time, and what was said of its run; nothing where it never ran."""
        return dict(self._details.get(stage, {}))

    def replace(self, stage: str, found: Found, about: dict[str, Any]) -> None:
        """Puts what a stage found, and what is said of its run, in the place of what it found before."""
        measures, details = found
        for id in self._details.get(stage, {}).get("ids", ()):
            self._measures.pop(id, None)
        self._measures |= {each.id: each for each in measures}
        run = {**measured_commit(), "command": _command(), **about}
        self._details[stage] = {"ids": [each.id for each in measures], **run, **details}

    def save(self) -> None:
        """Writes the file, its stages in their order."""
        save_results(self._name, *self._found())

    def write(self) -> None:
        """Writes the file and prints its table."""
        write_results(self._name, *self._found())

    def _found(self) -> Found:
        details = {name: self._details[name] for name in self._stages if name in self._details}
        ids = [id for each in details.values() for id in each["ids"]]
        return [self._measures[id] for id in ids], details


def run_stages(
    record: StageRecord, names: Iterable[str], run: Callable[[str], Iterable[Found]], **about: Any
) -> None:
    """Runs stages by name; each yields what it found so far, all of it, and that is saved as it comes."""
    for name in names:
        print(f"[{name}]", flush=True)
        begin_s = time.monotonic()
        for found in run(name):
            record.replace(name, found, about | {"seconds": round(time.monotonic() - begin_s)})
            record.save()
        record.write()


def stage_parser(name: str, stages: Iterable[str], description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `benchmarks/NAME/run.py`, with `--only` for its stages."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}.run",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(stages)}")
    return parser


def run_modules(name: str, stages: Collection[str], description: str | None, prefix: str) -> int:
    """Runs the command of a benchmark each of whose stages is a module of benchmarks/NAME, whose `run()` returns what
    it found. `prefix` begins the ids of its measures. Returns the exit status."""

    def stage(each: str) -> Iterator[Found]:
        yield importlib.import_module(f"benchmarks.{name}.{each}").run()

    arguments = stage_parser(name, stages, description).parse_args()
    run_stages(StageRecord(name, stages), pick_names(arguments.only, stages, prefix), stage)
    return 0


def pick_names(only: str, known: Collection[str], prefix: str = "") -> list[str]:
    """Returns the known names that `only` lists, separated by commas, or all of them where it is empty.

    Raises `UsageError` naming the known ones.
    """
    wanted = {name.strip().removeprefix(prefix) for name in only.split(",") if name.strip()}
    if unknown := wanted - set(known):
        raise UsageError(f"--only {', '.join(sorted(unknown))}: want one of {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]
