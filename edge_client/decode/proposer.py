"""The draft side of a generation: what a round proposes, where it ends, and what the gate says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.common.types import Draft, Signals, TokenIds
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.decode.token_buffer import SessionText
from outrider.edge_client.drafting.base import ShouldStop, Stop
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.gate.gate import Gate, Judgement
from outrider.edge_client.gate.rules import CONTEXT_TOKENS


@dataclass(slots=True)
class Proposer:
    """Drafts behind `text`. Without a `drafter` every draft is empty; without a `gate` nothing is judged."""

    text: SessionText
    depth: DepthPolicy
    drafter: Drafter | None = None
    gate: Gate | None = None

    def propose(
        self,
        num_draft_tokens: int,
        assumed: TokenIds = (),
        is_spoilt: Callable[[], bool] | None = None,
        *,
        is_gated: bool = False,
    ) -> tuple[Draft, float]:
        """A draft behind the text and what is `assumed` to follow, and what it took, in ms.

        `is_spoilt` is asked after each token whether the assumption fell: the draft then ends, for nothing.
        `is_gated`: a stop-gate may end it, at its first token too. What is drafted to be kept is not gated.
        """
        if self.drafter is None or num_draft_tokens == 0:
            return Draft((), ()), 0.0
        rule = self.depth.stop_rule()
        if is_gated and self.gate is not None:
            rule = _both(self.gate.stop_rule(self._behind(assumed)), rule)
        if is_spoilt is not None:
            rule = _unless_spoilt(is_spoilt, rule)
        return self.drafter.propose(self.text.chain.token_ids, num_draft_tokens, rule, assumed)

    def judge(self, draft: Draft, assumed: TokenIds = ()) -> Judgement | None:
        """What the gate says of a draft made behind `assumed`; None without one."""
        return None if self.gate is None else self.gate.judge(draft, self._behind(assumed))

    def _behind(self, assumed: TokenIds) -> Sequence[int]:
        """As much of the text as a text rule looks at, and what is assumed to follow."""
        return (*self.text.chain.token_ids[-CONTEXT_TOKENS:], *assumed)


def _both(one: ShouldStop | None, other: ShouldStop | None) -> ShouldStop | None:
    """Whichever drops more, with both asked about every token."""
    if one is None or other is None:
        return one or other

    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        stops = one(token_id, signals, num_drafted), other(token_id, signals, num_drafted)
        return Stop.BEFORE if Stop.BEFORE in stops else Stop.AFTER if Stop.AFTER in stops else Stop.NO

    return should_stop


def _unless_spoilt(is_spoilt: Callable[[], bool], rule: ShouldStop | None) -> ShouldStop:
    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        if is_spoilt():
            return Stop.AFTER
        return Stop.NO if rule is None else rule(token_id, signals, num_drafted)

    return should_stop
