"""`make bench-structured`: texts that obey JSON schemas, on the embedded pair.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

STAGES = ("texts", "faults", "accept", "cost", "hostile")  # modules of this folder


def main() -> int:
    """Runs the command."""
    return run_modules("structured", STAGES, __doc__, "str.")


if __name__ == "__main__":
    run_command("bench_structured", main)
