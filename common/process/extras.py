"""Optional dependencies: the error for a package that is missing says how to install the extra that has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outrider.common.errors import UsageError


class MissingExtraError(UsageError):
    """Raised where a command needs a package that only one of the extras installs."""


def how_to_install(extra: str) -> str:
    """Returns what a person does to install an extra of this copy. Nothing is published to a package index, so it is
    a command only where the copy was installed from a directory that is still there."""
    directory, is_editable = _source()
    if directory is None:
        return f"install the extra '{extra}' as the README has it (Ten minutes)"
    return f"pip install {'-e ' * is_editable}'.[{extra}]' in {directory}"


def _source() -> tuple[Path | None, bool]:
    """Returns the directory that this copy was installed from, if any, and whether it runs from there."""
    from importlib import metadata  # 20 ms, for those who need it

    told = [each.read_text("direct_url.json") for each in metadata.distributions(name="outrider")]
    origin = json.loads(next(filter(None, told), "{}"))  # a checkout's egg-info has none
    url = urlsplit(origin.get("url", ""))
    directory = Path(unquote(url.path))
    if url.scheme != "file" or "dir_info" not in origin or not (directory / "pyproject.toml").is_file():
        return None, False
    return directory, bool(origin["dir_info"].get("editable"))


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
        raise MissingExtraError(f"{what} needs {package}: {how_to_install(extra)}") from error
