"""The tests marked `gpu`; in a rehearsal the same tests on a CPU, where they can run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from benchmarks.gpu_check.runner import ROOT
from benchmarks.gpu_check.stage import NONE, Report, Setting

MARK = re.compile(r"mark\.gpu\b|\bON_GPU\b")  # the second is that of tests/support/devices.py
# The repository's own options name plugins that may be absent, and its warnings are errors.
OPTIONS = (
    "-o",
    "addopts=",
    "-p",
    "no:cacheprovider",
    "-m",
    "gpu",
    "-W",
    "default",
    "-q",
    "--continue-on-collection-errors",
    "-rfEs",
    "--durations=8",
)


def run(setting: Setting, report: Report) -> None:
    """Raises RuntimeError where pytest did not run any test."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if MARK.search(path.read_text("utf-8"))
    ]
    environment = os.environ | {"OUTRIDER_GPU_TESTS": setting.device}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *files],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=max(1.0, setting.seconds_left - 2),
        check=False,
    )  # fmt: skip
    print(done.stdout)
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)
    }
    report.note(counts=counts, files=[os.path.relpath(each, ROOT) for each in files])
    if not counts.get("passed"):
        raise RuntimeError(f"no test passed: {done.stdout.strip().splitlines()[-1:]}")
    wrong = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    what = f"of pytest -m gpu; {counts['passed']} passed, {counts.get('skipped', 0)} were skipped"
    report.check("gpu.tests", what, wrong, "failures", NONE)
