"""`make bench-sources`: where drafts come from, alone and in unions, beside the draft model.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

# Modules of this folder.
STAGES: tuple[str, ...] = (
    "same_text",
    "faults",
    "repeat",
    "fresh",
    "retrieval",
    "staged",
    "online",
    "export_shapes",
    "export_auto",
    "compare",
)


def main() -> int:
    """Runs the command."""
    return run_modules("sources", STAGES, __doc__, "src.")


if __name__ == "__main__":
    run_command("bench_sources", main)
