"""What a call's metadata says: which session, which tenant. Malformed values raise `InvalidFieldError`."""

from __future__ import annotations

import re
from typing import Any

from cloud_verifier.session import DEFAULT_TENANT
from common.errors import InvalidFieldError

SESSION_ID_KEY = "x-session-id"
TENANT_KEY = "x-outrider-tenant"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def session_id_of(context: Any) -> bytes:
    """Empty when the call carries none."""
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


def tenant_of(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            if _TENANT.fullmatch(value) is None:
                raise InvalidFieldError(TENANT_KEY, "must be 1 to 64 letters, digits, '.', '_' or '-'")
            return str(value)
    return DEFAULT_TENANT


def same_session_id(in_message: bytes, in_header: bytes) -> bytes:
    if in_message and in_header and in_message != in_header:
        raise InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")
    session_id = in_message or in_header
    if not session_id:
        raise InvalidFieldError("session_id", "is missing")
    return session_id
