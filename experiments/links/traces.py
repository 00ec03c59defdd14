"""Capacity traces: one delivery opportunity a line, in ms since the link opened, repeated for ever.

An opportunity carries 1,500 bytes, of one packet or of several, and is wasted when nothing waits; a time may
be repeated. It is the format of mahimahi's mm-link (Netravali et al. 2015); its recorded traces can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from outrider.common.errors import UsageError

OPPORTUNITY_BYTES = 1500
OWN_TRACES = Path(__file__).resolve().parent / "traces"


@dataclass(frozen=True, slots=True)
class CapacityTrace:
    """Holds the times of a trace's delivery opportunities."""

    times_ms: tuple[int, ...]  # ascending; the last one is the period

    @property
    def period_ms(self) -> int:
        """Returns the time after which the trace repeats."""
        return self.times_ms[-1]

    @property
    def mean_mbit(self) -> float:
        """Returns the mean rate."""
        return len(self.times_ms) * OPPORTUNITY_BYTES * 8 / self.period_ms / 1000


def parse_trace(lines: Sequence[str], where: str) -> CapacityTrace:
    """Returns a trace from its lines; empty ones and those that begin with # are passed over. Raises
    UsageError naming the line."""
    times: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not text.isdecimal():
            raise UsageError(f"{where}, line {number}: {text[:40]!r} is not a time in whole ms")
        if times and int(text) < times[-1]:
            raise UsageError(f"{where}, line {number}: {text} ms comes after {times[-1]} ms; sort the times")
        times.append(int(text))
    if not times or times[-1] == 0:
        raise UsageError(f"{where}: needs a delivery opportunity after 0 ms: the last one is the period")
    return CapacityTrace(tuple(times))


def _trace_path(name: str) -> Path:
    """Returns the file that a profile means: as given, or one of `experiments/links/traces`."""
    given = Path(name).expanduser()
    return given if given.exists() or len(given.parts) > 1 else OWN_TRACES / name


@lru_cache(maxsize=64)
def load_trace(name: str) -> CapacityTrace:
    """Raises UsageError when the file cannot be read or is not a trace."""
    path = _trace_path(name)
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(each.name for each in OWN_TRACES.glob("*.trace")))
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"capacity trace {name}: {reason}; ours are {known}") from error
    return parse_trace(lines, str(path))
