"""How long a verifier takes from exec to serving, beside the imports that it cannot do without."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.results_file import Found
from outrider.experiments.shared.processes import start_verifier
from outrider.experiments.shared.results import at_most, judged

NUM_TURNS = 9
IMPORTS = "import torch, numba"


def run(num_turns: int = NUM_TURNS) -> Found:
    """Returns the ratio of the medians; the two take turns, and the imports twice a turn, for the A/A ratio."""
    _serve_s()  # fills the caches: bytecode, compiled kernels, files
    turns = [(_import_s(), _serve_s(), _import_s()) for _ in range(num_turns)]
    first, served, second = (statistics.median(column) for column in zip(*turns, strict=True))
    imported = statistics.median([s for turn in turns for s in (turn[0], turn[2])])
    what = f"verifier from exec to serving, embedded target : python -c '{IMPORTS}', medians of {num_turns}"
    details = {
        "serving_s": round(served, 3),
        "imports_s": round(imported, 3),
        "imports_a_a": round(first / second, 3),
        "turns_s": [[round(s, 2) for s in turn] for turn in turns],
    }
    return [judged("real.start", what, served / imported, "ratio", at_most(1.6))], details


def _serve_s() -> float:
    verifier = start_verifier("--log-level", "warning")
    verifier.kill()
    return verifier.start_s


def _import_s() -> float:
    begin_s = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - begin_s
