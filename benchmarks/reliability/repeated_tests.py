"""`rel.tests`: `make test` alone, then three times beside four busy processes; only where asked for by name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.results import at_most, judged

NUM_RUNS, NUM_BUSY = 3, 4
LIMIT_S = 3600.0
MAX_S = 420.0


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found after each run."""
    alone_s, is_passed = _run_tests()
    settings.say(f"alone: {alone_s:.0f} s, {'passed' if is_passed else 'failed'}")
    under_load: list[tuple[float, bool]] = []
    yield _found(alone_s, is_passed, under_load)
    with _busy():
        for _ in range(NUM_RUNS):
            under_load.append(_run_tests())
            settings.say(f"under load: {under_load[-1]}")
            yield _found(alone_s, is_passed, under_load)


def _run_tests() -> tuple[float, bool]:
    begin_s = time.monotonic()
    done = subprocess.run(("make", "test"), cwd=ROOT, timeout=LIMIT_S, check=False, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin_s, done.returncode == 0


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


def _found(alone_s: float, is_passed: bool, under_load: list[tuple[float, bool]]) -> Found:
    num_failed = sum(not each for _, each in under_load)
    text = f"runs that failed, of {len(under_load)} beside {NUM_BUSY} busy processes"
    measures = [
        judged(
            "rel.tests",
            f"make test by itself, {'passed' if is_passed else 'FAILED'}",
            alone_s,
            "s",
            (f"<= {MAX_S:g}", lambda seconds: seconds <= MAX_S and is_passed),
        ),
        judged("rel.tests_load", text, num_failed, "runs", at_most(0)),
    ]
    return measures, {"under_load": under_load}
