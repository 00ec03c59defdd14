"""Calls a running daemon for the command line, with Python's own HTTP client."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from outrider.common.errors import LinkError, UsageError

TIMEOUT_S = 5.0


def ask_daemon(address: str, path: str, api_key: str = "") -> Any:
    """Returns the JSON that `path` answers with. Raises `LinkError` where no daemon answers at `address`
    (HOST:PORT), `UsageError` where it refuses."""
    request = urllib.request.Request(f"http://{address}{path}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise UsageError(f"the daemon at {address} refuses: {_message(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        hint = "start one with `edge-client serve`"
        raise LinkError(f"no daemon answers at {address} ({reason}): {hint}") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
