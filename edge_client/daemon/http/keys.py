"""Reads API keys and compares the one that a client shows with them."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.edge_client.config.daemon import DaemonConfig


@dataclass(frozen=True, slots=True)
class Keys:
    """Holds API keys as digests, so that a comparison takes the same time whatever was sent."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, serve: DaemonConfig) -> Keys:
        """Returns the configured keys. Raises `UsageError` for a file that cannot be read or holds no key."""
        keys = [serve.api_key] if serve.api_key else []
        if serve.api_key_file:
            keys += read_keys(Path(serve.api_key_file))
        return cls(tuple(_digest(key) for key in keys))

    def __bool__(self) -> bool:
        return bool(self.digests)

    def match(self, shown: str) -> bool:
        """Returns whether `shown` is one of the keys."""
        digest = _digest(shown)
        return sum(hmac.compare_digest(digest, each) for each in self.digests) > 0  # all of them, always


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def owner_of(key: str, user: str) -> str:
    """Returns who a request is from: a name that differs for each key and, of one key, for each `user`; it does not
    tell the key."""
    return f"{_digest(key).hex()} {user}" if key or user else ""


def read_keys(path: Path) -> list[str]:
    """Returns the keys of a file, one a line; # begins a comment. Raises `UsageError` for a file that cannot
    be read or holds none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--api-key-file {path}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--api-key-file {path}: is not UTF-8") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key")
    return keys
