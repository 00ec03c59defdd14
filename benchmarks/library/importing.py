"""`lib.import`: what `import outrider` costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.results_file import Found
from outrider.experiments.shared.results import at_most, judged

NUM_TURNS = 15
_LOADED = "import sys, outrider; print('torch' in sys.modules)"


def run() -> Found:
    """Returns the seconds of `python -c "import outrider"`, the interpreter's start included, the median; and whether
    torch was imported."""
    bare, ours = [], []
    for _ in range(NUM_TURNS):
        bare.append(_seconds("pass"))
        ours.append(_seconds("import outrider"))
    said = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True).stdout
    seconds = judged("lib.import", 'python -c "import outrider"', statistics.median(ours), "s", at_most(0.15))
    torch = judged("lib.import.torch", "1: it imports torch", said.strip() == "True", "", at_most(0))
    return [seconds, torch], {"bare_interpreter_s": round(statistics.median(bare), 4)}


def _seconds(code: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start_s
