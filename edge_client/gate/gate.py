"""Judges drafted tokens by thresholds and text rules.

stop    ends the draft where more than `max_hard_ratio` of its tokens are hard, and sends it. Exact: a hard
        position is left out before its token is sampled, and a hard token is sent.
commit  keeps a block without asking where no more than that share is hard. Approximate.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.types import Draft, Signals
from outrider.edge_client.drafting.base import ShouldStop, Stop
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
    whether the block escalates. A position that ended the draft before its token counts as judged and
    hard."""

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
        """Returns the rule that ends one draft after `text_ids`; None where whole blocks are judged."""
        if self.use is not GateUse.STOP:
            return None
        block = self._block(text_ids)
        num_hard = 0

        def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            nonlocal num_hard
            assert signals is not None, "a gate needs a draft that tells signals"
            is_position_hard = self._thresholds.is_position_hard(signals)
            if is_position_hard and self._is_too_much(num_hard + 1, num_drafted):
                return Stop.BEFORE
            is_hard = is_position_hard or self._thresholds.is_token_hard(signals)
            if block is not None:
                block.append(token_id)
                by_rule = self._hard_by_rule(block)
                is_hard = is_hard or num_drafted - 1 in by_rule
                if by_rule:
                    return Stop.AFTER
            num_hard += is_hard
            return Stop.AFTER if is_hard and self._is_too_much(num_hard, num_drafted) else Stop.NO

        return should_stop

    def judge(self, draft: Draft, text_ids: Sequence[int]) -> Judgement:
        """Returns the judgement of a draft made after `text_ids`."""
        is_hard = [self._thresholds.is_hard(signals) for signals in draft.signals]
        by_rule: set[int] = set()
        if (block := self._block(text_ids)) is not None:
            for token_id in draft.token_ids:
                block.append(token_id)
            by_rule = self._hard_by_rule(block)
            is_hard = [each or index in by_rule for index, each in enumerate(is_hard)]
        is_cut = draft.doubted is not None
        num_hard, num_judged = sum(is_hard) + is_cut, len(is_hard) + is_cut
        is_escalated = bool(by_rule) or self._is_too_much(num_hard, num_judged)
        return Judgement(tuple(is_hard), num_judged, num_hard, is_escalated)

    def _is_too_much(self, num_hard: int, num_judged: int) -> bool:
        return num_hard > self._max_hard_ratio * num_judged

    def _block(self, text_ids: Sequence[int]) -> BlockText | None:
        if not self._rules:
            return None
        assert self._new_decoder is not None
        return BlockText(text_ids, self._new_decoder)

    def _hard_by_rule(self, block: BlockText) -> set[int]:
        return {index for rule in self._rules for index in rule.hard_tokens(block)}
