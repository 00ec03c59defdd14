"""`make bench-real`: start-up, memory, the demo, a round's cost and what a verifier carries; ratios of one run.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

import argparse
import importlib
import time

from benchmarks.results_file import Found, StageRecord, pick_names
from outrider.experiments.shared.command import run_command

NAME = "real"
STAGES = {  # stage → its module in this folder
    "start": "start",
    "rss": "rss",
    "demo": "demo",
    "overhead": "overhead",
    "draft": "draft",
    "capacity": "capacity",
}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(STAGES)}")
    record = StageRecord(NAME, STAGES)
    for name in pick_names(parser.parse_args().only, STAGES, "real."):
        print(f"[{name}]", flush=True)
        begin_s = time.monotonic()
        found = stage(name)
        record.replace(name, found, {"seconds": round(time.monotonic() - begin_s)})
        record.write()
    return 0


def stage(name: str) -> Found:
    """Returns what a stage finds."""
    found: Found = importlib.import_module(f"benchmarks.real.{STAGES[name]}").run()
    return found


if __name__ == "__main__":
    run_command("bench_real", main)
