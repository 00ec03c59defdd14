"""Predicts every mode, the best draft length and break-evens for a link and two models, by the cost model.

Pure. Each part (`Known`) carries where it comes from; everything that a `Plan` adds is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.common.methods import drafts_trees
from outrider.common.types import Method
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
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.roofline import Roofline
from outrider.edge_client.planning.samples import (
    MEASURED,
    AcceptanceSequence,
    Known,
    SourceRounds,
    acceptance_by_position,
    replay_rounds,
)
from outrider.edge_client.planning.trees import TREE_SIZES, TreePlan, tree_plan

__all__ = ["MEASURED", "Known"]

GIVEN, COMPUTED, ASSUMED = "given", "computed", "assumed"
TREE = "tree"  # among modes: speculative, each round a tree
MOST_DRAFT_TOKENS = 1024  # that can be asked for, of an edge or of a plan


@dataclass(frozen=True, slots=True)
class PlanParts:
    """Holds what a plan is made from, in seconds and bytes a second.

    `acceptance[i]` is that of a draft's token i given those before it; the last repeats. Where `sequences`
    are known, each draft length has the acceptance that its rounds would have had in them. `rooflines` are
    those that computed times come from, by "draft" and "target". `sources` are measured draft sources at the
    verifier; `lacks_draft`: it has them and no draft model, so that co-located drafting by one is no choice. `method`
    judges drafts; by some no tree is drafted.
    """

    draft_token: Known
    draft_fixed: Known  # more for a round that drafts
    target_token: Known
    verify_fixed: Known
    verify_token: Known
    colocated_draft_token: Known
    tree_base: Known  # drafting a tree, whatever its nodes
    tree_node: Known  # and each of them
    rtt: Known
    rate_up: Known
    rate_down: Known
    acceptance: tuple[Known, ...]
    sequences: tuple[AcceptanceSequence, ...] = ()
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)
    sources: tuple[SourceRounds, ...] = ()
    lacks_draft: bool = False
    method: Method = Method.COUPLED

    @property
    def models(self) -> ModelCosts:
        """Returns the compute times in the terms of the cost model."""
        target = self.rooflines.get("target")
        return ModelCosts(
            draft_token_s=self.draft_token.value,
            target_token_s=self.target_token.value,
            verify_fixed_s=self.verify_fixed.value,
            verify_token_s=self.verify_token.value,
            colocated_draft_token_s=self.colocated_draft_token.value,
            draft_fixed_s=self.draft_fixed.value,
            verify_row_s=target.row_s if target and self.verify_fixed.source == COMPUTED else 0.0,
        )

    @property
    def link(self) -> LinkCosts:
        """Returns the link in the terms of the cost model."""
        return LinkCosts(self.rtt.value, self.rate_up.value, self.rate_down.value)

    def alphas(self, num_draft_tokens: int) -> list[float]:
        """Returns the acceptance by position in rounds of this length."""
        known = self.acceptance
        if self.sequences:
            known = acceptance_by_position(replay_rounds(self.sequences, num_draft_tokens))
        return [each.value for each in known]


@dataclass(frozen=True, slots=True)
class ModePlan:
    """Holds one mode at its best draft length, or `tree` at its best number of nodes, or a measured draft
    source. `target_s` is the target's own time for a token."""

    mode: str
    num_draft_tokens: int | None
    token_s: float
    target_s: float
    num_in_flight: int = 0  # pipelined: rounds in flight at once
    draft_source: str = ""  # at the verifier, measured
    tokens_per_round: float = 0.0  # of such a source

    @property
    def tokens_per_s(self) -> float:
        """Returns committed tokens a second."""
        return 1.0 / self.token_s if self.token_s else math.inf

    def cost_per_million(self, price_per_hour: float) -> float:
        """Returns the price of the target's machine for a million tokens."""
        return self.target_s * 1e6 / 3600.0 * price_per_hour


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Holds rounds of one length. They beat cloud-only below `break_even_rtt_s`; negative: never."""

    num_draft_tokens: int
    tokens_per_round: float
    round_s: float
    break_even_rtt_s: float
    alphas: tuple[float, ...]

    @property
    def token_s(self) -> float:
        """Returns seconds a committed token."""
        return self.round_s / self.tokens_per_round


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the predictions made from `parts`."""

    parts: PlanParts
    modes: dict[str, ModePlan]
    lengths: tuple[LengthPlan, ...]  # 1 to the longest allowed
    trees: tuple[TreePlan, ...]  # none where the longest allowed is less than the smallest

    @property
    def pays(self) -> bool:
        """Returns whether drafting at the edge, pipelined or not, is faster than cloud-only."""
        return self.best_edge.token_s < self.modes[ExecutionMode.CLOUD_ONLY].token_s

    @property
    def best_edge(self) -> ModePlan:
        """Returns the faster of speculative and pipelined; a tree where it is faster than both by the margin that
        `--tree auto` wants too."""
        chain = min(
            self.modes[ExecutionMode.SPECULATIVE],
            self.modes[ExecutionMode.PIPELINED],
            key=lambda each: each.token_s,
        )
        tree = self.modes.get(TREE)
        is_better = tree is not None and tree.token_s * (1 + SETTINGS.min_tree_gain_share) < chain.token_s
        return tree if tree is not None and is_better else chain

    @property
    def is_colocated_faster(self) -> bool:
        """Returns whether drafting beside the target is faster than drafting at the edge."""
        return self.modes[ExecutionMode.CO_LOCATED].token_s < self.best_edge.token_s

    @property
    def fastest(self) -> ModePlan:
        """Returns the fastest of all that write the target's text and that the verifier has the models for."""
        excluded = {ExecutionMode.EDGE_ONLY, *([ExecutionMode.CO_LOCATED] if self.parts.lacks_draft else [])}
        return min((m for m in self.modes.values() if m.mode not in excluded), key=lambda m: m.token_s)

    def speedup(self, mode: ModePlan) -> float:
        """Returns how many times faster than cloud-only the mode is."""
        return self.modes[ExecutionMode.CLOUD_ONLY].token_s / mode.token_s if mode.token_s else math.inf

    def break_even_rtt_s(self, mode: str, rival: ExecutionMode = ExecutionMode.CLOUD_ONLY) -> float:
        """Returns the RTT below which `mode` (speculative, pipelined or `TREE`) beats `rival` at its best length;
        negative: at none. A rival's time does not depend on the RTT."""
        models, link, rival_s = self.parts.models, self.parts.link, self.modes[rival].token_s
        rtts_s: Iterable[float]
        if mode == TREE:
            rtts_s = (each.tokens_per_round * rival_s - (each.round_s - link.rtt_s) for each in self.trees)
        elif mode == ExecutionMode.PIPELINED:
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


