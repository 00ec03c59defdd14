"""`make bench-trees`: what trees bring.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from benchmarks.results_file import Found, StageRecord, pick_names, run_stages
from outrider.experiments.shared.command import run_command

NAME = "trees"
# Modules of this folder.
STAGES = ("draft", "calibrated", "keep", "rrs", "gain", "links", "defaults", "virtual")


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trees.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    names = pick_names(arguments.only, STAGES, "tree.")
    run_stages(StageRecord(NAME, STAGES), names, stage)
    return 0


def stage(name: str) -> Iterator[Found]:
    """Yields what a stage finds."""
    yield importlib.import_module(f"benchmarks.trees.{name}").run()


if __name__ == "__main__":
    run_command("bench_trees", main)
