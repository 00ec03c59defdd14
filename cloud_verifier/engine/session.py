"""One session: its sequence with chained hashes, its KV, and the replies of its last rounds.

Pure state: nothing here computes or waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields
from operator import attrgetter

from outrider.cloud_verifier.backends.base import KVSequence
from outrider.cloud_verifier.engine.gathering import Pause
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.common.alignment import TokenChain
from outrider.common.sampling.history import History
from outrider.common.sequences import common_prefix
from outrider.common.stopping import holding_back
from outrider.common.types import (
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
    TokenIds,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)

MAX_STORED_REPLIES = 32
MAX_STORED_ENTRIES = 4096  # log-probabilities and candidates in them: the replies themselves are small


@dataclass(frozen=True, slots=True)
class Bonus:
    """Names the sequence's last token, which the next round's first draft token is checked against."""

    position: int  # its index
    logprobs: tuple[TokenLogprobs, ...]  # its own, where they were asked for


def num_sampling_ids_of(opening: OpenRequest) -> int:
    """Returns how many ids an opening's stop ids, logit biases and bad words count as, about 50 bytes of a session
    each: a stop id is kept in a set too, a bias with its value."""
    sampling = opening.sampling
    num_word_ids = sum(1 + len(word) for word in sampling.bad_words)
    return 2 * len(opening.stop_token_ids) + 3 * len(sampling.logit_bias) + num_word_ids


@dataclass(slots=True, eq=False)
class Session:
    """Holds one sequence. `kv` is None before its first step and after an eviction; the ids outlive it."""

    opening: OpenRequest
    chain: TokenChain
    stop_ids: frozenset[int]
    last_used_s: float  # by the manager's `idle_clock`
    tenant: str = DEFAULT_TENANT
    number: int = 0  # in the order of first openings
    kv: KVSequence | None = None
    last_round_id: int = 0
    was_pipelined: bool = False
    bonus: Bonus | None = None  # of the last round, where the next one begins with it
    choice_position: int | None = None  # where the edge must commit one of the candidates it was sent
    running: Job | None = None  # the one that is computed
    waiting: deque[Job] = field(default_factory=deque)  # for the running one
    replies: OrderedDict[int, tuple[int, Verdict]] = field(default_factory=OrderedDict)  # with content's hash
    num_stored_entries: int = 0  # log-probabilities and candidates in `replies`
    opening_reply: Opened | None = None
    history: History | None = None  # made where the sampling parameters need it
    pause: Pause = field(default_factory=Pause)  # between its rounds
    features: FeatureLog | None = None  # where a head reads them (`opening.draft_source`)
    sampling: SamplingParams = field(init=False)  # the opening's, with the ids that it holds back
    num_sampling_ids: int = field(init=False)  # see `num_sampling_ids_of`

    def __post_init__(self) -> None:
        self._take_sampling()

    def _take_sampling(self) -> None:
        self.sampling = holding_back(self.opening.sampling, self.opening.stop_token_ids)
        self.num_sampling_ids = num_sampling_ids_of(self.opening)

    @property
    def kv_length(self) -> int:
        """Returns how many tokens have KV."""
        return self.kv.length if self.kv is not None else 0

    @property
    def prompt_ids(self) -> TokenIds:
        """Returns the ids that penalties treat as the prompt."""
        return self.opening.token_ids[: self.opening.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        """Returns the ids after the prompt, as a copy."""
        return self.chain.token_ids[self.opening.num_prompt_tokens :]

    @property
    def is_busy(self) -> bool:
        """Returns whether a job of the session is unanswered."""
        return self.running is not None or bool(self.waiting)

    def reopen(self, opening: OpenRequest, stop_ids: frozenset[int]) -> int:
        """Replaces the sequence and its parameters; returns the length of the prefix that both have."""
        num_common = common_prefix(self.chain.token_ids, opening.token_ids)
        if opening.draft_source != self.opening.draft_source:
            self.features = None
        self.chain.truncate(num_common)
        self.chain.extend(opening.token_ids[num_common:])
        self.opening, self.stop_ids = opening, stop_ids
        self._take_sampling()
        self.replies.clear()
        self.num_stored_entries = 0
        self.opening_reply, self.history = None, None
        self.last_round_id = max(self.last_round_id, opening.round_id)
        self.was_pipelined, self.bonus, self.choice_position = False, None, None
        return num_common

    def current_history(self) -> History:
        """Returns what the processors need of the sequence as it is now."""
        if self.history is None:
            self.history = History(self.sampling, self.prompt_ids)
        self.history.follow(self.chain, self.opening.num_prompt_tokens)
        return self.history

    def begin_round(self) -> None:
        """Gives the masks of the session's grammar, if any, the time of one more round."""
        if self.history is not None and self.history.grammar is not None:
            self.history.grammar.begin_round()

    def stored_reply(self, request: VerifyRequest) -> SessionResponse | None:
        """Returns the answer to a round seen before, or None for a new one (docs/protocol.md, "A round").

        Same id and content: the stored reply. Same id, other content: INVALID. A lower id that is
        no longer stored: STALE.
        """
        stored = self.replies.get(request.round_id)
        if stored is not None:
            if stored[0] == _content(request):
                return stored[1]
            return self.error(
                request.round_id, RoundErrorCode.INVALID, "sent before with other content", field="round_id"
            )
        if request.round_id <= self.last_round_id:
            return self.error(
                request.round_id, RoundErrorCode.STALE, f"the session is at round {self.last_round_id}"
            )
        return None

    def store_reply(self, request: VerifyRequest, reply: Verdict) -> None:
        """Keeps `reply` for when the request is sent again; the oldest of too many are dropped."""
        if (former := self.replies.pop(request.round_id, None)) is not None:
            self.num_stored_entries -= _num_entries(former[1])
        self.replies[request.round_id] = (_content(request), reply)
        self.num_stored_entries += _num_entries(reply)
        while len(self.replies) > MAX_STORED_REPLIES or (
            len(self.replies) > 1 and self.num_stored_entries > MAX_STORED_ENTRIES
        ):
            _, (_, oldest) = self.replies.popitem(last=False)
            self.num_stored_entries -= _num_entries(oldest)

    def error(
        self, round_id: int, code: RoundErrorCode, message: str, *, field: str = "", retry_after_ms: int = 0
    ) -> RoundError:
        """Returns an error that carries the session's position and hash."""
        return RoundError(
            round_id=round_id,
            code=code,
            message=message,
            field=field,
            retry_after_ms=retry_after_ms,
            position=self.chain.position,
            hash=self.chain.hash,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where KV is ahead of the sequence: between steps its length ≤ position − 1."""
        self.chain.check_integrity()
        if self.running is None:
            assert self.kv_length <= max(0, self.chain.position - 1), (
                f"KV holds {self.kv_length} tokens of {self.chain.position}"
            )
        assert len(self.replies) <= MAX_STORED_REPLIES
        assert self.num_stored_entries == sum(_num_entries(reply) for _, reply in self.replies.values())


# The fields of a round but for how it travelled: two requests with the same ones are the same round.
_TRAVEL = ("session_id", "deadline_ms")
_CONTENT = attrgetter(*(each.name for each in fields(VerifyRequest) if each.name not in _TRAVEL))


def _content(request: VerifyRequest) -> int:
    """Returns a hash of the request's content. The request itself may be a thousand times as large."""
    return hash(_CONTENT(request))


def _num_entries(reply: Verdict) -> int:
    return len(reply.candidates) + sum(1 + len(entry.top_token_ids) for entry in reply.logprobs)
