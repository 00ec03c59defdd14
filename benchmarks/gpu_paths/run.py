"""`make bench-gpu-paths`: the GPU's paths without a GPU, by Triton's interpreter and by counting.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

import os

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

STAGES = ("kernel", "dispatch", "same_text", "sync_points")  # modules of this folder


def main() -> int:
    """Runs the command."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the stages do
    from benchmarks.interpreter import make_interpreter_quicker

    make_interpreter_quicker()
    return run_modules("gpu_paths", STAGES, __doc__, "gpu.")


if __name__ == "__main__":
    run_command("bench_gpu_paths", main)
