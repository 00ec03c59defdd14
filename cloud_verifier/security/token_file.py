"""The file of a verifier's tokens: JSON of mode 0600, replaced as a whole, never written in place.

A verifier reads it, `cloud-verifier token` changes it; two that change it at once wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.cloud_verifier.security.metadata import TENANT_PATTERN
from outrider.cloud_verifier.security.tokens import TokenRecord
from outrider.common.errors import ConfigError

log = logging.getLogger(__name__)

SCHEMA = 1
_MODE = 0o600
Records = tuple[TokenRecord, ...]


def read_tokens(path: Path) -> Records:
    """Returns the records.

    Raises `ConfigError` for a file that is missing, malformed, or that others may write.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = json.load(file)
    except FileNotFoundError as error:
        hint = f"make one with: cloud-verifier token new --tenant NAME --tokens {path}"
        raise ConfigError(f"--tokens {path}: there is no such file; {hint}") from error
    except OSError as error:
        raise ConfigError(f"--tokens {path}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the second of lists in lists in lists
        raise ConfigError(f"--tokens {path}: is not a file of tokens: not JSON") from error
    if mode & 0o022:
        raise ConfigError(f"--tokens {path}: others may write it (mode {mode:04o}): chmod 600 {path}")
    records = _decode(content, path)
    if mode & 0o004:  # of a file that can be used: one that cannot is read again and again
        log.warning("everybody on this machine may read the token file: chmod 600 it", extra={"path": path})
    return records


def change_tokens(path: Path, change: Callable[[Records], Sequence[TokenRecord]]) -> None:
    """Replaces the file's records by `change(records)`; a missing file has none. Raises `ConfigError`."""
    try:
        with _alone(path):
            records = read_tokens(path) if path.exists() else ()
            _replace(path, change(records))
    except OSError as error:
        raise ConfigError(f"--tokens {path}: cannot write it: {error.strerror}") from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of a file beside `path`: a lock on `path` itself would go with the file it replaces."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, records: Sequence[TokenRecord]) -> None:
    text = json.dumps({"schema": SCHEMA, "tokens": [_encode(record) for record in records]}, indent=1) + "\n"
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # is 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            if os.geteuid() == 0:  # the service that reads it is not root
                owner = os.stat(path if path.exists() else path.parent)
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _encode(record: TokenRecord) -> dict[str, Any]:
    def shown(time: datetime | None) -> str | None:
        return None if time is None else time.isoformat(timespec="milliseconds")

    return {
        "id": record.id,
        "tenant": record.tenant,
        "sha256": record.digest,
        "created": shown(record.created),
        "expires": shown(record.expires),
        "revoked": shown(record.revoked),
        "admin": record.is_admin,
    }


def _decode(content: Any, path: Path) -> Records:
    try:
        if (schema := content["schema"]) != SCHEMA:
            raise ConfigError(f"--tokens {path}: has schema {schema}; this verifier reads {SCHEMA}")
        records = tuple(_decode_record(entry) for entry in content["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--tokens {path}: is not a file of tokens: {error!r}") from error
    if len({record.id for record in records}) != len(records):
        raise ConfigError(f"--tokens {path}: two tokens have one id; remove one of them")
    return records


def _decode_record(entry: dict[str, Any]) -> TokenRecord:
    record = TokenRecord(
        id=str(entry["id"]),
        tenant=str(entry["tenant"]),
        digest=str(entry["sha256"]),
        created=_time(entry["created"]),
        expires=None if entry["expires"] is None else _time(entry["expires"]),
        revoked=None if entry["revoked"] is None else _time(entry["revoked"]),
        is_admin=entry["admin"] is True,
    )
    if len(bytes.fromhex(record.digest)) != 32:
        raise ValueError("sha256 has another length")
    if TENANT_PATTERN.fullmatch(record.tenant) is None:
        raise ValueError("tenant is malformed")
    return record


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("a time without its zone")
    return time.astimezone(UTC)
