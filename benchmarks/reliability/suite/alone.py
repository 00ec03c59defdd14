"""`rel.tests`: `make test` alone; only where asked for by name."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.results import judged

LIMIT_S = 3600.0
MAX_S = 420.0


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found."""
    seconds, is_passed = run_tests()
    settings.say(f"{seconds:.0f} s, {'passed' if is_passed else 'failed'}")
    text = f"make test by itself, {'passed' if is_passed else 'FAILED'}"
    target = (f"<= {MAX_S:g}", lambda seconds: seconds <= MAX_S and is_passed)
    yield [judged("rel.tests", text, seconds, "s", target)], {}


def run_tests() -> tuple[float, bool]:
    """Runs `make test`; returns its seconds and whether it passed."""
    begin_s = time.monotonic()
    done = subprocess.run(("make", "test"), cwd=ROOT, timeout=LIMIT_S, check=False, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin_s, done.returncode == 0
