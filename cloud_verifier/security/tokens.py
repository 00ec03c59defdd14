"""Bearer tokens: their form, and what a verifier stores of them.

A token is `outrider_<id>_<secret>`: 12 hex digits that name it, and 43 characters of base64url with 256
random bits. SHA-256 of the whole is stored. A slow hash (bcrypt, Argon2) is for secrets that people choose,
which can be guessed; 256 random bits cannot, however fast the hash is, and anybody on the network could make
the verifier compute a slow one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from outrider.cloud_verifier.security.metadata import TENANT_PATTERN
from outrider.common.errors import UsageError

TOKEN_PATTERN = re.compile(r"outrider_([0-9a-f]{12})_[A-Za-z0-9_-]{43}", re.ASCII)
NEVER = "never"
_SECRET_BYTES = 32
_LIFETIME = re.compile(r"(\d{1,6})\s*([smhdw])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Holds what is stored of an issued token; times are in UTC. `digest` is SHA-256 in hex.

    An admin token is valid for the admin port beyond loopback and nothing else.
    """

    id: str
    tenant: str
    digest: str
    created: datetime
    expires: datetime | None = None
    revoked: datetime | None = None
    is_admin: bool = False

    def state(self, now: datetime) -> str:
        """Returns `valid`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


def new_token(
    tenant: str, now: datetime, lifetime: timedelta | None, is_admin: bool = False
) -> tuple[str, TokenRecord]:
    """Returns a new token, which is stored nowhere, and its record.

    Raises `UsageError` for a malformed tenant.
    """
    check_tenant(tenant)
    token_id = secrets.token_hex(6)
    text = f"outrider_{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    assert TOKEN_PATTERN.fullmatch(text), "a token of another shape than is looked for"
    expires = None if lifetime is None else now + lifetime
    return text, TokenRecord(token_id, tenant, digest_of(text), now, expires, is_admin=is_admin)


def digest_of(text: str) -> str:
    """Returns the SHA-256 of a token in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_tenant(tenant: str) -> None:
    """Raises `UsageError` for a malformed tenant."""
    if TENANT_PATTERN.fullmatch(tenant) is None:
        raise UsageError(f"--tenant {tenant}: must be 1 to 64 letters, digits, '.', '_' or '-'")


def parse_lifetime(text: str, flag: str = "--expires") -> timedelta | None:
    """Returns the duration of `90d`, `12h`, `2w`; None for `never`. Raises `UsageError` naming `flag`."""
    if text == NEVER:
        return None
    match = _LIFETIME.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise UsageError(f"{flag} {text}: want a number and s, m, h, d or w, for example 90d; or {NEVER}")
    try:
        lifetime = timedelta(**{_UNITS[match[2]]: int(match[1])})
        datetime(2000, 1, 1) + 2 * lifetime  # what no calendar holds
    except OverflowError as error:
        raise UsageError(f"{flag} {text}: is too long; say {NEVER}") from error
    return lifetime
