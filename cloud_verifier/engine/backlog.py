"""How much waits and how long it will take: whether one more round still can be served in time.

Asked from the event loop for every round, so that a refusal costs the engine nothing; told by the engine
thread, once a step, what it holds. Nothing is taken back when work ends: the next step tells anew.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field

from outrider.cloud_verifier.config import QueueLimits

MIN_RETRY_MS = 20
MAX_RETRY_MS = 10_000
MAX_KNOWN = 256
_MEMORY = 0.98  # weight a step's time keeps with every later step


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str  # one of a few words, for counting
    message: str
    retry_after_ms: int  # at least MIN_RETRY_MS


class StepTimes:
    """A step's time as base + per token, fitted to recent steps.

    Steps of one size cannot tell the two apart: all of it then counts per token, which
    overestimates larger steps until one is seen.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.token_s = 0.0
        self._sums = [0.0] * 5  # of weights, n, t, n², n·t

    @property
    def is_known(self) -> bool:
        return self._sums[0] > 0

    @property
    def is_sloped(self) -> bool:
        """Whether sizes differed by enough to tell the two apart."""
        weight, sum_n, _, sum_nn, _ = self._sums
        return self.is_known and sum_nn * weight > 1.01 * sum_n * sum_n

    def observe(self, num_tokens: int, step_s: float) -> None:
        n, t = float(num_tokens), step_s
        new = (1.0, n, t, n * n, n * t)
        self._sums = [_MEMORY * old + x for old, x in zip(self._sums, new, strict=True)]
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums
        mean_n, mean_t = sum_n / weight, sum_t / weight
        self.token_s = mean_t / mean_n
        if self.is_sloped:
            variance = sum_nn / weight - mean_n * mean_n
            slope = (sum_nt / weight - mean_n * mean_t) / variance
            self.token_s = min(max(slope, 0.0), self.token_s)
        self.base_s = mean_t - self.token_s * mean_n


@dataclass(slots=True)
class _Tokens:
    by_tenant: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def add(self, tenant: str, num_tokens: int) -> None:
        self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + num_tokens
        self.total += num_tokens


class _Lane:
    """Tokens the engine held at its last step, took since, and has not taken yet."""

    def __init__(self) -> None:
        self.held, self.taken, self.arrived = _Tokens(), _Tokens(), _Tokens()

    @property
    def total(self) -> int:
        return self.held.total + self.taken.total + self.arrived.total

    def of_tenant(self, tenant: str) -> int:
        return sum(t.by_tenant.get(tenant, 0) for t in (self.held, self.taken, self.arrived))

    def num_tenants_with(self, tenant: str) -> int:
        here = self.held.by_tenant.keys() | self.taken.by_tenant.keys() | self.arrived.by_tenant.keys()
        return len(here | {tenant})

    def hold(self, by_tenant: dict[str, int]) -> None:
        if not by_tenant and not self.held.by_tenant and not self.taken.by_tenant:
            return
        waiting = {tenant: num_tokens for tenant, num_tokens in by_tenant.items() if num_tokens}
        self.held, self.taken = _Tokens(waiting, sum(waiting.values())), _Tokens()


