"""The page: everything the folder says, as one HTML file without a reference to anything outside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.report.cautions import cautions
from outrider.experiments.report.figures.base import Chart, ReportFigure
from outrider.experiments.report.headline import headlines
from outrider.experiments.report.style import NARROW, WIDE, css_variables
from outrider.experiments.report.svg import draw_svg
from outrider.experiments.report.tables import (
    calibration_table,
    cells_table,
    config_text,
    facts_table,
    links_table,
    manifest_rows,
    meanings,
)
from outrider.experiments.report.verdicts import RIVALS
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import REPORT, SWEEP, read_results

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


@dataclass(frozen=True, slots=True)
class _DrawnChart:
    chart: Chart
    svgs: list[str]  # wide, narrow: the page shows the one that fits


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    figure: ReportFigure
    charts: list[_DrawnChart]


def render(folder: Path) -> Path:
    """Writes `report.html` into a results folder and returns it; `UsageError` where nothing can be read."""
    results = read_results(folder)
    if results.sweep is None:
        raise UsageError(
            f"{folder} has no {SWEEP}: its run was cut off; `edge-client bench --resume` ends it"
        )
    path = folder / REPORT
    path.write_text(page(View(results, results.sweep)), encoding="utf-8")
    return path


def page(view: View) -> str:
    """Returns the page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("outrider.experiments.report", ""),
        autoescape=select_autoescape(enabled_extensions=("j2",), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    return environment.get_template("page.html.j2").render(_context(view), style=Markup(_style()))


def _context(view: View) -> dict[str, Any]:
    return {
        "manifest": view.results.manifest,
        "num_cells": len(view.sweep.cells),
        "num_requests": len(view.results.requests),
        "num_rounds": len(view.results.rounds),
        "headlines": headlines(view),
        "rivals": RIVALS,
        "cautions": cautions(view),
        "sections": [_section(view, name, figure) for name, figure in load_figures().items()],
        "cells": cells_table(view),
        "meanings": meanings(view),
        "links": links_table(view),
        "calibration": calibration_table(view),
        "facts": facts_table(view),
        "about": manifest_rows(view),
        "config": config_text(view),
    }


def _section(view: View, name: str, figure: ReportFigure) -> _Section:
    charts = figure.charts(view)
    return _Section(name, figure, [_drawn(chart, f"{name}-{i}") for i, chart in enumerate(charts)])


def _drawn(chart: Chart, prefix: str) -> _DrawnChart:
    sizes = [replace(size, height=round(size.height * chart.height)) for size in (WIDE, NARROW)]
    return _DrawnChart(chart, [draw_svg(chart.draw, size, prefix, chart.finding) for size in sizes])


def _style() -> str:
    sheet = (resources.files("outrider.experiments.report") / "page.css").read_text(encoding="utf-8")
    return sheet.replace("/* light */", css_variables(False)).replace("/* dark */", css_variables(True))
