"""Plans which tokens of which work go into the next packed forward, fair between tenants. Pure.

Two lanes share a step: rounds (verification rounds and decoding steps, which somebody waits for) and prefills
(openings, rebuilds, recomputations, which may be cut into chunks). Tenants are served by virtual time, as in
start-time fair queueing (Goyal et al. 1996): the one with the fewest tokens so far comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

ROUNDS_ABOUT_S = 1.0  # rounds are expected this long after the last answer: prefill chunks stay small


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


class _Lane:
    """Gives the tenants of one lane their turns. Virtual time is the tokens a tenant was served."""

    def __init__(self, max_lead_tokens: int) -> None:
        self._max_lead_tokens = max_lead_tokens
        self._served: dict[str, int] = {}
        self._floor = 0  # virtual time of the least served tenant that wants something; only rises

    def fill(self, shares: list[Share], items: list[_Item], left: dict[str, int], budget: int) -> None:
        """Adds shares for `items`, which are in order of their turn, and takes them off what is `left`."""
        if not items:
            return
        self._let_catch_up(left)
        if sum(item.num_pending for item in items) <= budget:
            for item in items:
                shares.append(Share(item.index, item.num_pending, is_final=True))
                self._charge(item.tenant, item.num_pending, left)
            return
        queues: dict[str, deque[_Item]] = {}
        for item in items:
            queues.setdefault(item.tenant, deque()).append(item)
        order = [(self._served[tenant], queue[0].index, tenant) for tenant, queue in queues.items()]
        heapify(order)
        while order and budget > 0:
            _, _, tenant = heappop(order)
            queue = queues[tenant]
            share = _share(queue.popleft(), budget, is_first=not shares)
            if share is None:  # what comes after may be smaller, but must not pass it for ever
                return
            shares.append(share)
            budget -= share.num_tokens
            self._charge(tenant, share.num_tokens, left)
            if queue:
                heappush(order, (self._served[tenant], queue[0].index, tenant))

    def _charge(self, tenant: str, num_tokens: int, left: dict[str, int]) -> None:
        self._served[tenant] += num_tokens
        left[tenant] -= num_tokens

    def _let_catch_up(self, tenants: Iterable[str]) -> None:
        """Bounds virtual times: no credit for a tenant that wanted nothing, no debt above the lead for one alone."""
        known = [self._served[tenant] for tenant in tenants if tenant in self._served]
        floor = self._floor = max(self._floor, min(known, default=self._floor))
        self._served = {tenant: served for tenant, served in self._served.items() if served > floor}
        for tenant in tenants:
            self._served[tenant] = min(self._served.get(tenant, floor), floor + self._max_lead_tokens)


class Scheduler:
    """Plans steps of at most `max_step_tokens`, of which `prefill_chunk_tokens` go to prefills.

    When no round came for a while a prefill may take the whole step. A tenant that was served alone waits for
    at most four steps' tokens of the others once they have work.
    """

    def __init__(self, max_step_tokens: int = 512, prefill_chunk_tokens: int = 32) -> None:
        assert max_step_tokens >= 2, "one token for each lane"
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk_tokens = min(prefill_chunk_tokens, max_step_tokens // 2)
        # Apart: a tenant's prompts must not cost its rounds their turn.
        self._rounds, self._prefills = _Lane(4 * max_step_tokens), _Lane(4 * max_step_tokens)
        self._quiet_at_s = float("-inf")

    def plan(self, works: Sequence[Schedulable], now_s: float) -> Plan:
        """Returns the next step. `works` come in order of their turn: one that was served goes to the end.

        At least one share comes back when there is work, whatever the budget; a round is never split below
        its logit rows. The first work of each lane and tenant is never passed by a later one.
        """
        rounds: list[_Item] = []
        prefills: list[_Item] = []
        for index, work in enumerate(works):
            item = _Item(index, work.tenant, work.num_pending, work.num_logit_rows)
            (prefills if work.is_prefill else rounds).append(item)
        round_tokens, prefill_tokens = _tokens_by_tenant(rounds), _tokens_by_tenant(prefills)
        plan = Plan([], round_tokens, prefill_tokens, dict(round_tokens), dict(prefill_tokens))
        is_quiet = now_s >= self._quiet_at_s and not rounds
        chunk = 0 if not prefills else self._max_step_tokens if is_quiet else self._prefill_chunk_tokens
        self._rounds.fill(plan.shares, rounds, plan.left_round_tokens, self._max_step_tokens - chunk)
        self._prefills.fill(plan.shares, prefills, plan.left_prefill_tokens, chunk)
        if any(share.is_final for share in plan.shares):
            self._quiet_at_s = now_s + ROUNDS_ABOUT_S
        return plan


def _share(item: _Item, budget: int, *, is_first: bool) -> Share | None:
    pending, rows = item.num_pending, item.num_logit_rows
    if pending <= budget or (is_first and pending == rows):
        return Share(item.index, pending, is_final=True)
    chunk = min(budget, pending - rows)
    return Share(item.index, chunk, is_final=False) if chunk > 0 else None


def _tokens_by_tenant(lane: list[_Item]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for item in lane:
        tokens[item.tenant] = tokens.get(item.tenant, 0) + item.num_pending
    return tokens
