"""Counts each tenant's open calls and the ids of its unanswered requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from outrider.cloud_verifier.config import CallLimits
from outrider.cloud_verifier.engine.admission import MAX_WAITING
from outrider.cloud_verifier.engine.session import num_sampling_ids_of
from outrider.common.types import GenerateRequest, OpenRequest, SessionRequest, VerifyRequest

# Requests of one call that wait for the engine: no more are read until it has taken or answered some. Its session
# refuses those beyond half as many, so that a client which pipelines rounds never meets it.
MAX_REQUESTS = 2 * MAX_WAITING


class TooManyCallsError(Exception):
    """A limit of open calls is reached: `reason` is "calls", or "tenant_calls" where it is the tenant's own."""

    def __init__(self, reason: str, tenant: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.tenant = reason, tenant


class Occupancy:
    """Counts by tenant, so that one cannot use up what all need. Lives on the event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.calls: Counter[str] = Counter()
        self.waiting_ids: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, tenant: str) -> Iterator[OpenCall]:
        """Counts a call while it is open, and until its last request was given back. Raises `TooManyCallsError`."""
        own_most, most = self.limits.tenant_max_calls, self.limits.max_calls
        if own_most and self.calls[tenant] >= own_most:
            message = f"{own_most} calls of this tenant are open (--tenant-max-calls)"
            raise TooManyCallsError("tenant_calls", tenant, message)
        if most and self.calls.total() >= most:
            raise TooManyCallsError("calls", tenant, f"{most} calls are open (--max-calls)")
        self.calls[tenant] += 1
        call = OpenCall(self, tenant)
        try:
            yield call
        finally:
            call.end()

    def leave(self, tenant: str) -> None:
        """Counts out a call."""
        _subtract(self.calls, tenant, 1)

    def take(self, tenant: str, num_ids: int) -> str:
        """Counts a request in. Returns the limit that is in the way, "" for none; one request always fits."""
        most, held = self.limits.tenant_max_waiting_ids, self.waiting_ids[tenant]
        if most and held and num_ids and held + num_ids > most:
            return f"{held} ids of this tenant wait for answers; at most {most} (--tenant-max-waiting-ids)"
        self.waiting_ids[tenant] += num_ids
        return ""

    def give_back(self, tenant: str, num_ids: int) -> None:
        """Counts out a request that was answered."""
        _subtract(self.waiting_ids, tenant, num_ids)


class OpenCall:
    """Counts the requests of one call that the engine has not answered, or not taken where they have no answer.

    A call that ended counts until there are none: what a client leaves here by ending one call after another is bounded
    as what it has open is. Lives on the event loop.
    """

    def __init__(self, occupancy: Occupancy, tenant: str) -> None:
        self.num_requests = 0
        self._occupancy = occupancy
        self.tenant = tenant
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None  # of who reads, while there is no room

    @property
    def is_full(self) -> bool:
        """Returns whether no more is to be read."""
        return self.num_requests >= MAX_REQUESTS

    def take(self, num_ids: int = 0) -> str:
        """Counts a request in. Returns the limit that is in the way, "" for none; none is for a request without
        ids."""
        if limit := self._occupancy.take(self.tenant, num_ids):
            return limit
        self.num_requests += 1
        return ""

    def give_back(self, num_ids: int = 0) -> None:
        """Counts out a request."""
        self._occupancy.give_back(self.tenant, num_ids)
        self.num_requests -= 1
        if self._waiter is not None and not self.is_full and not self._waiter.done():
            self._waiter.set_result(None)
        if self._is_over and self.num_requests == 0:
            self._occupancy.leave(self.tenant)

    async def room(self) -> None:
        """Waits until more may be read."""
        while self.is_full:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def end(self) -> None:
        """Ends the call, once."""
        self._is_over = True
        if self.num_requests <= 0:
            self._occupancy.leave(self.tenant)


def _subtract(counter: Counter[str], tenant: str, number: int) -> None:
    counter[tenant] -= number
    if not counter[tenant]:
        del counter[tenant]


def num_ids_of(request: SessionRequest) -> int:
    """Returns how many ids a request holds, by which its memory is counted: up to about 50 bytes each."""
    match request:
        case VerifyRequest():
            num_support_ids = sum(2 * len(each.token_ids) for each in request.q_support)
            return len(request.committed_tokens) + len(request.draft_tokens) + num_support_ids
        case OpenRequest(sampling=sampling):
            num_grammar_ids = 0 if sampling.grammar is None else len(sampling.grammar.text) // 8
            return len(request.token_ids) + num_sampling_ids_of(request) + num_grammar_ids
        case GenerateRequest():
            return len(request.committed_tokens)
        case _:
            return 0
