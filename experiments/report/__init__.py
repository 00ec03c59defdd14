"""Results folder in, one self-contained `report.html` out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.common.process.extras import how_to_install

_PACKAGES = ("jinja2", "matplotlib", "markupsafe")


def check_installed() -> None:
    """Raises `UsageError` where the packages that draw are not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"a report needs {', '.join(missing)}: {how_to_install('report')}")


def render(folder: Path) -> Path:
    """Writes `report.html` into a results folder and returns its path.

    Raises `UsageError` where the folder holds no results, or the packages that draw are not installed.
    """
    check_installed()
    from outrider.experiments.report.page import render as render_page

    return render_page(folder)
