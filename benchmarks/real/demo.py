"""How long `make demo` takes in a fresh clone, the size of what it and `make test` install, how fast a verifier starts
there, and how much memory it takes in both environments.

Packages must be in pip's cache: run it twice where they are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.real import rss, start
from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.results import Measure, at_most, judged


def run() -> Found:
    """Returns seconds and sizes. Raises CalledProcessError where a command fails."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "outrider"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        begin_s = time.monotonic()
        _make(clone, "demo")
        demo_s, demo_gb = time.monotonic() - begin_s, size_gb(clone / ".venv")
        python = str(clone / ".venv/bin/python")
        start_ratio, starts = start.measure(python)
        resident = rss.measure(python)
        begin_s = time.monotonic()
        _make(clone, "install")
        install_s, test_gb = time.monotonic() - begin_s, size_gb(clone / ".venv")
    with_tests_mb = rss.measure(sys.executable)["VmRSS"]
    memory = "resident memory of a verifier with the embedded target, 512 MiB pool untouched"
    measures = [
        judged("real.rss", f"{memory}, there", resident["VmRSS"], "MB", at_most(600)),
        Measure("real.rss_tests", f"{memory}, where all that tests need is installed", with_tests_mb, "MB"),
        judged("real.start", f"{start.WHAT}, there", start_ratio, "ratio", at_most(1.6)),
        judged("real.demo", "`make demo` in a fresh clone, packages cached", demo_s, "s", at_most(90)),
        judged("real.demo_env", "size of its environment", demo_gb, "GB", at_most(1.4)),
        judged("real.test_env", "size of the environment of `make test`", test_gb, "GB", at_most(2.2)),
    ]
    return measures, {"install_s": round(install_s, 1), "resident_mb": resident, "start": starts}


def _make(clone: Path, target: str) -> None:
    """Runs a target of the clone's own Makefile, in an environment of its own."""
    unset = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    python = getattr(sys, "_base_executable", sys.executable)
    subprocess.run(["make", target, f"PYTHON={python}"], cwd=clone, env=environment, check=True)


def size_gb(folder: Path) -> float:
    """Returns the size of all files below a folder, in 10⁹ bytes; those with several names count once."""
    files = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        files[stat.st_ino] = stat.st_size
    return sum(files.values()) / 1e9
