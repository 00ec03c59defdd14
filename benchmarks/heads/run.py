"""`make bench-heads`: co-located generation with heads and lookahead, beside the draft and cloud-only.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

# Modules of this folder.
STAGES = ("same_text", "rounds", "layerskip", "shapes", "hints", "colocated", "sessions")


def main() -> int:
    """Runs the command."""
    return run_modules("heads", STAGES, __doc__, "heads.")


if __name__ == "__main__":
    run_command("bench_heads", main)
