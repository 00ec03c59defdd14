"""The figures in reading order. A new one is a new module here with a `FIGURE`, and its name below."""

from __future__ import annotations

from importlib import import_module

from outrider.experiments.report.figures.base import ReportFigure

NAMES = (
    "tpot_rtt",
    "draft_length",
    "speedup_map",
    "commit_gap",
    "round_parts",
    "bandwidth",
    "outage",
)


def load_figures() -> dict[str, ReportFigure]:
    """Returns the figures by name."""
    return {name: import_module(f"outrider.experiments.report.figures.{name}").FIGURE for name in NAMES}
