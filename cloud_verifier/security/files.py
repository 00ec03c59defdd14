"""Reads files that hold secrets, and detects changes by inode, size and time of change."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from outrider.common.errors import ConfigError

log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Detects changes of some files, again and again until they were accepted."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._accepted = self._seen = self._signature()

    def has_changed(self) -> bool:
        """Returns whether a file changed since the files that were accepted, or since this object was made."""
        self._seen = self._signature()
        return self._seen != self._accepted

    def accept(self) -> None:
        """Accepts the files as the last `has_changed` saw them: called once they are loaded. What changed in between
        is a change."""
        self._accepted = self._seen

    def _signature(self) -> Signature:
        return tuple(_signature_of(path) for path in self._paths)


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino  # ctime: a chmod may have mended it


def read_file(path: Path, flag: str) -> bytes:
    """Returns a file's content; raises `ConfigError` naming `flag`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot read it: {error.strerror}") from error


def check_key_mode(path: Path) -> None:
    """Warns where everybody may read a key file. Raises OSError where it is gone."""
    if path.stat().st_mode & 0o004:
        log.warning("everybody on this machine may read a private key: chmod 600 it", extra={"path": path})