class Backlog:
    """Thread-safe. `enter_*` counts a job in and returns None, or says why it is refused."""

    def __init__(self, limits: QueueLimits, max_step_tokens: int, prefill_chunk_tokens: int) -> None:
        self._limits = limits
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._times = StepTimes()
        self._rounds, self._prefills = _Lane(), _Lane()
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, int, int], Refusal] = {}  # until anything here changes
        self.num_refused: Counter[str] = Counter()  # by reason

    # ----------------------------------------------------------------------------------- from the engine

    def take_arrived(self) -> None:
        """The engine takes everything that has arrived so far."""
        with self._lock:
            self._rounds.taken, self._rounds.arrived = self._rounds.arrived, _Tokens()

    def hold(self, round_tokens: dict[str, int], prefill_tokens: dict[str, int]) -> None:
        """All that the engine holds now, by tenant; what it took before is in it.

        Told before a forward and after it: an idle engine must not look busy.
        """
        with self._lock:
            self._known.clear()
            self._rounds.hold(round_tokens)
            self._prefills.hold(prefill_tokens)

    def observe(self, num_tokens: int, step_s: float) -> None:
        """A step that fed `num_tokens` took `step_s`."""
        with self._lock:
            self._known.clear()
            self._times.observe(num_tokens, step_s)

    def enter_prefill(self, tenant: str, num_tokens: int) -> Refusal | None:
        """Bounded by tokens alone: nobody expects a prompt to be instant."""
        with self._lock:
            refusal = self._check_tokens(self._prefills, tenant, num_tokens)
            if refusal is None:
                self._known.clear()
                self._prefills.taken.add(tenant, num_tokens)
            else:
                self.num_refused[refusal.reason] += 1
            return refusal

    # ----------------------------------------------------------------------------- from any thread

    def enter_round(
        self, tenant: str, num_tokens: int, deadline_ms: int, *, is_taken: bool, num_own_tokens: int = 0
    ) -> Refusal | None:
        """`is_taken`: asked by the engine for a job it has taken already. A deadline of 0 is none.

        `num_own_tokens`: of the session's own round before this one, where one is under way: this one comes
        after it, so it neither waits for it as for others nor delays anybody until then, and is not counted.
        A round that finds nobody else before it is always served, so that one slow step cannot shut the door.
        """
        with self._lock:
            refusal = self._refusal_of(tenant, num_tokens, deadline_ms, num_own_tokens)
            if refusal is None and not num_own_tokens:
                self._known.clear()
                (self._rounds.taken if is_taken else self._rounds.arrived).add(tenant, num_tokens)
            return refusal

    def would_refuse(
        self, tenant: str, num_tokens: int, deadline_ms: int, *, num_own_tokens: int = 0
    ) -> Refusal | None:
        """`enter_round` without counting the round in."""
        with self._lock:
            return self._refusal_of(tenant, num_tokens, deadline_ms, num_own_tokens)

    def num_tokens(self) -> tuple[int, int]:
        """Of rounds and of prefills, that are to be fed."""
        with self._lock:
            return self._rounds.total, self._prefills.total

    def step_s(self, num_tokens: int) -> float:
        """What a step of `num_tokens`, cut to the largest step, takes by those before; infinite at first."""
        with self._lock:
            if not self._times.is_known:
                return math.inf
            return self._times.base_s + self._times.token_s * min(num_tokens, self._max_step_tokens)

    def step_line_ns(self) -> tuple[int, int]:
        """What a step takes, fixed and a token; twice 0 before steps of different sizes were seen."""
        with self._lock:
            if not self._times.is_sloped:
                return 0, 0
            return round(1e9 * self._times.base_s), round(1e9 * self._times.token_s)

    def retry_ms(self) -> int:
        """How long what waits now will take."""
        with self._lock:
            return self._retry_ms(self._wait_s(self._rounds.total))

    # ------------------------------------------------------------------------------------ estimates

    def _refusal_of(
        self, tenant: str, num_tokens: int, deadline_ms: int, num_own_tokens: int
    ) -> Refusal | None:
        key = (tenant, num_tokens, deadline_ms, num_own_tokens)
        if (refusal := self._known.get(key)) is None:
            refusal = self._check_tokens(self._rounds, tenant, num_tokens)
            if refusal is None and self._rounds.total > num_own_tokens:
                refusal = self._check_time(tenant, num_tokens, deadline_ms, num_own_tokens)
            if refusal is None:
                return None
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = refusal
        self.num_refused[refusal.reason] += 1
        return refusal

    def _check_tokens(self, lane: _Lane, tenant: str, num_tokens: int) -> Refusal | None:
        most, own_most = self._limits.max_queue_tokens, self._limits.tenant_max_queue_tokens
        if most and (everybody := lane.total) and everybody + num_tokens > most:
            message = f"{everybody} tokens wait here; at most {most}"
            return Refusal("queue_tokens", message, self._drain_ms(lane))
        if own_most and (own := lane.of_tenant(tenant)) and own + num_tokens > own_most:
            message = f"{own} tokens of this tenant wait here; at most {own_most}"
            return Refusal("tenant_queue_tokens", message, self._drain_ms(lane))
        return None

    def _check_time(
        self, tenant: str, num_tokens: int, deadline_ms: int, num_own_tokens: int
    ) -> Refusal | None:
        """Of the wait for others; the session's own `num_own_tokens` are among those that are counted."""
        step_ms = (self._times.base_s + self._times.token_s * num_tokens) * 1000.0
        most_ms = max(self._limits.max_queue_ms, 2 * step_ms)  # two must be able to share any target
        wait_ms = self._wait_s(self._rounds.total - num_own_tokens) * 1000.0
        if wait_ms <= most_ms and (not deadline_ms or wait_ms + step_ms <= deadline_ms):
            return None
        # Tenants take turns: what others have waiting delays this one only as far as its own tokens go.
        same = max(0, self._rounds.of_tenant(tenant) - num_own_tokens)
        wait_ms = min(wait_ms, self._wait_s(same * self._rounds.num_tenants_with(tenant)) * 1000.0)
        if wait_ms > most_ms:
            message = f"the wait is about {wait_ms:.0f} ms; at most {most_ms:.0f}"
            return Refusal("queue_ms", message, self._retry_ms(wait_ms / 1000.0))
        total_ms = wait_ms + step_ms
        if deadline_ms and total_ms > deadline_ms:
            message = f"the answer would take about {total_ms:.0f} ms; the deadline is {deadline_ms}"
            return Refusal("deadline", message, self._retry_ms(total_ms / 1000.0))
        return None

    def _wait_s(self, num_tokens: int) -> float:
        """What `num_tokens` of others cost a round: their time, and the steps before the one it shares."""
        num_steps = max(1, math.ceil(num_tokens / self._max_step_tokens))
        num_tokens += num_steps * self._prefill_chunk_tokens if self._prefills.total else 0
        return (num_steps - 1) * self._times.base_s + num_tokens * self._times.token_s

    def _drain_ms(self, lane: _Lane) -> int:
        return self._retry_ms(lane.total * (self._times.token_s + self._times.base_s / self._max_step_tokens))

    def _retry_ms(self, wait_s: float) -> int:
        return min(max(MIN_RETRY_MS, math.ceil(wait_s * 1000.0)), MAX_RETRY_MS)
