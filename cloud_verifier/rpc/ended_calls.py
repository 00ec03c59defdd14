"""Counts the calls that the verifier itself refused or ended, and logs some of them."""

from __future__ import annotations

import logging

from outrider.cloud_verifier.rpc.answers import UnreadError
from outrider.cloud_verifier.rpc.health import HealthError
from outrider.cloud_verifier.rpc.occupancy import TooManyCallsError
from outrider.cloud_verifier.rpc.service import ShuttingDownError
from outrider.cloud_verifier.rpc.stream import IdleError, SupersededError
from outrider.cloud_verifier.security.authenticator import AccessError
from outrider.common.errors import InvalidFieldError
from outrider.common.process.logs import LogLimiter

log = logging.getLogger(__name__)

_INTERNAL = "internal"
_REASON_OF: dict[type[Exception], str] = {
    UnreadError: "unread",
    IdleError: "idle",
    SupersededError: "superseded",
    ShuttingDownError: "shutting_down",
    InvalidFieldError: "invalid",
}
_WHY = {  # for the log; the errors have more for the caller
    "unread": "ended a call: its answers are not read",
    "idle": "ended a call: it was idle for too long",
    "superseded": "ended a call: a newer one carries its session",
    "shutting_down": "ended a call: the verifier is shutting down",
    "invalid": "a call was rejected",
    "calls": "refused a call: too many are open",
    "tenant_calls": "refused a call: too many of its tenant are open",
}


class EndedCalls:
    """Counts by reason since the start. Lives on the event loop; a scrape reads from another thread."""

    def __init__(self) -> None:
        self.num_ended = dict.fromkeys((*_REASON_OF.values(), _INTERNAL), 0)
        self.num_refused = {"calls": 0, "tenant_calls": 0}
        self._limiter = LogLimiter(log)

    def count(self, error: Exception) -> None:
        """Counts a call that ends with `error`, and logs it; what has no reason of its own is a bug. Calls without
        credentials are counted where these are checked; a health call that ends with a status was answered."""
        if isinstance(error, AccessError | HealthError):
            return
        if isinstance(error, TooManyCallsError):
            self.num_refused[error.reason] += 1
            self._limiter.info(error.reason, _WHY[error.reason], {"tenant": error.tenant})
            return
        reason = next((of for kind, of in _REASON_OF.items() if isinstance(error, kind)), _INTERNAL)
        self.num_ended[reason] += 1
        if reason == _INTERNAL:
            self._limiter.error(f"{reason} {type(error).__name__}", "a call failed", {}, error)
            return
        # Its message may quote the request.
        facts = {"field": error.field} if isinstance(error, InvalidFieldError) else {}
        self._limiter.info(reason, _WHY[reason], facts)
