"""Plans which tokens of which work go into the next packed forward, fair between tenants. Pure.

Two lanes share a step: rounds (verification rounds and decoding steps, which somebody waits for) and prefills
(openings, rebuilds, recomputations, which may be cut into chunks). Tenants are served by virtual time, as in
start-time fair queueing (Goyal et al. 1996): the one with the fewest tokens so far comes first. A token after a
long text counts for as many as its attention takes (`ForwardTime`). What a work took the host besides its forward
is charged as tokens too, after it was measured (VTC, Sheng et al. 2024, arXiv 2401.00588), and bounds how many
expensive works of a tenant share a step with others' works.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from outrider.cloud_verifier.engine.forward_time import ForwardTime
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.line import SessionKey

_HOST_MEMORY = 0.8  # weight that a tenant's mean host time keeps with every later work
HOST_SHARE = 0.25  # of the largest forward's time: what expensive works may add to a step of several tenants
CHUNK_SHARE = 0.25  # of a step, in time: what the smallest chunk of a prefill may take of it
OTHERS_ABOUT_S = 10.0  # a tenant's next works are expected this long after it wanted something
ROUNDS_ABOUT_S = 1.0  # rounds are expected this long after the last answer: prefill chunks stay small
ADMISSION_S = 0.002  # a step admits for so long; jobs that are left wait for the next one
# What a tenant may have had of it beyond the others: after so many steps it is next.
MAX_DEBT_S = 4 * ADMISSION_S


class Schedulable(Protocol):
    """Provides what the scheduler needs of work."""

    @property
    def tenant(self) -> str:
        """Returns whose it is."""

    @property
    def is_prefill(self) -> bool:
        """Returns whether it may be fed in chunks beside rounds."""

    @property
    def num_pending(self) -> int:
        """Returns how many tokens are to be fed."""

    @property
    def num_logit_rows(self) -> int:
        """Returns how many of the last tokens give a row of logits."""

    @property
    def num_positions(self) -> int:
        """Returns how many tokens have KV: what each token that is fed attends to, besides those fed."""


@dataclass(slots=True)  # not frozen: see RoundMetrics
class Share:
    """Gives how many tokens one work feeds in a step. `is_final`: its logits are read, it can be answered."""

    index: int
    num_tokens: int
    is_final: bool


@dataclass(slots=True)  # not frozen: see RoundMetrics
class Plan:
    """Holds one step, and all tokens that wait (the step's own included) by tenant."""

    shares: list[Share]
    round_tokens: dict[str, int]
    prefill_tokens: dict[str, int]
    left_round_tokens: dict[str, int]  # without the step's own
    left_prefill_tokens: dict[str, int]


@dataclass(slots=True)  # not frozen: see RoundMetrics
class _Item:
    index: int
    tenant: str
    num_pending: int
    num_logit_rows: int
    token_cost: float  # of each of its tokens: what it takes, by that of a token at the begin of a text

    @property
    def cost(self) -> float:
        """Returns what all its tokens take."""
        return self.num_pending * self.token_cost


class _Lane:
    """Gives the tenants of one lane their turns. Virtual time is what the tokens a tenant was served cost."""

    def __init__(self, max_lead_tokens: int) -> None:
        self._max_lead_tokens = max_lead_tokens
        self._served: dict[str, float] = {}
        self._host_s: dict[str, float] = {}  # mean of a work, of each tenant
        self._seen_s: dict[str, float] = {}  # when each tenant wanted something, within OTHERS_ABOUT_S
        self._floor = 0.0  # virtual time of the least served tenant that wants something; only rises

    @property
    def is_shared(self) -> bool:
        """Returns whether several tenants wanted something lately: the others' next works are expected."""
        return len(self._seen_s) > 1

    def see(self, tenants: Iterable[str], now_s: float) -> None:
        """Notes which tenants want something."""
        self._seen_s.update(dict.fromkeys(tenants, now_s))
        self._seen_s = {each: at_s for each, at_s in self._seen_s.items() if now_s - at_s <= OTHERS_ABOUT_S}
        self._host_s = {each: host_s for each, host_s in self._host_s.items() if each in self._seen_s}

    def charge(self, tenant: str, host_s: float, num_tokens: float) -> None:
        """Charges what a work of `tenant` took the host, `host_s`, as so many tokens."""
        self._served[tenant] = self._served.get(tenant, self._floor) + num_tokens
        mean_s = self._host_s.get(tenant, host_s)
        self._host_s[tenant] = _HOST_MEMORY * mean_s + (1 - _HOST_MEMORY) * host_s

    def fill(
        self,
        shares: list[Share],
        items: list[_Item],
        left: dict[str, int],
        budget: float,
        host_budget_s: float,
    ) -> None:
        """Adds shares for `items`, which are in order of their turn, and takes them off what is `left`. Their
        tokens cost `budget` at most.

        The works are expected to take the host `host_budget_s` at most beyond what those of the cheapest
        tenant of late do: a tenant alone fills its steps.
        """
        if not items:
            return
        self._let_catch_up(left)
        num_before = len(shares)
        known_s = {tenant: self._host_s.get(tenant, 0.0) for tenant in self._seen_s}
        extra_s = {tenant: host_s - min(known_s.values()) for tenant, host_s in known_s.items()}
        host_s = sum(extra_s[item.tenant] for item in items)
        if sum(item.cost for item in items) <= budget and host_s <= host_budget_s:
            for item in items:
                shares.append(Share(item.index, item.num_pending, is_final=True))
                self._charge(item, item.num_pending, left)
            return
        queues: dict[str, deque[_Item]] = {}
        for item in items:
            queues.setdefault(item.tenant, deque()).append(item)
        order = [(self._served[tenant], queue[0].index, tenant) for tenant, queue in queues.items()]
        heapify(order)
        while order and budget > 0:
            _, _, tenant = heappop(order)
            queue = queues[tenant]
            host_budget_s -= extra_s[tenant]
            if host_budget_s < 0 and len(shares) > num_before:
                return
            item = queue.popleft()
            share = _share(item, budget, is_first=not shares)
            if share is None:  # what comes after may be smaller, but must not pass it for ever
                return
            shares.append(share)
            budget -= share.num_tokens * item.token_cost
            self._charge(item, share.num_tokens, left)
            if queue:
                heappush(order, (self._served[tenant], queue[0].index, tenant))

    def _charge(self, item: _Item, num_tokens: int, left: dict[str, int]) -> None:
        self._served[item.tenant] += num_tokens * item.token_cost
        left[item.tenant] -= num_tokens

    def _let_catch_up(self, tenants: Iterable[str]) -> None:
        """Bounds virtual times: no credit for a tenant that wanted nothing, no debt above the lead for one alone."""
        known = [self._served[tenant] for tenant in tenants if tenant in self._served]
        floor = self._floor = max(self._floor, min(known, default=self._floor))
        self._served = {tenant: served for tenant, served in self._served.items() if served > floor}
        for tenant in tenants:
            self._served[tenant] = min(self._served.get(tenant, floor), floor + self._max_lead_tokens)


class Scheduler:
    """Plans steps of at most `max_step_tokens`, of which `prefill_chunk_tokens` go to prefills.

    Both are of tokens at the begin of a text: steps after long texts have fewer and take no longer. When no round
    came for a while a prefill may take the whole step. A tenant that was served alone waits for at most four steps'
    tokens of the others once they have work.
    """

    def __init__(self, max_step_tokens: int = 512, prefill_chunk_tokens: int = 32) -> None:
        assert max_step_tokens >= 2, "one token for each lane"
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk_tokens = min(prefill_chunk_tokens, max_step_tokens // 2)
        # Apart: a tenant's prompts must not cost its rounds their turn.
        self._rounds, self._prefills = _Lane(4 * max_step_tokens), _Lane(4 * max_step_tokens)
        self._quiet_at_s = float("-inf")
        self._forwards = ForwardTime()
        # Of the last rounds: what their tokens cost by tenant, and those of one on average.
        self._lately: tuple[dict[str, float], float] = ({}, 0.0)

    def observe(self, num_tokens: int, num_attended: int, forward_s: float) -> None:
        """Adds the time of a forward, whose tokens attended to `num_attended` others, summed over them."""
        self._forwards.observe(num_tokens, num_attended, forward_s)

    def forward_s(self, num_tokens: int, num_attended: int) -> float:
        """Returns what such a forward is expected to take; 0 where none was observed."""
        return self._forwards.expected_s(num_tokens, num_attended)

    def charge(self, work: Schedulable, host_s: float) -> None:
        """Charges the tenant of `work` for what the step took the host for this work alone."""
        full_s = self._full_step_s
        num_tokens = self._max_step_tokens * host_s / full_s if full_s else 0.0
        (self._prefills if work.is_prefill else self._rounds).charge(work.tenant, host_s, num_tokens)

    @property
    def host_budget_s(self) -> float:
        """Returns how long expensive works may keep the host in a step of several tenants; infinite for one."""
        return self._expensive_s if self._rounds.is_shared else math.inf

    @property
    def _expensive_s(self) -> float:
        return HOST_SHARE * self._full_step_s or math.inf

    @property
    def _full_step_s(self) -> float:
        """Returns how long a forward of the largest step takes; 0 where none was measured."""
        return self._forwards.seconds(self._max_step_tokens)

    def plan(self, works: Sequence[Schedulable], now_s: float) -> Plan:
        """Returns the next step. `works` come in order of their turn: one that was served goes to the end.

        At least one share comes back when there is work, whatever the budget; a round is never split below
        its logit rows. The first work of each lane and tenant is never passed by a later one.
        """
        rounds: list[_Item] = []
        prefills: list[_Item] = []
        for index, work in enumerate(works):
            # Of as many of its tokens as one step may have.
            num_attended = work.num_positions + min(work.num_pending, self._max_step_tokens) / 2
            token_cost = self._forwards.token_cost(num_attended)
            item = _Item(index, work.tenant, work.num_pending, work.num_logit_rows, token_cost)
            (prefills if work.is_prefill else rounds).append(item)
        round_tokens, prefill_tokens = _tokens_by_tenant(rounds), _tokens_by_tenant(prefills)
        plan = Plan([], round_tokens, prefill_tokens, dict(round_tokens), dict(prefill_tokens))
        is_quiet = now_s >= self._quiet_at_s and not rounds
        if rounds:
            costs: dict[str, float] = {}
            for item in rounds:
                costs[item.tenant] = costs.get(item.tenant, 0.0) + item.cost
            self._lately = costs, sum(costs.values()) / len(rounds)
        chunk = 0 if not prefills else self._max_step_tokens if is_quiet else self._chunk(prefills)
        self._rounds.see(round_tokens, now_s)
        self._prefills.see(prefill_tokens, now_s)
        host_s = self._expensive_s
        budget = self._max_step_tokens - chunk
        self._rounds.fill(plan.shares, rounds, plan.left_round_tokens, budget, host_s)
        self._prefills.fill(plan.shares, prefills, plan.left_prefill_tokens, chunk, host_s)
        if any(share.is_final for share in plan.shares):
            self._quiet_at_s = now_s + ROUNDS_ABOUT_S
        return plan

    def _chunk(self, prefills: list[_Item]) -> float:
        """Returns what tokens of prefills may cost beside rounds, which keep half of the step.

        Where many prefills wait, each gets as many as a round did on average lately, so that a crowd of
        openings is not starved; a tenant's get no more than tenants' rounds did where others have rounds.
        """
        round_costs, mean_cost = self._lately
        a_tenants = sum(round_costs.values()) / max(1, len(round_costs))
        wanted = 0.0
        for tenant, num_prefills in Counter(item.tenant for item in prefills).items():
            is_beside_others = bool(round_costs.keys() - {tenant})
            equal = num_prefills * mean_cost
            wanted += min(equal, a_tenants) if is_beside_others else equal
        least = self._prefill_chunk_tokens * min(item.token_cost for item in prefills)
        least = max(self._prefill_chunk_tokens, min(least, CHUNK_SHARE * self._max_step_tokens))
        return max(least, min(wanted, self._max_step_tokens / 2))


def _share(item: _Item, budget: float, *, is_first: bool) -> Share | None:
    pending, rows = item.num_pending, item.num_logit_rows
    if item.cost <= budget or (is_first and pending == rows):
        return Share(item.index, pending, is_final=True)
    chunk = min(max(int(budget / item.token_cost), int(is_first)), pending - rows)
    return Share(item.index, chunk, is_final=False) if chunk > 0 else None


def _tokens_by_tenant(lane: list[_Item]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for item in lane:
        tokens[item.tenant] = tokens.get(item.tenant, 0) + item.num_pending
    return tokens


class FairQueue:
    """Hands out jobs by tenant: first the tenant whose jobs took the least time lately, its oldest job first.

    A tenant that comes begins with the least of the others, and none is charged for more than `MAX_DEBT_S` beyond
    that: what one job took, or the machine while it was admitted, costs its tenant a few turns.
    Jobs are put from one thread and taken on another.
    """

    def __init__(self) -> None:
        self._arrived: deque[Job] = deque()
        self._waiting: dict[str, deque[Job]] = {}
        self._num_of: dict[SessionKey, int] = {}  # jobs in `_waiting`, by session
        self._spent_s: dict[str, float] = {}
        self._floor_s = 0.0  # spent by the tenant whose turn was last; only rises
        # Each is changed by one thread: jobs and tokens.
        self._num_put, self._num_taken = [0, 0], [0, 0]

    def __len__(self) -> int:
        return self._num_put[0] - self._num_taken[0]

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the jobs bring."""
        return self._num_put[1] - self._num_taken[1]

    def put(self, job: Job) -> None:
        """Adds a job."""
        self._num_put = [self._num_put[0] + 1, self._num_put[1] + job.num_tokens]
        self._arrived.append(job)

    def has_job_of(self, key: SessionKey) -> bool:
        """Returns whether there is a job of the session. For the thread that takes."""
        if self._arrived:
            self._sort_arrived()
        return key in self._num_of

    def take(self) -> Job | None:
        """Returns the next job, None where there is none."""
        if self._arrived:
            self._sort_arrived()
        if not self._waiting:
            self._spent_s.clear()
            return None
        tenant = min(self._waiting, key=self._spent_s.__getitem__)
        self._floor_s = self._spent_s[tenant]
        jobs = self._waiting[tenant]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[tenant]
        key = job.tenant, job.session_id
        if num_left := self._num_of.pop(key) - 1:
            self._num_of[key] = num_left
        self._num_taken = [self._num_taken[0] + 1, self._num_taken[1] + job.num_tokens]
        return job

    def charge(self, tenant: str, seconds: float) -> None:
        """Charges what a job of `tenant` took."""
        self._spent_s[tenant] = min(
            self._spent_s.get(tenant, self._floor_s) + seconds, self._floor_s + MAX_DEBT_S
        )

    def _sort_arrived(self) -> None:
        """Sorts what has arrived by tenant."""
        floor_s = self._floor_s
        self._spent_s = {tenant: spent_s for tenant, spent_s in self._spent_s.items() if spent_s > floor_s}
        while self._arrived:
            job = self._arrived.popleft()
            self._waiting.setdefault(job.tenant, deque()).append(job)
            key = job.tenant, job.session_id
            self._num_of[key] = self._num_of.get(key, 0) + 1
        for tenant in self._waiting:
            self._spent_s.setdefault(tenant, floor_s)
