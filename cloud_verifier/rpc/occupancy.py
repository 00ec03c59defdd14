"""What each tenant has open at a verifier: its calls, and the ids of its requests that are not answered."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from outrider.cloud_verifier.config import CallLimits
from outrider.common.types import GenerateRequest, OpenRequest, SessionRequest, VerifyRequest


class TooManyCallsError(Exception):
    """A limit of open calls is reached."""


class Occupancy:
    """Counts by tenant, so that one cannot use up what all need. Lives on the event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.calls: Counter[str] = Counter()
        self.waiting_ids: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """Counts a call while it is open. Raises `TooManyCallsError`."""
        own_most, most = self.limits.tenant_max_calls, self.limits.max_calls
        if own_most and self.calls[tenant] >= own_most:
            raise TooManyCallsError(f"{own_most} calls of this tenant are open (--tenant-max-calls)")
        if most and self.calls.total() >= most:
            raise TooManyCallsError(f"{most} calls are open (--max-calls)")
        self.calls[tenant] += 1
        try:
            yield
        finally:
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
            num_word_ids = sum(1 + len(word) for word in sampling.bad_words)
            num_others = len(request.stop_token_ids) + 2 * len(sampling.logit_bias)
            num_grammar_ids = 0 if sampling.grammar is None else len(sampling.grammar.text) // 8
            return len(request.token_ids) + num_word_ids + num_others + num_grammar_ids
        case GenerateRequest():
            return len(request.committed_tokens)
        case _:
            return 0
