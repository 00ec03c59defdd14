"""The rounds under way, oldest first, and the texts they assume. Pure.

    text      [ … agreed … ][ own, not acknowledged ]
    rounds                                           [ draft 1 ][ draft 2 ][ draft 3 ]
                                                          │                ^ what the next round builds on
                                                          └ x [ draft 4 ]    or another one does, on a guess

Each builds on another's draft: on all of it, or on its first tokens and a guess at the correction behind
them. The oldest is the root, whose verdict leaves one of those that build on it, and what builds on that.

With `coupled` each verdict brings a bonus, which is the token that the next round's first one is checked
against: the text then reaches one token into the oldest round's draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.common.alignment import extend_hash
from outrider.common.types import CorrectionKind, Draft, TokenIds, Verdict, VerifyRequest
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.token_buffer import SessionText
from outrider.edge_client.gate.gate import Judgement
from outrider.edge_client.transport.in_flight import FinalReply


@dataclass(slots=True, eq=False)
class Round:
    """A round that was sent. `window`: how many might be under way then; `judgement`: the gate's, where there
    is one; `behind`: what it builds on, while that is not judged."""

    request: VerifyRequest
    draft: Draft
    draft_ms: float
    window: int = 1
    judgement: Judgement | None = None
    behind: Branch[Round] | None = None
    is_ahead: bool = field(init=False)  # others were under way when it was sent
    chance: float = field(init=False)  # to be judged, as far as is known now
    is_guess_hit: bool = False

    def __post_init__(self) -> None:
        self.is_ahead = self.behind is not None
        self.chance = 1.0 if self.behind is None else self.behind.chance

    @property
    def num_kept(self) -> int:
        """How many of the tokens that it has judged are text already, kept unverified and sent before its
        draft (`outrider.edge_client.decode.reverify`)."""
        return len(self.request.draft_tokens) - len(self.draft.token_ids)

    @property
    def start(self) -> int:
        """The index of its first draft token in the text."""
        return self.request.base_position + len(self.request.committed_tokens)

    @property
    def draft_token_s(self) -> float:
        return self.draft_ms / 1e3 / (len(self.draft.token_ids) or 1)

    @property
    def is_guess(self) -> bool:
        """Whether it builds on a guess at a correction, or on a round that does."""
        return self.behind is not None and (self.behind.guess is not None or self.behind.host.is_guess)

    def hash_after(self, token_ids: TokenIds) -> int:
        """Of the text with `token_ids` in the place of its draft."""
        return extend_hash(self.request.base_hash, (*self.request.committed_tokens, *token_ids))

    def stands_on(self, text: SessionText) -> bool:
        """Whether the text, as it is now, is what the round assumed, and its draft goes on from there."""
        request, num_known = self.request, text.position - self.start
        if not 0 <= num_known <= len(request.draft_tokens):
            return False
        known = tuple(text.chain.token_ids[self.start :])
        return text.chain.agrees(request.base_position, request.base_hash) and (
            known == request.draft_tokens[:num_known]
        )


def tokens_of_branch(branch: Branch[Round]) -> TokenIds:
    """What it assumes from its host's draft on."""
    guess = () if branch.guess is None else (branch.guess,)
    return (*branch.host.request.draft_tokens[: branch.place], *guess)


def whole_of(host: Round) -> Branch[Round]:
    """The branch behind all of a round's draft."""
    return Branch(host, len(host.request.draft_tokens), None, host.chance)


@dataclass(slots=True)
class RoundsInFlight:
    """Several rounds only where each that another builds on is `pipelined`."""

    _rounds: deque[Round] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds)

    @property
    def last(self) -> Round:
        return self._rounds[-1]

    def assumed(self, text: SessionText, branch: Branch[Round] | None) -> TokenIds:
        """What is assumed, on `branch`, to follow the text."""
        if branch is None:
            return ()
        path = _path(branch)
        token_ids = [token_id for each in path for token_id in tokens_of_branch(each)]
        return tuple(token_ids[text.position - path[0].host.start :])

    def append(self, each: Round) -> None:
        self._rounds.append(each)

    def pop(self) -> Round:
        """The oldest one, which was answered. `settle` says what is left of the others."""
        return self._rounds.popleft()

    def clear(self) -> list[Round]:
        """All of them, which nobody waits for any more."""
        cleared = list(self._rounds)
        self._rounds.clear()
        return cleared

    def settle(self, answered: Round, text: SessionText) -> tuple[Round | None, list[bool]]:
        """Once the text has what the verdict of `answered` brought: the round that the text leads to, and of
        each under way whether it is that or builds on it. Those that do not are dropped by `keep`."""
        heirs = (each for each in self._rounds if each.behind is not None and each.behind.host is answered)
        heir = next((each for each in heirs if each.stands_on(text)), None)
        kept = {id(heir)}
        for each in self._rounds:
            if each.behind is not None and id(each.behind.host) in kept:
                kept.add(id(each))
        return heir, [id(each) in kept for each in self._rounds]

    def keep(self, are_kept: Sequence[bool]) -> list[Round]:
        """The others, which are under way no more."""
        pairs = list(zip(self._rounds, are_kept, strict=True))
        self._rounds = deque(each for each, is_kept in pairs if is_kept)
        return [each for each, is_kept in pairs if not is_kept]

    def are_spoilt(
        self, replies: Sequence[FinalReply | None], branch: Branch[Round], next_token: int | None = None
    ) -> bool:
        """Whether what arrived so far says that the text of `branch` is not to be; `next_token` is drafted
        behind it, if it is known already."""
        if replies[0] is None:
            return False
        reply_to = {id(each): reply for each, reply in zip(self._rounds, replies, strict=True)}
        path = _path(branch)
        following = [_first_token(each) for each in path[1:]]
        for each, token_id in zip(path, [*following, next_token], strict=True):
            reply = reply_to[id(each.host)]
            if reply is None:
                return False
            if not isinstance(reply, Verdict) or not _leads_to(reply, each, token_id):
                return True
        return False


def _path(branch: Branch[Round]) -> list[Branch[Round]]:
    """From the oldest round on."""
    path = [branch]
    while path[-1].host.behind is not None:
        path.append(path[-1].host.behind)
    return path[::-1]


def _first_token(branch: Branch[Round]) -> int | None:
    return branch.host.request.draft_tokens[0] if branch.host.request.draft_tokens else None


def _leads_to(verdict: Verdict, branch: Branch[Round], next_token: int | None) -> bool:
    """Whether the text after `verdict` is that of `branch`, `next_token` behind it, as far as it is known."""
    if verdict.accepted_len != branch.place:
        return False
    if branch.guess is not None:
        return verdict.correction_kind is not CorrectionKind.NONE and verdict.correction == branch.guess
    has_bonus = verdict.correction_kind is not CorrectionKind.NONE
    return not has_bonus or next_token is None or verdict.correction == next_token
