"""What a link and two models will give, by the cost model: every mode, the best draft length, break-evens.

Pure. What is known of each part (`Known`) carries where it comes from; all that a `Plan` adds is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.edge_client.controller.cost_model import (
    LinkCosts,
    ModelCosts,
    break_even_rtt_s,
    cloud_only_s,
    colocated_models,
    colocated_s,
    edge_only_s,
    expected_tokens,
    round_s,
)
from outrider.edge_client.controller.cost_model_pipelined import (
    fastest_pipelined,
    num_in_flight,
    pipelined_break_even_rtt_s,
    pipelined_rounds_per_token,
)
from outrider.edge_client.planning.samples import MEASURED, Known, Standing, acceptance_by_position, replayed

__all__ = ["MEASURED", "Known"]

GIVEN, ASSUMED = "given", "assumed"
SPECULATIVE, PIPELINED, CLOUD_ONLY, CO_LOCATED, EDGE_ONLY = (
    *("speculative", "pipelined", "cloud-only", "co-located", "edge-only"),
)
MAX_DRAFT_TOKENS = 64  # what a verifier takes in a round unless told otherwise


@dataclass(frozen=True, slots=True)
class PlanParts:
    """Seconds, bytes a second. `acceptance[i]`: of a draft's token i given those before; the last repeats.

    Where `texts` are known, each draft length has the acceptance that its rounds would have had in them.
    """

    draft_token: Known
    draft_fixed: Known  # more for a round that drafts
    target_token: Known
    verify_fixed: Known
    verify_token: Known
    colocated_draft_token: Known
    rtt: Known
    rate_up: Known
    rate_down: Known
    acceptance: tuple[Known, ...]
    texts: tuple[Standing, ...] = ()

    @property
    def models(self) -> ModelCosts:
        return ModelCosts(
            draft_token_s=self.draft_token.value,
            target_token_s=self.target_token.value,
            verify_fixed_s=self.verify_fixed.value,
            verify_token_s=self.verify_token.value,
            colocated_draft_token_s=self.colocated_draft_token.value,
            draft_fixed_s=self.draft_fixed.value,
        )

    @property
    def link(self) -> LinkCosts:
        return LinkCosts(self.rtt.value, self.rate_up.value, self.rate_down.value)

    def alphas(self, num_draft_tokens: int) -> list[float]:
        """By position, in rounds of this length."""
        known = self.acceptance
        if self.texts:
            known = acceptance_by_position(replayed(self.texts, num_draft_tokens))
        return [each.value for each in known]


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One mode at its best. `target_s`: seconds a token that it alone keeps the cloud's machine busy."""

    mode: str
    num_draft_tokens: int | None
    token_s: float
    target_s: float
    num_in_flight: int = 0  # pipelined: rounds under way at once

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s if self.token_s else math.inf

    def cost_per_million(self, price_per_hour: float) -> float:
        return self.target_s * 1e6 / 3600.0 * price_per_hour


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Synchronous rounds of one length. Below `break_even_rtt_s` they beat cloud-only; negative: never."""

    num_draft_tokens: int
    tokens_per_round: float
    round_s: float
    break_even_rtt_s: float
    alphas: tuple[float, ...]

    @property
    def token_s(self) -> float:
        return self.round_s / self.tokens_per_round


@dataclass(frozen=True, slots=True)
class Plan:
    parts: PlanParts
    modes: dict[str, ModePlan]
    lengths: tuple[LengthPlan, ...]  # 1 to the longest allowed

    @property
    def pays(self) -> bool:
        """Whether drafting at the edge, in either way, is faster than streaming cloud-only."""
        return self.best_edge.token_s < self.modes[CLOUD_ONLY].token_s

    @property
    def best_edge(self) -> ModePlan:
        return min(self.modes[SPECULATIVE], self.modes[PIPELINED], key=lambda each: each.token_s)

    @property
    def is_colocated_faster(self) -> bool:
        return self.modes[CO_LOCATED].token_s < self.best_edge.token_s

    def speedup(self, mode: ModePlan) -> float:
        """Over cloud-only."""
        return self.modes[CLOUD_ONLY].token_s / mode.token_s if mode.token_s else math.inf

    def break_even_rtt_s(self, mode: str, rival: str = CLOUD_ONLY) -> float:
        """The RTT below which `mode`, speculative or pipelined, beats `rival` at the length that is best for
        that; negative: at none. A rival's time does not depend on the RTT."""
        models, link, rival_s = self.parts.models, self.parts.link, self.modes[rival].token_s
        if mode == PIPELINED:
            alphas = self.lengths[-1].alphas
            rtts_s = (pipelined_break_even_rtt_s(alphas, n, models, link, rival_s) for n in self._lengths())
        else:
            rtts_s = (
                break_even_rtt_s(self.lengths[n - 1].alphas, n, models, link, rival_s)
                for n in self._lengths()
            )
        return max(rtts_s)

    def _lengths(self) -> range:
        return range(1, len(self.lengths) + 1)


def make_plan(parts: PlanParts, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> Plan:
    """`max_draft_tokens` >= 1. Raises ValueError for an acceptance outside [0, 1]."""
    models, link = parts.models, parts.link
    lengths = tuple(_length(n, parts) for n in range(1, max_draft_tokens + 1))
    modes = (
        _speculative(lengths, models),
        _pipelined(lengths, models, link),
        ModePlan(CLOUD_ONLY, None, cloud_only_s(models, link), models.target_token_s),
        _colocated(lengths, models, link),
        ModePlan(EDGE_ONLY, None, edge_only_s(models), 0.0),
    )
    return Plan(parts, {each.mode: each for each in modes}, lengths)


def _length(n: int, parts: PlanParts) -> LengthPlan:
    models, link, alphas = parts.models, parts.link, parts.alphas(n)
    break_even_s = break_even_rtt_s(alphas, n, models, link)
    return LengthPlan(n, expected_tokens(alphas, n), round_s(n, models, link), break_even_s, tuple(alphas))


def _speculative(lengths: tuple[LengthPlan, ...], models: ModelCosts) -> ModePlan:
    best = min(lengths, key=lambda each: each.token_s)
    target_s = models.verify_s(best.num_draft_tokens) / best.tokens_per_round
    return ModePlan(SPECULATIVE, best.num_draft_tokens, best.token_s, target_s)


def _pipelined(lengths: tuple[LengthPlan, ...], models: ModelCosts, link: LinkCosts) -> ModePlan:
    """Its rounds follow one another as one long draft, and that is the acceptance they have."""
    alphas = lengths[-1].alphas
    n, token_s = fastest_pipelined(alphas, models, link, len(lengths))
    target_s = models.verify_s(n) * pipelined_rounds_per_token(alphas, n)
    return ModePlan(PIPELINED, n, token_s, target_s, num_in_flight(n, models, link))


def _colocated(lengths: tuple[LengthPlan, ...], models: ModelCosts, link: LinkCosts) -> ModePlan:
    def token_s(each: LengthPlan) -> float:
        return colocated_s(each.alphas, each.num_draft_tokens, models, link)

    best = min(lengths, key=token_s)
    round_there_s = round_s(best.num_draft_tokens, colocated_models(models), LinkCosts(rtt_s=0.0))
    return ModePlan(CO_LOCATED, best.num_draft_tokens, token_s(best), round_there_s / best.tokens_per_round)
