"""Judges drafted tokens by thresholds and text rules.

stop    ends the draft where more than `max_hard_ratio` of its tokens are hard, and sends it. Exact: a hard
        position is left out before its token is sampled, and a hard token is sent. Of a tree it ends each path
        by itself.
commit  keeps a block without asking where no more than that share is hard. Approximate; chains alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.tree import ROOT, Tree
from outrider.common.types import Draft, Signals, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, Stop
from outrider.edge_client.gate.text_rule import BlockText, NewDecoder, TextRule
from outrider.edge_client.gate.thresholds import GateThresholds


class GateUse(enum.StrEnum):
    """Names what a gate is used for."""

    OFF = "off"
    STOP = "stop"  # ends drafts early; exact
    COMMIT = "commit"  # keeps blocks unverified; lossy


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Holds a gate's settings. A block escalates where more than `max_hard_ratio` of its tokens are hard."""

    use: GateUse
    thresholds: GateThresholds
    max_hard_ratio: float = 0.0
    rules: tuple[TextRule, ...] = ()
    draft_fingerprint: str = ""  # of the draft that the thresholds are for; empty: any


@dataclass(frozen=True, slots=True)
class Judgement:
    """Holds which tokens of a draft are hard, how many were judged and how many of those are hard, and
    whether the block escalates: of a tree its likeliest path. A position that ended that path before its token
    counts as judged and hard."""

    is_hard: tuple[bool, ...]
    num_judged: int
    num_hard: int
    is_escalated: bool

    @property
    def hard_ratio(self) -> float | None:
        """Returns the share of hard tokens; None where nothing was drafted."""
        return self.num_hard / self.num_judged if self.num_judged else None

    @property
    def hard_mask(self) -> bytes:
        """Returns one bit a token, the first one lowest; empty where there are none."""
        bits = sum(1 << index for index, is_hard in enumerate(self.is_hard) if is_hard)
        return bits.to_bytes((len(self.is_hard) + 7) // 8, "little")


class Gate:
    """Judges the drafts of one session. `new_decoder` is the tokenizer's; only text rules need it."""

    def __init__(self, settings: GateSettings, new_decoder: NewDecoder | None = None) -> None:
        assert settings.use is not GateUse.OFF, "a gate that is off is none"
        assert new_decoder is not None or not settings.rules, "text rules need a tokenizer"
        self.use = settings.use
        self._thresholds = settings.thresholds
        self._max_hard_ratio = settings.max_hard_ratio
        self._rules = settings.rules
        self._new_decoder = new_decoder

    def stop_rule(self, text_ids: Sequence[int]) -> ShouldStop | None:
        """Returns the rule that ends one chain after `text_ids`; None where whole blocks are judged."""
        rule = self.node_rule(text_ids)
        if rule is None:
            return None
        path: list[int] = []

        def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            assert signals is not None, "a gate needs a draft that tells signals"
            path.append(token_id)
            return rule(tuple(path), signals)

        return should_stop

    def node_rule(self, text_ids: Sequence[int]) -> NodeRule | None:
        """Returns the rule that ends the paths of one tree after `text_ids`; None where whole blocks are
        judged."""
        if self.use is not GateUse.STOP:
            return None
        block = self._block(text_ids)
        num_hard: dict[TokenIds, int] = {(): 0}  # on each path

        def rule(path: TokenIds, signals: Signals) -> Stop:
            nonlocal block
            is_hard = self._thresholds.is_position_hard(signals)
            if is_hard and self._is_too_much(num_hard[path[:-1]] + 1, len(path)):
                return Stop.BEFORE
            if block is not None:
                if tuple(block.token_ids) != path[:-1]:  # another path's
                    block = self._block(text_ids, path[:-1])
                assert block is not None
                block.append(path[-1])
                if self._hard_by_rule(block):
                    return Stop.AFTER
            is_hard = is_hard or self._thresholds.is_token_hard(signals)
            num_hard[path] = num_hard[path[:-1]] + is_hard
            return Stop.AFTER if is_hard and self._is_too_much(num_hard[path], len(path)) else Stop.NO

        return rule

    def judge(self, draft: Draft, text_ids: Sequence[int]) -> Judgement:
        """Returns the judgement of a draft made after `text_ids`."""
        tree = Tree(draft.parents or range(ROOT, len(draft.token_ids) - 1))
        by_rule = self._nodes_hard_by_rule(draft, tree, text_ids)
        is_hard = [
            node in by_rule or self._thresholds.is_hard(signals) for node, signals in enumerate(draft.signals)
        ]
        likeliest = tree.runs[0] if tree.parents else range(0)
        is_cut = draft.doubted is not None
        num_hard, num_judged = sum(is_hard[node] for node in likeliest) + is_cut, len(likeliest) + is_cut
        is_escalated = not by_rule.isdisjoint(likeliest) or self._is_too_much(num_hard, num_judged)
        return Judgement(tuple(is_hard), num_judged, num_hard, is_escalated)

    def _nodes_hard_by_rule(self, draft: Draft, tree: Tree, text_ids: Sequence[int]) -> set[int]:
        """Returns the nodes that a text rule finds, on any path."""
        found: set[int] = set()
        for run in tree.runs if self._rules else ():
            path = tree.path(run[-1])
            block = self._block(text_ids, [draft.token_ids[node] for node in path])
            assert block is not None
            found |= {path[index] for index in self._hard_by_rule(block)}
        return found

    def _is_too_much(self, num_hard: int, num_judged: int) -> bool:
        return num_hard > self._max_hard_ratio * num_judged

    def _block(self, text_ids: Sequence[int], drafted: Sequence[int] = ()) -> BlockText | None:
        if not self._rules:
            return None
        assert self._new_decoder is not None
        block = BlockText(text_ids, self._new_decoder)
        for token_id in drafted:
            block.append(token_id)
        return block

    def _hard_by_rule(self, block: BlockText) -> set[int]:
        return {index for rule in self._rules for index in rule.hard_tokens(block)}
