"""From the `authorization` of a call to whose the call is. Pure: records and a clock in, a caller out."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from outrider.cloud_verifier.security.metadata import Caller
from outrider.cloud_verifier.security.tokens import TOKEN_PATTERN, TokenRecord, digest_of
from outrider.common.errors import OutriderError

REASONS = ("missing", "malformed", "unknown", "expired", "revoked", "denied")
_MAX_HEADER = 256  # characters; ours have 73
_NO_DIGEST = "0" * 64  # of no text that anybody knows


class AccessError(OutriderError):
    """A call without the credentials it needs. `reason` is one of REASONS; the message is for the caller.

    `token_id` names a token that was the right one once.
    """

    def __init__(self, reason: str, message: str, token_id: str = "") -> None:
        super().__init__(message)
        assert reason in REASONS, reason
        self.reason = reason
        self.token_id = token_id


class Authenticator:
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
        """From now on these tokens are known, and no others."""
        self._records = {record.id: record for record in records}
        self._look_again: datetime | None = self.clock()

    def take_ended(self) -> frozenset[str]:
        """Ids that were valid at the last call and are not now: expired, revoked or gone."""
        now = self.clock()
        if self._look_again is None or now < self._look_again:
            return frozenset()
        valid = [record for record in self._records.values() if record.state(now) == "valid"]
        self._look_again = min((each.expires for each in valid if each.expires is not None), default=None)
        ended, self._valid = self._valid - {each.id for each in valid}, frozenset(each.id for each in valid)
        return ended

    def identify(self, authorizations: Sequence[str | bytes]) -> Caller:
        """Whose a call with these `authorization` values is. Raises `AccessError`, that quotes none."""
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
        """The record of a token that is exactly the one given out. Only its holder learns more about it."""
        match = TOKEN_PATTERN.fullmatch(token)
        if match is None:
            raise AccessError("malformed", "what the call has for a token is none; is it truncated?")
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
        raise AccessError("malformed", "the call's authorization is none of a token")
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer":
        raise AccessError("malformed", "the call's authorization is not 'Bearer TOKEN'")
    return token
