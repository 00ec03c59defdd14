"""How long a verifier takes from exec to serving, beside the imports that it cannot do without.

Stage `demo` measures it in the environment of `make demo`, which is a user's; stage `start` in its own, where numba
finds scipy, imports it too and takes longer.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.results_file import Found
from outrider.experiments.shared.processes import start_verifier
from outrider.experiments.shared.results import Measure

NUM_TURNS = 9
IMPORTS = "import torch, numba"


WHAT = f"verifier from exec to serving, embedded target : python -c '{IMPORTS}', medians of {NUM_TURNS}"


def run() -> Found:
    """Returns the ratio in the environment of this interpreter."""
    ratio, details = measure(sys.executable)
    return [
        Measure("real.start_tests", f"{WHAT}, where all that tests need is installed", ratio, "ratio")
    ], details


def measure(python: str) -> tuple[float, dict[str, Any]]:
    """Returns the ratio of the medians in the environment of an interpreter, and details. The two take turns, and the
    imports twice a turn, for the A/A ratio."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _import_s(python)  # fills caches, as the next does: bytecode, compiled kernels, files
    _serve_s(python)
    turns = [(_import_s(python), _serve_s(python), _import_s(python)) for _ in range(NUM_TURNS)]
    first, served, second = (statistics.median(column) for column in zip(*turns, strict=True))
    imported = statistics.median([s for turn in turns for s in (turn[0], turn[2])])
    return served / imported, {
        "serving_s": round(served, 3),
        "imports_s": round(imported, 3),
        "imports_a_a": round(first / second, 3),
        "turns_s": [[round(s, 2) for s in turn] for turn in turns],
    }


def _serve_s(python: str) -> float:
    verifier = start_verifier("--log-level", "warning", python=python)
    verifier.kill()
    return verifier.start_s


def _import_s(python: str) -> float:
    begin_s = time.monotonic()
    subprocess.run([python, "-c", IMPORTS], check=True)
    return time.monotonic() - begin_s
