"""The tests marked `gpu`; in a rehearsal the same tests on a CPU, where they can run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu_check.runner import ROOT
from benchmarks.gpu_check.stage import NONE, Report, Setting

MARK = re.compile(r"mark\.gpu\b|\bON_GPU\b")  # the second is that of tests/support/devices.py
# The repository's own options name plugins that may be absent, and its warnings are errors.
OPTIONS = (
    "-o addopts= -p no:cacheprovider -m gpu -W default -v -rfEs --durations=5 --continue-on-collection-errors"
)
ENDINGS = re.compile(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)|^(ERROR) \S+\.py", re.MULTILINE)


def run(setting: Setting, report: Report) -> None:
    """Raises RuntimeError where no test passed."""
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [str(path.relative_to(ROOT)) for path, text in texts.items() if MARK.search(text)]
    output = _pytest(setting, report, files)
    print(output)
    counts = Counter(ending or collecting for ending, collecting in ENDINGS.findall(output))
    report.note(counts=counts, files=files)
    if not counts["PASSED"]:
        raise RuntimeError(f"no test passed: {output.strip().splitlines()[-1:]}")
    what = f"of pytest -m gpu; {counts['PASSED']} passed, {counts['SKIPPED']} were skipped"
    report.check("gpu.tests", what, counts["FAILED"] + counts["ERROR"], "failures", NONE)


def _pytest(setting: Setting, report: Report, files: Sequence[str]) -> str:
    """Returns what it prints, until the stage's time is over."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS.split(), *files],
            cwd=ROOT,
            env=os.environ | {"OUTRIDER_GPU_TESTS": setting.device},
            stdout=output,
        )
        try:
            process.wait(max(1.0, setting.seconds_left - 3))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            report.skip("later tests", "the stage's time is over")
        output.seek(0)
        return output.read().decode(errors="replace")
