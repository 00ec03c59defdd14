"""The version of this installation."""

from __future__ import annotations


def own_version() -> str:
    """Returns the version of the installed distribution, or the source tree's where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0.1.0+source"
