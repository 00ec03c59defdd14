"""`make bench-reliability`: what is promised under faults, overload, hostile clients and long runs.

The short form takes minutes and shows that every stage works; `--long` takes hours and gives the figures. Each
stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file, with the
commit and the command that measured it. Findings are written as they come.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import RESULTS, Found, pick_names, write_results
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, git_state

NAME = "reliability"
WRITE_EVERY_S = 60.0
# Stage → its module in this folder; in order, the shortest first.
STAGES = {
    "frames": "fuzz",
    "hostile": "hostile",
    "storm": "storm",
    "overload": "overload",
    "wire": "wire",
    "sigkill": "sigkill",
    "exact": "exact_rows",
    "soak": "soak",
    "tests": "repeated_tests",
}
ONLY_IF_ASKED = ("tests",)


class _Record:
    """Holds what every stage measured last, in the results file."""

    def __init__(self) -> None:
        self._path = RESULTS / f"{NAME}.json"
        read = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        self._measures = {each["id"]: Measure(**each) for each in read.get("measures", ())}
        self._details: dict[str, Any] = read.get("details", {})

    def replace(self, name: str, found: Found, about: dict[str, Any]) -> None:
        """Puts what a stage found in the place of what it found before."""
        measures, details = found
        for id in self._details.get(name, {}).get("ids", ()):
            self._measures.pop(id, None)
        self._measures |= {each.id: each for each in measures}
        self._details[name] = {"ids": [each.id for each in measures], **about, **details}

    def write(self) -> None:
        """Writes the file, its stages in their order."""
        details = {name: self._details[name] for name in STAGES if name in self._details}
        ids = [id for each in details.values() for id in each["ids"]]
        write_results(NAME, [self._measures[id] for id in ids], details)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--long", action="store_true", help="the counts of the figures: hours")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    settings, record = Settings(arguments.long), _Record()
    commit, is_dirty = git_state()
    about = {"commit": commit + ("-dirty" if is_dirty else ""), "is_long": settings.is_long}
    for name in pick_names(arguments.only, STAGES, "rel."):
        if name in ONLY_IF_ASKED and not arguments.only:
            continue
        print(f"[{name}]", flush=True)
        begin_s = written_s = time.monotonic()
        for found in stage(name, settings):
            record.replace(name, found, about | {"seconds": round(time.monotonic() - begin_s)})
            if time.monotonic() > written_s + WRITE_EVERY_S:
                written_s = time.monotonic()
                record.write()
        record.write()
    return 0


def stage(name: str, settings: Settings) -> Iterator[Found]:
    """Yields what a stage finds, each time all of it."""
    yield from importlib.import_module(f"benchmarks.reliability.{STAGES[name]}").run(settings)


if __name__ == "__main__":
    run_command("bench_reliability", main)
