"""What a benchmark found: a table for a person, `benchmarks/results/NAME.json` for a machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Measure:
    """`target` is how the issue words it; `met` is computed from the value, None where nothing is asked."""

    id: str
    measure: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


def at_least(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f">= {bound:g}", lambda value: value >= bound


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {bound:g}", lambda value: value <= bound


def judged(
    id: str, measure: str, value: float, unit: str, target: tuple[str, Callable[[float], bool]]
) -> Measure:
    """A measure with a target: `judged("main.x", "...", 1.2, "ratio", at_least(1.0))`."""
    wording, is_met = target
    return Measure(id, measure, round(value, 4), unit, wording, is_met(value))


def write_results(name: str, measures: Sequence[Measure], details: dict[str, Any]) -> Path:
    """Writes the JSON and prints the table; returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "commit": _git_commit(),
        "machine": _machine(),
        "command": f"python -m {_module_name()} {' '.join(sys.argv[1:])}".strip(),
        "measures": [asdict(measure) for measure in measures],
        "details": details,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(measures)
    print(f"\nwritten to {path.relative_to(ROOT)}")
    return path


def print_table(measures: Sequence[Measure]) -> None:
    marks = {True: "met", False: "MISSED", None: ""}
    print(f"\n{'id':<24}{'value':>10} {'unit':<10}{'target':<10}{'':<8}measure")
    for m in measures:
        print(f"{m.id:<24}{m.value:>10.3f} {m.unit:<10}{m.target:<10}{marks[m.met]:<8}{m.measure}")


def _git_commit() -> str:
    commit, is_dirty = git_state()
    return commit + ("-dirty" if is_dirty else "")


def git_state() -> tuple[str, bool]:
    """The commit, and whether tracked files differ from it; results themselves do not count."""

    def git(*arguments: str) -> str:
        done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    is_dirty = bool(git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"))
    return git("rev-parse", "--short=12", "HEAD"), is_dirty


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "gpu": None}


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name
