"""`make bench-trees`: what trees bring.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

# Modules of this folder.
STAGES = ("draft", "calibrated", "keep", "rrs", "gain", "links", "defaults", "virtual")


def main() -> int:
    """Runs the command."""
    return run_modules("trees", STAGES, __doc__, "tree.")


if __name__ == "__main__":
    run_command("bench_trees", main)
