"""`make bench-real`: start-up, memory, the demo, a round's cost, capacity and policies, in real processes.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
`--only policies --points 8` takes the first points alone, `--at 3,9-24` measures these and leaves the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from benchmarks.real.points import BLOCK, PointOptions, parse_numbers
from benchmarks.results_file import Found, StageRecord, pick_names, run_stages, stage_parser
from outrider.experiments.shared.command import run_command

NAME = "real"
STAGES = {  # stage → its module in this folder
    "start": "start",
    "demo": "demo",
    "overhead": "overhead",
    "draft": "draft",
    "capacity": "capacity",
    "policies": "policies",
    "vs_hf_assisted": "assisted",
}


def main() -> int:
    """Runs the command."""
    parser = stage_parser(NAME, STAGES, __doc__)
    points = "points that policies are judged at"
    parser.add_argument("--points", type=int, default=BLOCK, metavar="N", help=f"{points}: the first N")
    parser.add_argument("--at", default="", metavar="NUMBERS", help="these alone, the others as known before")
    arguments = parser.parse_args()
    options = PointOptions(arguments.points, parse_numbers(arguments.at))
    record = StageRecord(NAME, STAGES)
    names = pick_names(arguments.only, STAGES, "real.")
    run_stages(record, names, lambda name: stage(name, options, record))
    return 0


def stage(name: str, options: PointOptions, record: StageRecord) -> Iterator[Found]:
    """Yields what a stage finds: `policies` after each point, the others once."""
    module = importlib.import_module(f"benchmarks.real.{STAGES[name]}")
    if name == "policies":
        yield from module.run(options, record.details(name))
    else:
        yield module.run()


if __name__ == "__main__":
    run_command("bench_real", main)
