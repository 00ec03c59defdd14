"""Optional dependencies: the error for a package that is missing names the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.common.errors import UsageError


class MissingExtraError(UsageError):
    """Raised where a command needs a package that only one of the extras installs."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Raises `MissingExtraError` saying that `what` needs `extra`, where the block imports a package that is
    not installed. A missing module of our own is a bug, and is raised as it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "outrider"):
            raise
        raise MissingExtraError(f"{what} needs {package}: pip install 'outrider[{extra}]'") from error
