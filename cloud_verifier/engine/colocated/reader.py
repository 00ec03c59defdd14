"""Drafts for one co-located generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from outrider.cloud_verifier.engine.work import KnownStates, Work
from outrider.cloud_verifier.heads.source import (
    DraftsTogether,
    ReadsChoices,
    ReadsFeatures,
    UsesTargetKv,
    WantedDraft,
)
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.process.logs import LogLimiter
from outrider.common.tree import Tree, is_chain, nodes_along, supports_by_row
from outrider.common.types import Draft, GenerateRequest
from outrider.edge_client.drafting.base import DraftSequence, ProposesTrees
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH, DEFAULT_WIDTH, TreeBudget, TreeDraft

if TYPE_CHECKING:
    from outrider.edge_client.drafting.node_values import NodeValues

log = logging.getLogger(__name__)

READ_CHUNK = 256  # tokens the draft reads within a step at most; longer sequences it reads beside the steps


class Reader:
    """Keeps the draft's sequence of one generation in step with the generation."""

    def __init__(
        self,
        work: Work,
        sequence: DraftSequence,
        draft_context: int,
        now_ns: Callable[[], int],
        limiter: LogLimiter,
        together: DraftsTogether | None = None,
    ) -> None:
        """`together` is the source, where it drafts for several sequences at once."""
        self.work, self.together = work, together
        self._sequence = sequence
        self._on_target_kv = sequence if isinstance(sequence, UsesTargetKv) else None
        self._draft_context = draft_context
        self.now_ns = now_ns
        self._limiter = limiter
        self._failure: Exception | None = None  # that is not logged yet
        self._reading: Future[None] | None = None
        self._is_over = False  # closed, failed, or past the draft's context
        self._is_closed = False
        self._values: NodeValues | None = None  # of trees, and the last one
        self._last: TreeDraft | None = None

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the sequence's KV; 0 once it is over."""
        return 0 if self._is_over else int(getattr(self._sequence, "num_kv_bytes", 0))

    def is_ready(self, pool: Executor) -> bool:
        """Returns whether a proposal needs no long reading first; starts that reading on `pool` otherwise."""
        self._log_failure()
        if self._is_over or (self._reading is not None and not self._reading.done()):
            return False
        token_ids = self.work.session.chain.token_ids
        if len(token_ids) >= self._draft_context:
            self._is_over = True
            return False
        if self._on_target_kv is not None:  # not where more than the last token is without KV
            self._on_target_kv.kv = self.work.session.kv
            return self.work.session.kv_length == len(token_ids) - 1
        if isinstance(self._sequence, ReadsFeatures):
            if not self._read_features(self._sequence):
                return False
            if not self._sequence.reads_all:
                return True
        elif isinstance(self._sequence, ReadsChoices):
            self._sequence.read_choices(self.work.choices)
            self.work.choices, self.work.wants_choices = (), True
            return True
        if len(token_ids) - self._sequence.position <= READ_CHUNK:
            return True
        self._reading = pool.submit(self._read, token_ids[self._sequence.position :])
        return False

    def _read_features(self, sequence: ReadsFeatures) -> bool:
        log = self.work.session.features
        if log is None or log.end != self.work.session.chain.position - 1:
            return False  # more than the last token is without KV
        sequence.read(log)
        return True

    @property
    def num_wanted(self) -> int:
        """Returns how many tokens the generation asks for at a time."""
        request = self.work.request
        assert isinstance(request, GenerateRequest), "only generations are drafted for here"
        return request.num_speculative_tokens

    def propose(self, max_context: int, room: int) -> int:
        """Drafts `room` tokens, never past the last one wanted or `max_context`.

        Returns how long it took, in ns.
        """
        start_ns = self.now_ns()
        draft: Draft | Exception | None
        try:
            wanted = self.want(max_context, room)
            draft = None if wanted is None else self._draft(wanted)
        except Exception as error:
            draft = error
        if draft is None:
            return 0
        self.take(draft)
        return self.now_ns() - start_ns

    def want(self, max_context: int, room: int) -> WantedDraft | None:
        """Commits what is new, and learns from it how good the last tree was; returns what is to be drafted, None for
        nothing."""
        work, request = self.work, self.work.request
        assert isinstance(request, GenerateRequest), "only generations are drafted for here"
        num_tokens = min(room, max_context - work.session.chain.position - 1)
        longest = request.max_new_tokens - work.num_generated - 1  # path of tokens that may still be wanted
        if min(num_tokens, longest) <= 0:
            return None
        new_ids = work.session.chain.token_ids[self._sequence.position :]
        self._sequence.commit(new_ids)
        if not request.is_tree:
            return WantedDraft(min(num_tokens, longest))
        budget = TreeBudget(num_tokens, min(DEFAULT_DEPTH, longest), DEFAULT_WIDTH)
        values = self._learned(new_ids) if isinstance(self._sequence, ProposesTrees) else None
        return WantedDraft(min(num_tokens, longest), budget, values)

    def take(self, draft: Draft | Exception) -> None:
        """Gives the work a draft; none where drafting failed."""
        if isinstance(draft, Exception):
            self._fail(draft)
            draft = Draft((), ())
        self._last = draft if isinstance(draft, TreeDraft) else None
        work, sequence = self.work, self._on_target_kv
        work.draft_tokens, work.draft_probs = draft.token_ids, draft.draft_probs
        work.supports, work.tree, work.known_states = draft.supports, None, None
        if not is_chain(draft.parents):
            work.tree = Tree(draft.parents)
            if draft.supports:
                work.supports = supports_by_row(work.tree, draft.supports)
        if draft.token_ids and sequence is not None and sequence.kv is not None:
            states = sequence.states
            known = None if states is None else KnownStates(sequence.kv, sequence.kv.length, states)
            work.known_states = known
        work.total_tokens = work.num_pending

    @property
    def sequence(self) -> DraftSequence:
        """Returns the draft's sequence."""
        return self._sequence

    def _learned(self, new_ids: Sequence[int]) -> NodeValues:
        """Returns the chances of nodes, which learn from the tokens since the last tree."""
        if self._values is None:  # numpy's share of the start-up is for those that draft trees
            from outrider.edge_client.drafting.node_values import NodeValues

            self._values = NodeValues()
        elif self._last is not None:
            nodes = nodes_along(self._last.token_ids, self._last.parents, new_ids)
            self._values.observe(self._last, nodes, next(iter(new_ids[len(nodes) :]), None))
            self._last = None
        return self._values

    def _draft(self, wanted: WantedDraft) -> Draft:
        if wanted.budget is None or wanted.values is None:
            return self._sequence.propose(wanted.num_tokens)
        assert isinstance(self._sequence, ProposesTrees), "it has values"
        return self._sequence.propose_tree(wanted.budget, wanted.values)

    def close(self) -> None:
        """Closes the sequence; a reading under way stops after its chunk first. A failure is logged.

        Closing twice is allowed.
        """
        if self._is_closed:
            return
        self._is_over = self._is_closed = True
        self._log_failure()
        if self._reading is None:
            self._close_sequence()
        else:
            self._reading.add_done_callback(lambda _: self._close_sequence())

    def _close_sequence(self) -> None:
        try:
            self._sequence.close()
        except Exception:
            log.exception("a draft's sequence could not be closed")

    def check_integrity(self) -> None:
        is_running = self.work.session.running is self.work.job  # else it is closed with the next step
        if is_running and (self._reading is None or self._reading.done()):
            self._sequence.check_integrity()
            assert self._sequence.position <= self.work.session.chain.position, "the draft read ahead"

    def _read(self, token_ids: list[int]) -> None:
        """Reads on the pool. The proposals are dropped; what they computed of the sequence is kept."""
        try:
            for start in range(0, len(token_ids), READ_CHUNK):
                if self._is_over:
                    return
                self._sequence.commit(token_ids[start : start + READ_CHUNK])
                self._sequence.propose(1)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the drafting; on the pool, too."""
        self._is_over, self._failure = True, error

    def _log_failure(self) -> None:
        """Logs how the drafting ended, on the engine's thread: that of the limiter."""
        error, self._failure = self._failure, None
        if isinstance(error, GrammarLimitError):
            message = "a generation goes on with the target alone: its grammar is at a limit"
            self._limiter.info("grammar limit", message, {"reason": str(error)})
        elif error is not None:
            message = "the draft failed: this generation goes on with the target alone"
            self._limiter.error(f"draft {type(error).__name__}", message, {}, error)
