"""`make bench-gpu-paths`: the GPU's paths without a GPU, by Triton's interpreter and by counting.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator

from benchmarks.results_file import Found, StageRecord, pick_names, run_stages
from outrider.experiments.shared.command import run_command

NAME = "gpu_paths"
STAGES = ("kernel", "dispatch")  # modules of this folder


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_paths.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the stages do
    names = pick_names(arguments.only, STAGES, "gpu.")
    run_stages(StageRecord(NAME, STAGES), names, stage)
    return 0


def stage(name: str) -> Iterator[Found]:
    """Yields what a stage finds."""
    yield importlib.import_module(f"benchmarks.gpu_paths.{name}").run()


if __name__ == "__main__":
    run_command("bench_gpu_paths", main)
