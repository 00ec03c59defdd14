"""Figures as a person reads them: three digits that count, units, intervals, lists of names. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.experiments.sweep.results.records import Metric

ABSENT = "–"


def plain(value: float | None) -> str:
    """Returns three significant digits, without an exponent: 0.0123, 1.23, 12.3, 1,234."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def times(ratio: float | None) -> str:
    """Returns a ratio: 1.42, 18.6."""
    if ratio is None or not math.isfinite(ratio):
        return ABSENT
    return f"{ratio:.2f}" if ratio < 9.995 else plain(ratio)


def interval(low: float | None, high: float | None) -> str:
    """Returns [11.9, 12.8], or nothing."""
    return "" if low is None or high is None else f"[{plain(low)}, {plain(high)}]"


def with_interval(metric: Metric | None) -> str:
    """Returns 12.3 [11.9, 12.8], or the mark of what was not measured."""
    if metric is None:
        return ABSENT
    return f"{plain(metric.value)} {interval(metric.low, metric.high)}".strip()


def spread(values: Sequence[float], unit: str = "") -> str:
    """Returns one value, or "1 to 600 ms"."""
    low, high = plain(min(values)), plain(max(values))
    text = low if low == high else f"{low} to {high}"
    return f"{text} {unit}".strip()


def ratio_spread(values: Sequence[float]) -> str:
    """Returns one ratio, or "1.20 to 3.41"."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Returns "a, b and c"; "a, b, c and 5 more" past `most`."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns "1 request" or "2 requests"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
