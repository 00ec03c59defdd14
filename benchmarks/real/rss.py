"""How much memory a verifier has that serves nobody yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.real.start import IMPORTS
from benchmarks.results_file import Found
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_most, judged

STATUS = ("VmRSS", "RssAnon", "RssFile")


def run() -> Found:
    """Returns the resident memory, and that of the imports alone."""
    with running_verifier("--log-level", "warning") as verifier:
        found = resident_mb(Path(f"/proc/{verifier.process.pid}/status").read_text())
    script = f"{IMPORTS}; print(open('/proc/self/status').read())"
    imports = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    what = "verifier's resident memory, embedded target, 512 MiB pool untouched"
    measure = judged("real.rss", what, found["VmRSS"], "MB", at_most(600))
    return [measure], {"mb": found, "imports_mb": resident_mb(imports.stdout)}


def resident_mb(status: str) -> dict[str, float]:
    """Returns the kinds of resident memory in a /proc/PID/status, in 10⁶ bytes."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: round(int(fields[name].split()[0]) * 1024 / 1e6, 1) for name in STATUS}
