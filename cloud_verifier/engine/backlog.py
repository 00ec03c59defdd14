"""Estimates how much waits and for how long: the one place that decides whether a round is admitted or refused.

A stream asks for every new round before the engine gets it, so that a refusal costs no step; the engine
reports once a step what it holds. Nothing is taken off when work ends: the next report replaces the last one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.line import MAX_PLACES, RefusedLine, SessionKey
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.step_time import LeastSquaresTime, SharedStepTime

MIN_RETRY_MS = 20
MAX_RETRY_MS = 10_000
MAX_KNOWN_REFUSALS = 256
# Of the longest wait: up to here whoever comes is let in, so that those who were refused and stay away cost no
# capacity, and to here it has fallen when those who were refused are told to come again. The rest is for them.
_OPEN_SHARE = 0.5
_STEP_MEMORY = 0.98  # weight that a step's time keeps with every later step
_CYCLE_MEMORY = 0.9995  # the same, where steps of different sessions and tokens must be remembered together


@dataclass(frozen=True, slots=True)
class Refusal:
    """Holds the reason why a request is not served now, and when it may be sent again."""

    reason: str  # one of a few words, for counting
    message: str
    retry_after_ms: int  # at least MIN_RETRY_MS


@dataclass(slots=True)
class AdmissionTicket:
    """Shows that a round was let in: the engine does not ask again."""


@dataclass(slots=True)
class _Tokens:
    by_tenant: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def add(self, tenant: str, num_tokens: int) -> None:
        self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + num_tokens
        self.total += num_tokens


class _Lane:
    """Counts the tokens that the engine held at its last report, took since, and has not taken yet."""

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
    """Counts waiting tokens by tenant and refuses what could not be served in time. Thread-safe."""

    def __init__(
        self,
        limits: QueueLimits,
        max_step_tokens: int,
        prefill_chunk_tokens: int,
        clock: Clock = SYSTEM_CLOCK,
        *,
        max_retry_ms: int = MAX_RETRY_MS,
    ) -> None:
        """`max_retry_ms` is the longest time after which a refused request is told to come again."""
        self._limits = limits
        self._max_retry_ms = min(max_retry_ms, MAX_RETRY_MS)
        self._line = RefusedLine(clock)
        self._refused: set[SessionKey] = set()  # sessions, since the engine last asked
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._times, self._cycles = LeastSquaresTime(_STEP_MEMORY), SharedStepTime(_CYCLE_MEMORY)
        self._gap_s = 0.0  # lately, between two steps of a stream alone; 0: not known
        self._rounds, self._prefills = _Lane(), _Lane()
        self._lock = threading.Lock()
        self._known_refusals: dict[tuple[object, ...], Refusal] = {}  # until anything here changes
        self.num_refused: Counter[str] = Counter()  # by reason

    # ------------------------------------------------------------------------------ from any thread

    def enter_round(
        self,
        tenant: str,
        num_tokens: int,
        deadline_ms: int = 0,
        *,
        num_own_tokens: int = 0,
        session_id: bytes = b"",
    ) -> AdmissionTicket | Refusal:
        """Counts a round in and returns its ticket, or the reason why it is refused. A deadline of 0 is none.

        `num_own_tokens` are those of the session's own round before this one, where one is under way: this
        one comes after it, so it neither waits for it as for others nor delays anybody until then, and is
        not counted. A round that finds nobody else before it is always let in: one slow step refuses nothing.
        A refused round of `session_id` keeps its place among those refused until it comes again.
        """
        with self._lock:
            refusal = self._refusal_of(tenant, num_tokens, deadline_ms, num_own_tokens, session_id)
            if refusal is not None:
                return refusal
            if not num_own_tokens:
                self._known_refusals.clear()
                self._rounds.arrived.add(tenant, num_tokens)
            return AdmissionTicket()

    def note_refused(self, tenant: str, session_id: bytes) -> None:
        """Notes that a request of the session was refused before the engine had it: the session is in use."""
        with self._lock:
            self._note_refused((tenant, session_id))

    def leave_line(self, tenant: str, session_id: bytes) -> None:
        """Gives up the place of a refused round that will not come again: its client is gone."""
        with self._lock:
            self._known_refusals.clear()
            self._line.leave((tenant, session_id))

    def num_tokens(self) -> tuple[int, int]:
        """Returns the tokens that wait, those of rounds and those of prefills."""
        with self._lock:
            return self._rounds.total, self._prefills.total

    def step_s(self, num_tokens: int) -> float:
        """Returns how long a step of `num_tokens`, at most the largest step, will take; infinite at first."""
        with self._lock:
            if not self._times.is_known:
                return math.inf
            return self._times.base_s + self._times.token_s * min(num_tokens, self._max_step_tokens)

    def step_parts_ns(self) -> tuple[int, int, int]:
        """Returns how long a step keeps others waiting: its fixed time, that per session and per token; zeros until
        steps of two sizes were measured."""
        with self._lock:
            if not self._cycles.is_sloped:
                return 0, 0, 0
            fixed_s, session_s, token_s = self._cycles.parts
            return round(1e9 * fixed_s), round(1e9 * session_s), round(1e9 * token_s)

    def stream_gap_ns(self) -> int:
        """Returns what lies between two steps of a stream alone; 0: none was measured."""
        with self._lock:
            return round(1e9 * self._gap_s)

    def retry_ms(self) -> int:
        """Returns how long the rounds that wait now will take."""
        with self._lock:
            return self._retry_ms(self._wait_s(self._rounds.total))

    def drain_ms(self) -> int:
        """Returns how long all that waits now will take, prompts included."""
        with self._lock:
            return self._retry_ms(self._drain_s(self._rounds) + self._drain_s(self._prefills))

    # ------------------------------------------------------------------------------ from the engine

    def take_arrived(self) -> None:
        """Marks everything that has arrived so far as taken by the engine."""
        with self._lock:
            self._rounds.taken, self._rounds.arrived = self._rounds.arrived, _Tokens()

    def take_refused(self) -> Set[SessionKey]:
        """Returns the sessions of which a request was refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, set()
            return refused

    def take_round(
        self, tenant: str, num_tokens: int, deadline_ms: int, session_id: bytes = b""
    ) -> Refusal | None:
        """Counts in a round that came without a ticket, or returns the reason why it is refused."""
        with self._lock:
            refusal = self._refusal_of(tenant, num_tokens, deadline_ms, 0, session_id)
            if refusal is None:
                self._known_refusals.clear()
                self._rounds.taken.add(tenant, num_tokens)
            return refusal

    def take_prefill(self, tenant: str, num_tokens: int) -> Refusal | None:
        """Counts a prompt in, or returns the reason why it is refused: too many tokens, never their time."""
        with self._lock:
            refusal = self._check_tokens(self._prefills, tenant, num_tokens)
            if refusal is None:
                self._known_refusals.clear()
                self._prefills.taken.add(tenant, num_tokens)
            else:
                self.num_refused[refusal.reason] += 1
            return refusal

    def hold(self, round_tokens: dict[str, int], prefill_tokens: dict[str, int]) -> None:
        """Replaces what the engine holds, by tenant; what it took before is included.

        Reported before a forward and after it: an idle engine must not look busy.
        """
        with self._lock:
            self._known_refusals.clear()
            self._rounds.hold(round_tokens)
            self._prefills.hold(prefill_tokens)

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Adds the time of a step that fed `num_tokens`."""
        with self._lock:
            self._known_refusals.clear()
            self._times.observe(num_tokens, step_s)

    def observe_cycle(self, num_sessions: int, num_tokens: int, cycle_s: float, forward_s: float) -> None:
        """Adds how long a step that fed `num_tokens` of so many sessions kept others waiting, with its forward."""
        with self._lock:
            self._cycles.observe(num_sessions, num_tokens, cycle_s, forward_s)

    def observe_stream_gap(self, gap_s: float) -> None:
        """Adds the time between two steps of a stream alone. A longer one, of a process that had to wait, counts as
        twice what was expected."""
        with self._lock:
            known_s = self._gap_s or gap_s
            self._gap_s = _STEP_MEMORY * known_s + (1 - _STEP_MEMORY) * min(gap_s, 2 * known_s)

    # ------------------------------------------------------------------------------------ estimates

    def _refusal_of(
        self, tenant: str, num_tokens: int, deadline_ms: int, num_own_tokens: int, session_id: bytes
    ) -> Refusal | None:
        """Counts the refusal, and keeps the session's place in the line of those refused, or ends it."""
        place = (tenant, session_id)
        refused_before = self._line.before(place)
        key = (tenant, num_tokens, deadline_ms, num_own_tokens, refused_before)
        if (refusal := self._known_refusals.get(key)) is None:
            refusal = self._check_tokens(self._rounds, tenant, num_tokens)
            if refusal is None and self._rounds.total > num_own_tokens:
                refusal = self._check_time(tenant, num_tokens, deadline_ms, num_own_tokens, *refused_before)
            if refusal is None:
                self._line.leave(place)
                return None
            if len(self._known_refusals) >= MAX_KNOWN_REFUSALS:
                self._known_refusals.clear()
            self._known_refusals[key] = refusal
        self.num_refused[refusal.reason] += 1
        if session_id:
            self._line.join(place, num_tokens, refusal.retry_after_ms)
            self._note_refused(place)
        return refusal

    def _note_refused(self, session: SessionKey) -> None:
        if len(self._refused) < MAX_PLACES:
            self._refused.add(session)

    def _check_tokens(self, lane: _Lane, tenant: str, num_tokens: int) -> Refusal | None:
        most, own_most = self._limits.max_queue_tokens, self._limits.tenant_max_queue_tokens
        is_full = bool(most and lane.total and lane.total + num_tokens > most)
        if is_full and not self._has_share_left(lane, tenant):
            message = f"at most {most} tokens may wait here"
            return Refusal("queue_tokens", message, self._retry_ms(self._drain_s(lane)))
        if own_most and (own := lane.of_tenant(tenant)) and own + num_tokens > own_most:
            message = f"{own} tokens of this tenant wait here; at most {own_most}"
            return Refusal("tenant_queue_tokens", message, self._retry_ms(self._drain_s(lane)))
        return None

    def _has_share_left(self, lane: _Lane, tenant: str) -> bool:
        """Returns whether the tenant may add to a full lane, which one tenant must not close to all others: it has less
        there than its equal share. Together they add about as much as the lane's bound."""
        most, num_tenants = self._limits.max_queue_tokens, lane.num_tenants_with(tenant)
        return num_tenants > 1 and lane.of_tenant(tenant) < most / num_tenants and lane.total < 2 * most

    def _check_time(
        self,
        tenant: str,
        num_tokens: int,
        deadline_ms: int,
        num_own_tokens: int,
        refused_before: int,
        own_refused_before: int,
    ) -> Refusal | None:
        """Checks the wait for others: the session's own `num_own_tokens` are among those that are counted."""
        step_ms = (self._times.base_s + self._times.token_s * num_tokens) * 1000.0
        most_ms = max(self._limits.max_queue_ms, 2 * step_ms)  # two must be able to share any target
        others_s = self._wait_s(self._rounds.total - num_own_tokens)
        if others_s * 1000.0 <= _OPEN_SHARE * most_ms:
            refused_before = own_refused_before = 0
        wait_ms = (others_s + self._refused_s(refused_before, most_ms)) * 1000.0
        if wait_ms <= most_ms and (not deadline_ms or wait_ms + step_ms <= deadline_ms):
            return None
        # Tenants take turns: what others have waiting delays this one only as far as its own tokens go.
        num_tenants = self._rounds.num_tenants_with(tenant)
        same = max(0, self._rounds.of_tenant(tenant) - num_own_tokens)
        refused_s = self._refused_s(own_refused_before * num_tenants, most_ms)
        wait_ms = min(wait_ms, (self._wait_s(same * num_tenants) + refused_s) * 1000.0)
        if wait_ms > most_ms:
            message = f"the wait is about {wait_ms:.0f} ms; at most {most_ms:.0f}"
            return Refusal("queue_ms", message, self._retry_ms((wait_ms - _OPEN_SHARE * most_ms) / 1000.0))
        total_ms = wait_ms + step_ms
        if deadline_ms and total_ms > deadline_ms:
            message = f"the answer would take about {total_ms:.0f} ms; the deadline is {deadline_ms}"
            return Refusal("deadline", message, self._retry_ms(total_ms / 1000.0))
        return None

    def _refused_s(self, num_tokens: int, most_ms: float) -> float:
        """Returns how long rounds that were refused take, in steps as large as the longest wait lets them be."""
        token_s, base_s = self._times.token_s, self._times.base_s
        step_tokens = (
            min(self._max_step_tokens, most_ms / 1000.0 / token_s) if token_s else self._max_step_tokens
        )
        return num_tokens * (token_s + base_s / step_tokens)

    def _wait_s(self, num_tokens: int) -> float:
        """Returns how long a round waits for `num_tokens` of others: all steps before the one it is part of."""
        num_steps = max(1, math.ceil(num_tokens / self._max_step_tokens))
        num_tokens += num_steps * self._prefill_chunk_tokens if self._prefills.total else 0
        return (num_steps - 1) * self._times.base_s + num_tokens * self._times.token_s

    def _drain_s(self, lane: _Lane) -> float:
        return lane.total * (self._times.token_s + self._times.base_s / self._max_step_tokens)

    def _retry_ms(self, wait_s: float) -> int:
        return min(max(MIN_RETRY_MS, math.ceil(wait_s * 1000.0)), self._max_retry_ms)
