"""Reads a call's metadata: its session and its caller. Malformed values raise `InvalidFieldError`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from outrider.common.errors import InvalidFieldError

SESSION_ID_KEY = "x-session-id"
DEFAULT_TENANT = "default"  # of a call that names no tenant
TENANT_KEY = "x-outrider-tenant"
TENANT_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Identifies whose call it is; `token_id` is empty where there was no token."""

    tenant: str
    token_id: str = ""
    is_admin: bool = False


def session_id_of(context: Any) -> bytes:
    """Returns the call's session id, empty when the call has none."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_ID_KEY:
            try:
                session_id = bytes.fromhex(value)
            except ValueError:
                session_id = b""
            if len(session_id) != 16:
                raise InvalidFieldError(SESSION_ID_KEY, "must be 32 hex digits")
            return session_id
    return b""


def claimed_caller(context: Any) -> Caller:
    """Returns the caller that the call itself names. Used only where no credentials are required."""
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            if TENANT_PATTERN.fullmatch(value) is None:
                raise InvalidFieldError(TENANT_KEY, "must be 1 to 64 letters, digits, '.', '_' or '-'")
            return Caller(str(value))
    return Caller(DEFAULT_TENANT)


def same_session_id(in_message: bytes, in_header: bytes) -> bytes:
    """Returns the session id of message and header; raises `InvalidFieldError` unless there is exactly one."""
    if in_message and in_header and in_message != in_header:
        raise InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")
    session_id = in_message or in_header
    if not session_id:
        raise InvalidFieldError("session_id", "is missing")
    return session_id
