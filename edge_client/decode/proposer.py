"""The draft side of a generation: drafting a round, ending its draft early, and the gate's judgement of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.common.types import CorrectionKind, Draft, Signals, TokenIds, Verdict
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.decode.token_buffer import TokenBuffer
from outrider.edge_client.drafting.base import ShouldStop, Stop
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.gate.gate import Gate, Judgement
from outrider.edge_client.gate.text_rule import CONTEXT_TOKENS


@dataclass(slots=True)
class Proposer:
    """Drafts after `tokens`. Without a `drafter` every draft is empty; without a `gate` nothing is judged."""

    tokens: TokenBuffer
    depth: DepthPolicy
    drafter: Drafter | None = None
    gate: Gate | None = None
    values: NodeValues = field(default_factory=NodeValues)

    def __post_init__(self) -> None:
        if self.drafter is not None:
            self.drafter.use_values(self.values)

    def propose(
        self,
        num_draft_tokens: int,
        assumed: TokenIds = (),
        is_invalidated: Callable[[], bool] | None = None,
        *,
        is_gated: bool = False,
    ) -> tuple[Draft, float]:
        """Returns a draft after the sequence and the `assumed` tokens, and the time it took in ms.

        `is_invalidated` is called after each token and ends the draft where the assumption turned out wrong.
        `is_gated`: a stop-gate may end it, at its first token too. A draft that is to be kept is not gated.
        """
        if self.drafter is None or num_draft_tokens == 0:
            return Draft((), ()), 0.0
        rule = self.depth.stop_rule()
        if is_gated and self.gate is not None:
            rule = _both(self.gate.stop_rule(self._context(assumed)), rule)
        if is_invalidated is not None:
            rule = _unless_invalidated(is_invalidated, rule)
        return self.drafter.propose(self.tokens.chain.token_ids, num_draft_tokens, rule, assumed)

    def write_alone(self, num_draft_tokens: int) -> Draft:
        """Returns a draft after the sequence that is kept as it is, unverified."""
        if self.drafter is None or num_draft_tokens == 0:
            return Draft((), ())
        rule = self.depth.stop_rule()
        return self.drafter.write_alone(self.tokens.chain.token_ids, num_draft_tokens, rule)[0]

    def propose_tree(self, budget: TreeBudget, assumed: TokenIds = ()) -> tuple[Draft, float]:
        """Returns a tree after the sequence and the `assumed` tokens, whose paths a stop-gate may end, and the time
        it took in ms."""
        assert self.drafter is not None, "a mode with rounds has a draft"
        rule = None if self.gate is None else self.gate.node_rule(self._context(assumed))
        return self.drafter.propose_tree(self.tokens.chain.token_ids, budget, self.values, assumed, rule)

    def obeying(self, token_ids: TokenIds) -> TokenIds:
        """Returns the first of some tokens after the sequence: those that its grammar, if it has one, allows."""
        if self.drafter is None:
            return token_ids
        return token_ids[: self.drafter.num_obeying(self.tokens.chain.token_ids, token_ids)]

    def check_grammar(self) -> None:
        """Raises `GrammarLimitError` where the sequence's grammar, if it has one, takes too much after it."""
        if self.drafter is not None:
            self.drafter.check_grammar(self.tokens.chain.token_ids)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learns what nodes of trees are worth from a verdict."""
        if isinstance(draft, TreeDraft):
            is_over = verdict.correction_kind is CorrectionKind.NONE
            self.values.observe(draft, verdict.accepted_indices, None if is_over else verdict.correction)

    def judge(self, draft: Draft, assumed: TokenIds = ()) -> Judgement | None:
        """Returns the gate's judgement of a draft made after `assumed`; None without a gate."""
        return None if self.gate is None else self.gate.judge(draft, self._context(assumed))

    def _context(self, assumed: TokenIds) -> Sequence[int]:
        return (*self.tokens.chain.token_ids[-CONTEXT_TOKENS:], *assumed)


def _both(one: ShouldStop | None, other: ShouldStop | None) -> ShouldStop | None:
    """Returns a rule that asks both about every token and follows the one that drops more."""
    if one is None or other is None:
        return one or other

    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        stops = one(token_id, signals, num_drafted), other(token_id, signals, num_drafted)
        return Stop.BEFORE if Stop.BEFORE in stops else Stop.AFTER if Stop.AFTER in stops else Stop.NO

    return should_stop


def _unless_invalidated(is_invalidated: Callable[[], bool], rule: ShouldStop | None) -> ShouldStop:
    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        if is_invalidated():
            return Stop.AFTER
        return Stop.NO if rule is None else rule(token_id, signals, num_drafted)

    return should_stop
