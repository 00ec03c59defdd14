"""`make bench-library`: `SpeculativeDecoder` beside the verifier's own modes, its examples and fields, and the import.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

# Modules of this folder.
STAGES = ("examples", "fields", "overhead", "reference", "hf", "importing")


def main() -> int:
    """Runs the command."""
    return run_modules("library", STAGES, __doc__, "lib.")


if __name__ == "__main__":
    run_command("bench_library", main)
