"""The version of this installation."""

from __future__ import annotations


def own_version() -> str:
    """Of the installed distribution, or of the source tree when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0.1.0+source"