def complete_parts(
    *,
    draft_token: Known,
    target_token: Known,
    rtt: Known,
    acceptance: tuple[Known, ...],
    **others: Any,
) -> PlanParts:
    """Returns parts of which `others` may lack some or be None: what is assumed then has the source `ASSUMED`."""
    tree_base_s = SETTINGS.tree_base_tokens * draft_token.value
    tree_node_s = SETTINGS.tree_node_share * draft_token.value
    defaults = {
        "draft_fixed": Known(0.0, ASSUMED),
        "verify_fixed": Known(target_token.value, ASSUMED),
        "verify_token": Known(0.0, ASSUMED),
        "colocated_draft_token": Known(draft_token.value, ASSUMED),
        "tree_base": Known(tree_base_s, ASSUMED),
        "tree_node": Known(tree_node_s, ASSUMED),
        "rate_up": Known(math.inf, ASSUMED),
        "rate_down": Known(math.inf, ASSUMED),
    }
    given = {name: value for name, value in others.items() if value is not None}
    return PlanParts(
        draft_token=draft_token,
        target_token=target_token,
        rtt=rtt,
        acceptance=acceptance,
        **(defaults | given),
    )


def make_plan(parts: PlanParts, max_draft_tokens: int = MAX_DEPTH) -> Plan:
    """Returns the plan for drafts of 1 to `max_draft_tokens`; raises ValueError for an impossible
    acceptance."""
    models, link = parts.models, parts.link
    lengths = tuple(_length(n, parts) for n in range(1, max_draft_tokens + 1))
    sizes = [n for n in TREE_SIZES if n <= max_draft_tokens] if drafts_trees(parts.method) else []
    trees = tuple(_tree(n, parts, lengths[-1].alphas) for n in sizes)
    modes = (
        _speculative(lengths, models),
        *_best_tree(trees),
        _pipelined(lengths, models, link),
        ModePlan(ExecutionMode.CLOUD_ONLY, None, cloud_only_s(models, link), models.target_token_s),
        _colocated(lengths, models, link),
        *(_by_source(each, link) for each in parts.sources),
        ModePlan(ExecutionMode.EDGE_ONLY, None, edge_only_s(models), 0.0),
    )
    return Plan(parts, {each.mode: each for each in modes}, lengths, trees)


