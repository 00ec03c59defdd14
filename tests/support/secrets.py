"""What nobody may read in any output."""

from __future__ import annotations

import json

from support.dev_security import DevSecurity


def secrets_of(security: DevSecurity) -> list[str]:
    """The edge's token first, its secret part, what is kept of tokens, the lines of private keys."""
    token = security.token_file.read_text().strip()
    digests = [entry["sha256"] for entry in json.loads(security.tokens_file.read_text())["tokens"]]
    keys = (security.certificates.server[1], security.certificates.client[1])
    lines = [line for key in keys for line in key.read_text().splitlines() if "PRIVATE" not in line]
    return [token, token[-43:], *digests, *lines]
