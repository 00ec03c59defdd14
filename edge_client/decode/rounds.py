"""Rounds and the sequences that they assume. Does no I/O.

    text      [ … agreed … ][ own, not acknowledged ]
    rounds                                           [ draft 1 ][ draft 2 ][ draft 3 ]
                                                          │                ^ the next round builds on this
                                                          └ x [ draft 4 ]    or on a speculative branch

Several rounds, oldest first, are in flight only where each that another builds on is `pipelined`.
Each builds on another's draft: on all of it, or on its first tokens and a predicted correction. The oldest is
the root; its verdict leaves one of the rounds that build on it, and those that build on that one.

With `coupled` each verdict brings a bonus, the token that the next round's first one is checked against: the
sequence then reaches one token into the oldest round's draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.common.alignment import extend_hash
from outrider.common.tree import ROOT, Tree, has_path
from outrider.common.types import CorrectionKind, Draft, TokenIds, Verdict, VerifyRequest
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.token_buffer import TokenBuffer
from outrider.edge_client.gate.gate import Judgement
from outrider.edge_client.transport.in_flight import FinalReply


@dataclass(slots=True, eq=False)
class Proposal:
    """A draft that is not sent yet. `branch` is what it builds on, None the sequence itself; `assumed` are
    the tokens that `branch` puts after the sequence; `kept` are those of `--reverify` that the round will judge
    before the draft; `started_s` is when the drafting began."""

    draft: Draft
    draft_ms: float
    branch: Branch[Round] | None
    assumed: TokenIds
    kept: TokenIds
    num_wanted: int
    started_s: float
    judgement: Judgement | None = None  # the gate's


class Round:
    """A round that was sent. `parent` is the branch that it builds on until that branch's verdict is known;
    `window` is how many rounds were allowed in flight then, `chance` the probability, as far as it is known
    now, that the round is judged."""

    __slots__ = (
        "chance",
        "draft",
        "draft_ms",
        "edge_ms",
        "has_no_proposal",
        "is_ahead",
        "is_branch_hit",
        "judgement",
        "num_kept",
        "parent",
        "request",
        "since_ms",
        "start",
        "window",
    )

    def __init__(self, request: VerifyRequest, proposal: Proposal, window: int = 1) -> None:
        self.request = request
        self.draft = proposal.draft
        self.draft_ms = proposal.draft_ms
        self.has_no_proposal = proposal.num_wanted > 0 and not proposal.draft.token_ids
        self.judgement = proposal.judgement
        self.num_kept = len(proposal.kept)  # tokens of the sequence, sent before the draft
        self.start = request.base_position + len(request.committed_tokens)  # position of the first to judge
        self.window = window
        self.parent = proposal.branch
        self.is_ahead = self.parent is not None  # others were in flight when it was sent
        self.chance = 1.0 if self.parent is None else self.parent.chance
        self.is_branch_hit = False  # it assumed a correction, which came
        self.edge_ms: float | None = None  # from the answer before to its sending, without drafting
        self.since_ms: float | None = None  # from the answer before to its own

    @property
    def draft_token_s(self) -> float:
        """Returns the seconds that one token of its draft took."""
        return self.draft_ms / 1e3 / (len(self.draft.token_ids) or 1)

    @property
    def assumes_correction(self) -> bool:
        """Returns whether it builds on a predicted correction or beside a likeliest path, or on a round that does."""
        return self.parent is not None and (self.parent.is_guess or self.parent.host.assumes_correction)

    def promote(self) -> None:
        """Makes it the root: the verdict of the round it builds on led to it."""
        self.is_branch_hit = self.assumes_correction
        self.parent = None

    def hash_after(self, token_ids: TokenIds) -> int:
        """Returns the hash of the sequence that has `token_ids` in the place of its draft."""
        return extend_hash(self.request.base_hash, (*self.request.committed_tokens, *token_ids))

    def is_assumption_met(self, tokens: TokenBuffer) -> bool:
        """Returns whether the sequence is what the round assumed, with a prefix of its draft after it."""
        request, num_known = self.request, tokens.position - self.start
        if not 0 <= num_known <= len(request.draft_tokens):
            return False
        known = tuple(tokens.chain.token_ids[self.start :])
        return self.is_base_met(tokens) and has_path(request.draft_tokens, request.parents, known)

    def is_base_met(self, tokens: TokenBuffer) -> bool:
        """Returns whether the sequence begins with what the round builds on."""
        return tokens.chain.agrees(self.request.base_position, self.request.base_hash)


def resolve(rounds: Iterable[Round], answered: Round, tokens: TokenBuffer) -> tuple[Round | None, list[bool]]:
    """Returns the next round, which the verdict of `answered` led to, and for each of `rounds` whether it is that
    one or builds on it. `tokens` must hold what the verdict brought."""
    children = (each for each in rounds if each.parent is not None and each.parent.host is answered)
    next_round = next((each for each in children if each.is_assumption_met(tokens)), None)
    kept = {id(next_round)}
    for each in rounds:
        if each.parent is not None and id(each.parent.host) in kept:
            kept.add(id(each))
    return next_round, [id(each) in kept for each in rounds]


def is_invalidated(
    rounds: Iterable[Round],
    replies: Sequence[FinalReply | None],
    branch: Branch[Round],
    next_tokens: Sequence[int] = (),
) -> bool:
    """Returns whether the replies that arrived so far exclude `branch`, with one of `next_tokens`, where these are
    drafted already, as its first token."""
    if replies[0] is None:
        return False
    reply_to = {id(each): reply for each, reply in zip(rounds, replies, strict=True)}
    path = _path(branch)
    following = [first_tokens(each.host.request) for each in path[1:]]
    for each, token_ids in zip(path, [*following, next_tokens], strict=True):
        reply = reply_to[id(each.host)]
        if reply is None:
            return False
        if not isinstance(reply, Verdict) or not _leads_to(reply, each, token_ids):
            return True
    return False


def assumed_tokens(branch: Branch[Round] | None, tokens: TokenBuffer) -> TokenIds:
    """Returns the tokens that `branch` assumes after the sequence."""
    if branch is None:
        return ()
    path = _path(branch)
    token_ids = [token_id for each in path for token_id in tokens_of_branch(each)]
    return tuple(token_ids[tokens.position - path[0].host.start :])


def tokens_of_branch(branch: Branch[Round]) -> TokenIds:
    """Returns the tokens that `branch` assumes from the start of its host's draft."""
    correction = () if branch.correction is None else (branch.correction,)
    drafted = branch.host.request.draft_tokens
    return (*(drafted[node] for node in branch.nodes), *correction)


def _path(branch: Branch[Round]) -> list[Branch[Round]]:
    """Returns the branches from the oldest round to `branch`."""
    path = [branch]
    while path[-1].host.parent is not None:
        path.append(path[-1].host.parent)
    return path[::-1]


def first_tokens(draft: VerifyRequest | Draft) -> TokenIds:
    """Returns the tokens that may follow the sequence by a draft: of a tree all children of its root."""
    token_ids = draft.draft_tokens if isinstance(draft, VerifyRequest) else draft.token_ids
    if not draft.parents:
        return token_ids[:1]
    return tuple(token_ids[node] for node in Tree(draft.parents).children(ROOT))


def _leads_to(verdict: Verdict, branch: Branch[Round], next_tokens: Sequence[int]) -> bool:
    """Returns whether the sequence after `verdict` may be that of `branch` followed by one of `next_tokens`."""
    if tuple(verdict.accepted_indices) != tuple(branch.nodes):
        return False
    has_extra = verdict.correction_kind is not CorrectionKind.NONE
    if branch.correction is not None:
        return has_extra and verdict.correction == branch.correction
    return not has_extra or not next_tokens or verdict.correction in next_tokens
