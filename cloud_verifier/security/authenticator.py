"""Identifies a call's caller from its `authorization`. Pure: records and a clock in, a caller out."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from outrider.cloud_verifier.security.metadata import Caller
from outrider.cloud_verifier.security.tokens import TOKEN_PATTERN, TokenRecord, digest_of
from outrider.common.errors import OutriderError

REASONS = ("missing", "malformed", "unknown", "expired", "revoked", "denied")
_MAX_HEADER = 256  # characters; ours have 73
_NO_DIGEST = "0" * 64  # no token has it


class AccessError(OutriderError):
    """Reports a call without the credentials it needs, for the caller. `reason` is one of REASONS.

    `token_id` names a token that was valid once.
    """

    def __init__(self, reason: str, message: str, token_id: str = "") -> None:
        super().__init__(message)
        assert reason in REASONS, reason
        self.reason = reason
        self.token_id = token_id


class Authenticator:
    """Checks tokens against the records of a token file."""

    def __init__(
        self, records: Iterable[TokenRecord], clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.clock = clock
        self._records: dict[str, TokenRecord] = {}
        self._valid: frozenset[str] = frozenset()
        self.replace(records)
        self.take_ended()

    def __len__(self) -> int:
        return len(self._records)

    def replace(self, records: Iterable[TokenRecord]) -> None:
        """Replaces all known tokens by these."""
        self._records = {record.id: record for record in records}
        self._look_again: datetime | None = self.clock()

    def take_ended(self) -> frozenset[str]:
        """Returns ids that were valid at the last call and are not now: expired, revoked or removed."""
        now = self.clock()
        if self._look_again is None or now < self._look_again:
            return frozenset()
        valid = [record for record in self._records.values() if record.state(now) == "valid"]
        self._look_again = min((each.expires for each in valid if each.expires is not None), default=None)
        ended, self._valid = self._valid - {each.id for each in valid}, frozenset(each.id for each in valid)
        return ended

    def identify(self, authorizations: Sequence[str | bytes]) -> Caller:
        """Returns the caller for a call's `authorization` values.

        Raises `AccessError`, which quotes none of them.
        """
        if not authorizations:
            raise AccessError("missing", "the call has no token")
        record = self._find(_bearer_token(authorizations))
        match record.state(self.clock()):
            case "revoked":
                raise AccessError("revoked", f"the token {record.id} is revoked", record.id)
            case "expired":
                when = f"{record.expires:%Y-%m-%d %H:%M} UTC"
                raise AccessError("expired", f"the token {record.id} expired at {when}", record.id)
        return Caller(record.tenant, record.id, record.is_admin)

    def _find(self, token: str) -> TokenRecord:
        """Returns the record of a token that equals the one issued. Only its holder learns more about it."""
        match = TOKEN_PATTERN.fullmatch(token)
        if match is None:
            raise AccessError("malformed", "the call's token is malformed; is it truncated?")
        record = self._records.get(match[1])
        kept = _NO_DIGEST if record is None else record.digest
        is_same = hmac.compare_digest(digest_of(token), kept)  # takes as long wherever they differ
        if record is None or not is_same:
            raise AccessError("unknown", "no such token is known here")
        return record


def _bearer_token(authorizations: Sequence[str | bytes]) -> str:
    if len(authorizations) > 1:
        raise AccessError("malformed", "the call has more than one authorization")
    value = authorizations[0]
    if not isinstance(value, str) or len(value) > _MAX_HEADER:
        raise AccessError("malformed", "the call's authorization is no token")
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer":
        raise AccessError("malformed", "the call's authorization is not 'Bearer TOKEN'")
    return token
