"""`rel.tests`: `make test` alone; only where asked for by name."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.reliability.setup import Settings
from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.results import judged

LIMIT_S = 3600.0
MAX_S = 420.0


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found."""
    ran = run_tests()
    settings.say(str(ran))
    text = f"make test by itself, {'passed' if ran.is_passed else 'FAILED'}"
    target = (f"<= {MAX_S:g}", lambda seconds: seconds <= MAX_S and ran.is_passed)
    yield [judged("rel.tests", text, ran.seconds, "s", target)], asdict(ran)


@dataclass(frozen=True)
class TestsRun:
    """Holds how a run of `make test` ended."""

    seconds: float
    is_passed: bool
    failed: list[str]  # what pytest's summary says of them, or the last lines where there is none


def run_tests() -> TestsRun:
    """Runs `make test`."""
    begin_s = time.monotonic()
    done = subprocess.run(
        ("make", "test"),
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "400"},  # or the summary leaves out why
        timeout=LIMIT_S,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
    is_passed = done.returncode == 0
    return TestsRun(
        round(time.monotonic() - begin_s, 1), is_passed, failed or ([] if is_passed else lines[-3:])
    )
