"""The engine's measurements: plain counters on the hot path, a few rate-limited lines in the log.

The engine is the only writer; a scrape reads from another thread and may see a step half counted.
Nothing here takes a lock or imports Prometheus: `metrics.py` makes families of the numbers when it is asked.
It holds counts, times and ids only: no text and no tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.process.logs import LogLimiter, session_tag
from outrider.common.process.memory import peak_resident_bytes
from outrider.common.types import (
    GenerateRequest,
    MemoryUse,
    Method,
    OpenRequest,
    RoundErrorCode,
    RoundMetrics,
    VerifyRequest,
)

log = logging.getLogger(__name__)

# A threshold of an alert is one of these: between two, a quantile is a guess.
_SHORT_MS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 250, 300, 400, 500, 700)
_LONG_MS = (1000, 1500, 2500, 4000, 6000, 10_000)
TIMES_NS = tuple(int(ms * 1e6) for ms in (*_SHORT_MS, *_LONG_MS))
SESSIONS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
_KIND_OF: dict[type, str] = {OpenRequest: "open", VerifyRequest: "verify", GenerateRequest: "generate"}


def memory_use(backend: TargetBackend) -> MemoryUse:
    """Returns what a target takes, and the most memory so far: on CUDA of the device by torch's allocator, else of the
    process."""
    sizes = backend.num_weight_bytes, backend.num_kv_bytes
    if not backend.device.startswith("cuda"):
        return MemoryUse(*sizes, peak_resident_bytes())
    from torch import cuda

    allocated, reserved = (
        most(backend.device) for most in (cuda.max_memory_allocated, cuda.max_memory_reserved)
    )
    return MemoryUse(*sizes, int(allocated), int(reserved))


class Histogram:
    """Counts integers by bucket; `bounds` are inclusive upper ends, one bucket more takes the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0

    def add(self, value: int) -> None:
        """Counts `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineObserver:
    """Holds everything counted since the start. The engine calls its methods."""

    def __init__(self, limiter: LogLimiter | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.batch_size = Histogram(SESSIONS)
        self.step_tokens = Histogram(TOKENS)
        self.forward_ns = Histogram(TIMES_NS)
        self.verify_ns = Histogram(TIMES_NS)
        self.num_rounds = dict.fromkeys(_KIND_OF.values(), 0)
        self.round_ns = {kind: Histogram(TIMES_NS) for kind in _KIND_OF.values()}
        self.queue_ns = Histogram(TIMES_NS)
        self.accepted_tokens = {method: Histogram(ACCEPTED) for method in Method}
        self.num_draft_tokens = dict.fromkeys(Method, 0)
        self.num_judged_tokens = {method: {"accepted": 0, "rejected": 0} for method in Method}
        self.num_new_tokens = dict.fromkeys(Method, 0)
        self.num_hit_tokens = 0
        self.num_miss_tokens = 0
        self.num_failed_steps = 0
        self.errors = {str(code): 0 for code in RoundErrorCode}
        self.refusals = dict.fromkeys(("sessions", "waiting", "grammars", "kv", "expired"), 0)
        self.evictions = {"kv": 0, "session": 0}
        self.num_expired = 0
        self._limiter = limiter or LogLimiter(log, clock=clock.now)

    # ------------------------------------------------------------------------------------- hot path

    def on_step(self, batch_size: int, num_tokens: int, forward_ns: int, verify_ns: int) -> None:
        """Counts one packed forward of `num_tokens` for `batch_size` sessions, and verifying after it."""
        self.batch_size.add(batch_size)
        self.step_tokens.add(num_tokens)
        self.forward_ns.add(forward_ns)
        self.verify_ns.add(verify_ns)

    def on_round(
        self,
        request: OpenRequest | VerifyRequest | GenerateRequest,
        session_id: bytes,
        method: Method,
        *,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        judged_tokens: tuple[int, int],
        has_correction: bool,
        answered_ns: int | None,
        metrics: RoundMetrics,
    ) -> None:
        """Counts an opening, a round or a step of a generation that was computed and is answered now. `judged_tokens`:
        how many were accepted and rejected of a chain, of a tree those of its likeliest path.
        `answered_ns`: of a generation, from its arrival to the step before; None: nothing was answered before."""
        kind = _KIND_OF[type(request)]
        self.num_rounds[kind] += 1
        self.round_ns[kind].add(metrics.total_ns - (answered_ns or 0))
        if answered_ns is None:
            self.queue_ns.add(metrics.queue_ns)
        self.num_new_tokens[method] += num_accepted_tokens + has_correction
        if num_draft_tokens:
            self.num_draft_tokens[method] += num_draft_tokens
            judged = self.num_judged_tokens[method]
            judged["accepted"] += judged_tokens[0]
            judged["rejected"] += judged_tokens[1]
            self.accepted_tokens[method].add(num_accepted_tokens)
        if log.isEnabledFor(logging.DEBUG):
            facts = {
                "kind": kind,
                "method": str(method),
                "session": session_tag(session_id),
                "round_id": request.round_id,
                "num_draft_tokens": num_draft_tokens,
                "num_accepted_tokens": num_accepted_tokens,
                "queue_ms": round(metrics.queue_ns / 1e6, 3),
                "forward_ms": round(metrics.forward_ns / 1e6, 3),
                "total_ms": round(metrics.total_ns / 1e6, 3),
                "batch_size": metrics.batch_size,
            }
            log.debug("answered", extra=facts)

    def on_prefix(self, num_hit_tokens: int, num_miss_tokens: int) -> None:
        """Counts a sequence that began with `num_hit_tokens` from the prefix cache; the rest is computed."""
        self.num_hit_tokens += num_hit_tokens
        self.num_miss_tokens += num_miss_tokens

    # ------------------------------------------------------------------------------------ exceptions

    def on_error(self, code: RoundErrorCode, session_id: bytes, round_id: int, field: str = "") -> None:
        """Counts a request answered with an error. Its message may quote the request: it is not logged."""
        self.errors[str(code)] += 1
        if code is RoundErrorCode.REFUSED and self._limiter.is_due("refused"):
            facts = {"session": session_tag(session_id), "round_id": round_id}
            self._limiter.info("refused", "refused a request: no room", facts)
        if log.isEnabledFor(logging.DEBUG):
            facts = {"code": str(code), "session": session_tag(session_id), "round_id": round_id}
            log.debug("answered with an error", extra=facts | ({"field": field} if field else {}))

    def on_refused(self, reason: str) -> None:
        """Counts a request that there was no room for; the backlog counts its own refusals."""
        self.refusals[reason] += 1

    def on_evicted(self, what: str, session_id: bytes) -> None:
        """Counts an idle session that made room: `what` is "kv" (its ids stay) or "session" (all of it)."""
        self.evictions[what] += 1
        facts = {"what": what, "session": session_tag(session_id)}
        self._limiter.info(f"evicted {what}", "evicted an idle session", facts)

    def on_expired(self, session_id: bytes, idle_ttl_s: float) -> None:
        """Counts a session that was idle for longer than its TTL."""
        self.num_expired += 1
        facts = {"session": session_tag(session_id), "idle_ttl_s": idle_ttl_s}
        self._limiter.info("expired", "a session expired", facts)

    def on_failed_step(self) -> None:
        """Counts a step that raised."""
        self.num_failed_steps += 1
