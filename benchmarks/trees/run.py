"""`make bench-trees`: what trees bring.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

import argparse
import importlib
import time

from benchmarks.results_file import StageRecord, pick_names
from outrider.experiments.shared.command import run_command

NAME = "trees"
STAGES = ("draft", "gain", "links")  # modules of this folder


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trees.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    record = StageRecord(NAME, STAGES)
    for name in pick_names(arguments.only, STAGES, "tree."):
        print(f"[{name}]", flush=True)
        begin_s = time.monotonic()
        found = importlib.import_module(f"benchmarks.trees.{name}").run()
        record.replace(name, found, {"seconds": round(time.monotonic() - begin_s)})
        record.write()
    return 0


if __name__ == "__main__":
    run_command("bench_trees", main)
