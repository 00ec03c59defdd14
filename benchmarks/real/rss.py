"""How much memory a verifier has that serves nobody yet: stage `demo` measures it in the environment of `make demo`."""

from __future__ import annotations

from pathlib import Path

from outrider.experiments.shared.processes import running_verifier

STATUS = ("VmRSS", "RssAnon", "RssFile")


def measure(python: str) -> dict[str, float]:
    """Returns what an idle verifier has in the environment of an interpreter."""
    with running_verifier("--log-level", "warning", python=python) as verifier:
        return resident_mb(Path(f"/proc/{verifier.process.pid}/status").read_text())


def resident_mb(status: str) -> dict[str, float]:
    """Returns the kinds of resident memory in a /proc/PID/status, in 10⁶ bytes."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: round(int(fields[name].split()[0]) * 1024 / 1e6, 1) for name in STATUS}
