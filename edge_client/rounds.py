"""The rounds under way, oldest first, and the text they assume: that every draft in them stands. Pure.

    text      [ … agreed … ][ own, not acknowledged ]
    rounds                                           [ draft 1 ][ draft 2 ][ draft 3 ]
                                                                           ^ what the next round builds on

With `coupled` each verdict brings a bonus, which is the token that the next round's first one is checked
against: the text then reaches one token into the oldest round's draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.alignment import extend_hash
from common.types import CorrectionKind, Draft, TokenIds, Verdict, VerifyRequest
from edge_client.exchange import FinalReply
from edge_client.gate.gate import Judgement
from edge_client.text import SessionText


@dataclass(slots=True, eq=False)
class Round:
    """A round that was sent. `window`: how many might be under way then; `is_ahead`: some were; `judgement`:
    the gate's, where there is one. Of its draft the first `num_kept` tokens are text already, kept unverified
    (`edge_client.reverify`)."""

    request: VerifyRequest
    draft: Draft
    draft_ms: float
    window: int = 1
    is_ahead: bool = False
    judgement: Judgement | None = None
    num_kept: int = 0

    @property
    def start(self) -> int:
        """The index of its first draft token in the text."""
        return self.request.base_position + len(self.request.committed_tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.draft.token_ids)

    @property
    def end_hash(self) -> int:
        """Of the text with all of its draft."""
        return extend_hash(
            self.request.base_hash, (*self.request.committed_tokens, *self.request.draft_tokens)
        )

    def stands_on(self, text: SessionText) -> bool:
        """Whether the text, as it is now, is what the round assumed, and its draft goes on from there."""
        request, num_known = self.request, text.position - self.start
        if not 0 <= num_known <= len(request.draft_tokens):
            return False
        known = tuple(text.chain.token_ids[self.start :])
        return text.chain.agrees(request.base_position, request.base_hash) and (
            known == request.draft_tokens[:num_known]
        )


@dataclass(slots=True)
class RoundsInFlight:
    """Several rounds only where each but the last is `pipelined`."""

    _rounds: deque[Round] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds)

    @property
    def last(self) -> Round:
        return self._rounds[-1]

    def assumed(self, text: SessionText) -> TokenIds:
        """What is assumed to follow the text."""
        if not self._rounds:
            return ()
        drafted = [token_id for each in self._rounds for token_id in each.request.draft_tokens]
        return tuple(drafted[text.position - self._rounds[0].start :])

    def append(self, each: Round) -> None:
        self._rounds.append(each)

    def pop(self) -> Round:
        """The oldest one, which was answered."""
        return self._rounds.popleft()

    def clear(self) -> list[Round]:
        """All of them, which nobody waits for any more."""
        cleared = list(self._rounds)
        self._rounds.clear()
        return cleared

    def are_spoilt(self, replies: Sequence[FinalReply | None], next_token: int | None = None) -> bool:
        """Whether what arrived so far says that not every draft stands; `next_token` is drafted behind them,
        if it is known already."""
        following = [each.request.draft_tokens[0] for each in list(self._rounds)[1:]]
        for each, reply, token_id in zip(self._rounds, replies, [*following, next_token], strict=True):
            if reply is None:
                return False
            if not isinstance(reply, Verdict) or reply.accepted_len < len(each.request.draft_tokens):
                return True
            has_bonus = reply.correction_kind is not CorrectionKind.NONE
            if has_bonus and token_id is not None and reply.correction != token_id:
                return True
        return False
