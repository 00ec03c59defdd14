"""`make bench-quantised`: quantised targets, drafts and KV on a CPU.

Each stage stands by itself: `--only NAME` runs it again, and what other stages measured stays in the file.
"""

from __future__ import annotations

from benchmarks.results_file import run_modules
from outrider.experiments.shared.command import run_command

STAGES = ("nf4", "kv", "torch_draft", "light_edge")  # modules of this folder


def main() -> int:
    """Runs the command."""
    return run_modules("quantised", STAGES, __doc__, "quant.")


if __name__ == "__main__":
    run_command("bench_quantised", main)
