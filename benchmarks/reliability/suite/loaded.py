"""`rel.tests_load`: `make test` three times beside four busy processes; only where asked for by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from benchmarks.reliability.setup import Settings
from benchmarks.reliability.suite.alone import TestsRun, run_tests
from benchmarks.results_file import Found
from outrider.experiments.shared.results import at_most, judged

NUM_RUNS, NUM_BUSY = 3, 4


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found after the last run: a record that is written between them fails the test that compares the
    page of figures with the records."""
    runs: list[TestsRun] = []
    with _busy():
        for _ in range(NUM_RUNS):
            runs.append(run_tests())
            settings.say(f"{runs[-1]}")
    num_failed = sum(not each.is_passed for each in runs)
    text = f"runs of make test that failed, of {len(runs)} beside {NUM_BUSY} busy processes"
    yield (
        [judged("rel.tests_load", text, num_failed, "runs", at_most(0))],
        {"runs": list(map(asdict, runs))},
    )


@contextmanager
def _busy() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
