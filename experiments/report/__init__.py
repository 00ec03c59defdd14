"""Results folder in, one self-contained `report.html` out."""

from __future__ import annotations

from pathlib import Path


def render(folder: Path) -> Path:
    """Writes `report.html` into a results folder and returns its path.

    Raises `UsageError` where the folder holds no results, or the packages that draw are not installed.
    """
    from common.errors import UsageError

    try:
        from experiments.report.page import render as render_page

        return render_page(folder)
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib", "markupsafe"):
            raise
        raise UsageError("a report needs matplotlib and jinja2: pip install 'outrider[report]'") from error
