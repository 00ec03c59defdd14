"""Defines a figure of the report: charts of a folder, each with its finding, its words and its numbers.

`charts` is pure and decides everything; `Chart.draw` only draws what `charts` decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outrider.experiments.report.svg import Draw
from outrider.experiments.report.view import View

MAX_CHARTS = 4  # of one figure: further settings are in the table of cells
MAX_SERIES = 6  # on one drawing


ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Table:
    """Holds a chart's figures as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Holds a drawing. `finding` is computed from the data; `caption` says n and how it was measured."""

    finding: str
    caption: str
    table: Table
    draw: Draw
    setting: str = ""  # what tells it from the figure's other charts
    height: float = 1.0  # times the usual one


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """Describes a figure. `needs` ends the sentence "Left out: ..." where the folder has no data for it."""

    title: str
    needs: str
    charts: Callable[[View], Sequence[Chart]]
    reading: str = ""  # how to read it, in a sentence


def evenly(items: Sequence[ItemT], most: int) -> list[ItemT]:
    """Returns at most so many, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (most - 1))] for index in range(most)]
