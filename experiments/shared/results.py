"""A figure with the target it is held against, a table of such figures, and the commit that made them."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]  # the clone, or where packages are installed


@dataclass(frozen=True, slots=True)
class Measure:
    """Holds a figure. `target` is its bound in words; `met` is None where nothing is asked."""

    id: str
    measure: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


def at_least(bound: float) -> tuple[str, Callable[[float], bool]]:
    """Returns a lower bound in words and as a check."""
    return f">= {bound:g}", lambda value: value >= bound


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    """Returns an upper bound in words and as a check."""
    return f"<= {bound:g}", lambda value: value <= bound


def judged(
    id: str, measure: str, value: float, unit: str, target: tuple[str, Callable[[float], bool]]
) -> Measure:
    """Returns a measure with a target: `judged("main.x", "...", 1.2, "ratio", at_least(1.0))`."""
    wording, is_met = target
    return Measure(id, measure, round(value, 4), unit, wording, is_met(value))


def print_table(measures: Sequence[Measure]) -> None:
    """Prints one line a measure."""
    marks = {True: "met", False: "MISSED", None: ""}
    print(f"\n{'id':<24}{'value':>10} {'unit':<10}{'target':<10}{'':<8}measure")
    for m in measures:
        print(f"{m.id:<24}{m.value:>10.3f} {m.unit:<10}{m.target:<10}{marks[m.met]:<8}{m.measure}")


def git_state() -> tuple[str, bool]:
    """Returns the commit, and whether tracked files differ from it; the benchmarks' results do not count.

    Outside a clone it is the package's version; "" where there is no git.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        return importlib.metadata.version("outrider"), False

    def git(*arguments: str) -> str:
        command = ("git", *arguments)
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    is_dirty = bool(git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"))
    return git("rev-parse", "--short=12", "HEAD"), is_dirty
