"""`make bench-engine`: the verifier under load, measured without draft models on its cores.

Clients are processes of their own that replay recorded drafts (`outrider.experiments.load`); every verdict is checked.
What a ratio compares takes turns in one run. `--quick` is a smoke test and `--only id,id` picks cases; both
print their table and write no file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.setup import Bench
from benchmarks.results_file import pick_names, write_results
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, print_table

# Case → the ids it measures; in order, the shortest first.
CASES = {
    "benchmarks.engine.rounds:measure_stub_rounds": ("stub_rounds",),
    "benchmarks.engine.rounds:measure_overhead": ("overhead_ms",),
    "benchmarks.engine.inside:measure_batch8": ("batch8",),
    "benchmarks.engine.inside:measure_outside": ("outside",),
    "benchmarks.engine.text:measure_prefix_ttft": ("prefix_ttft",),
    "benchmarks.engine.text:measure_prefill_stall": ("prefill_stall",),
    "benchmarks.engine.text:measure_vs_hf_batch": ("vs_hf_batch",),
}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="everything shortened, under 90 s")
    parser.add_argument("--only", default="", metavar="ID,ID", help="for example stub_rounds,overhead_ms")
    arguments = parser.parse_args()
    cases = pick_cases(arguments.only)
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        bench = Bench(Path(scratch), arguments.quick, stack)
        for number, case in enumerate(cases, start=1):
            ids = CASES[case]
            print(f"[{number}/{len(cases)}] {', '.join(ids)}", flush=True)
            begin_s = time.monotonic()
            module, _, function = case.partition(":")
            its_measures, its_details = getattr(importlib.import_module(module), function)(bench)
            measures += its_measures
            details |= {ids[0]: its_details}
            print(f"  {time.monotonic() - begin_s:.1f} s", flush=True)
    if arguments.quick or arguments.only:
        print(json.dumps(details, indent=1))
        print_table(measures)
    else:
        write_results("engine", measures, {"dtype": "float32", **details})
    return 0


def pick_cases(only: str) -> list[str]:
    """Returns the cases that measure one of the ids. Raises `UsageError` for an id that does not exist."""
    ids = pick_names(only, [id for ids in CASES.values() for id in ids], "engine.")
    return [case for case, its_ids in CASES.items() if set(ids) & set(its_ids)]


if __name__ == "__main__":
    run_command("bench_engine", main)
