"""`make bench-reliability`: what is promised under faults, overload, hostile clients and long runs.

The short form takes minutes and shows that every stage works; `--long` takes hours and gives the figures. Each
stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file, with the
commit and the command that measured it. Findings are written as they come.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import Found, StageRecord, pick_names, run_stages, stage_parser
from outrider.experiments.shared.command import run_command

NAME = "reliability"
# Stage → its module in this folder; in order, the shortest first.
STAGES = {
    "frames": "fuzz",
    "hostile": "hostile",
    "storm": "storm",
    "overload": "overload",
    "wire": "wire",
    "outage": "outage",
    "sigkill": "sigkill",
    "exact": "exact_rows",
    "exact_cost": "exact_cost",
    "soak": "soak",
    "tests": "suite.alone",
    "tests_load": "suite.loaded",
}
ONLY_IF_ASKED = ("tests", "tests_load")


def main() -> int:
    """Runs the command."""
    parser = stage_parser(NAME, STAGES, __doc__)
    parser.add_argument("--long", action="store_true", help="the counts of the figures: hours")
    arguments = parser.parse_args()
    settings, record = Settings(arguments.long), StageRecord(NAME, STAGES)
    names = pick_names(arguments.only, STAGES, "rel.")
    asked = [name for name in names if arguments.only or name not in ONLY_IF_ASKED]
    run_stages(record, asked, lambda name: stage(name, settings), is_long=settings.is_long)
    return 0


def stage(name: str, settings: Settings) -> Iterator[Found]:
    """Yields what a stage finds, each time all of it."""
    yield from importlib.import_module(f"benchmarks.reliability.{STAGES[name]}").run(settings)


if __name__ == "__main__":
    run_command("bench_reliability", main)