def _length(n: int, parts: PlanParts) -> LengthPlan:
    models, link, alphas = parts.models, parts.link, parts.alphas(n)
    break_even_s = break_even_rtt_s(alphas, n, models, link)
    return LengthPlan(n, expected_tokens(alphas, n), round_s(n, models, link), break_even_s, tuple(alphas))


def _speculative(lengths: tuple[LengthPlan, ...], models: ModelCosts) -> ModePlan:
    best = min(lengths, key=lambda each: each.token_s)
    target_s = models.verify_s(best.num_draft_tokens) / best.tokens_per_round
    return ModePlan(ExecutionMode.SPECULATIVE, best.num_draft_tokens, best.token_s, target_s)


def _tree(num_nodes: int, parts: PlanParts, alphas: Sequence[float]) -> TreePlan:
    """Its paths are long drafts, so they have a long draft's acceptance."""
    draft_line = parts.tree_base.value, parts.tree_node.value
    return tree_plan(num_nodes, alphas, parts.models, parts.link, draft_line)


def _best_tree(trees: Sequence[TreePlan]) -> Iterator[ModePlan]:
    if trees:
        best = min(trees, key=lambda each: each.token_s)
        yield ModePlan(TREE, best.num_nodes, best.token_s, best.verify_s / best.tokens_per_round)


def _pipelined(lengths: tuple[LengthPlan, ...], models: ModelCosts, link: LinkCosts) -> ModePlan:
    """Its rounds continue one long draft, so they have a long draft's acceptance."""
    alphas = lengths[-1].alphas
    n, token_s = fastest_pipelined(alphas, models, link, len(lengths))
    target_s = models.verify_s(n) * pipelined_rounds_per_token(alphas, n)
    return ModePlan(ExecutionMode.PIPELINED, n, token_s, target_s, num_in_flight(n, models, link))


def _colocated(lengths: tuple[LengthPlan, ...], models: ModelCosts, link: LinkCosts) -> ModePlan:
    def token_s(each: LengthPlan) -> float:
        return colocated_s(each.alphas, each.num_draft_tokens, models, link)

    best = min(lengths, key=token_s)
    round_there_s = round_s(best.num_draft_tokens, colocated_models(models), LinkCosts(rtt_s=0.0))
    return ModePlan(
        ExecutionMode.CO_LOCATED, best.num_draft_tokens, token_s(best), round_there_s / best.tokens_per_round
    )


def _by_source(source: SourceRounds, link: LinkCosts) -> ModePlan:
    """As for any stream, the link may be slower than the verifier, and its RTT is hidden."""
    round_there_s, tokens = source.round.value, source.tokens_per_round
    round_here_s = max(round_there_s, link.stream_token_bytes_down / link.rate_down)
    return ModePlan(
        f"{ExecutionMode.CO_LOCATED}, {source.name}",
        None,
        round_here_s / tokens,
        round_there_s / tokens,
        draft_source=source.name,
        tokens_per_round=tokens,
    )
