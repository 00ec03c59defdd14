"""Co-located speculation: a draft beside the target, proposing for `Generate` before each step.

It is the baseline that edge–cloud speculation is measured against, so it drafts, samples and verifies with the
same code: the edge's draft, or a head at the target (`cloud_verifier.heads`), and the session's method. With the heads
this is the one module here that imports `outrider.edge_client.drafting` (docs/decisions.md).
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.threads import start_pool
from outrider.cloud_verifier.engine.work import KnownStates, Work
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.source import (
    DraftSource,
    DraftsTogether,
    ReadsChoices,
    ReadsFeatures,
    TellsFeatures,
    UsesTargetKv,
)
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import IncompatibleError
from outrider.common.methods import num_support
from outrider.common.process.extras import needs_extra
from outrider.common.process.logs import LogLimiter
from outrider.common.tree import Tree, is_chain, nodes_along, supports_by_row
from outrider.common.types import DRAFT_SOURCE, Draft, GenerateRequest, SamplingParams
from outrider.edge_client.drafting.base import DraftModel, DraftSequence, ProposesTrees
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH, DEFAULT_WIDTH, TreeBudget, TreeDraft

if TYPE_CHECKING:
    from outrider.edge_client.drafting.node_values import NodeValues

log = logging.getLogger(__name__)

READ_CHUNK = 256  # tokens the draft reads within a step at most; longer sequences it reads beside the steps
POOL_FROM_NS = 3_000_000  # drafts shorter than this gain nothing by threads, measured on two cores
_MAX_THREADS = 8
_TIME_SHARE = 0.2  # of the newest draft in the mean time of a token


class DeferredDraft:
    """Implements `DraftModel`: loads an exported draft with its first sequence.

    Until then it takes neither memory nor start-up time; what it says of itself is in its draft.json.
    """

    signal_names = ("nll", "entropy", "margin")

    def __init__(self, directory: Path, num_threads: int) -> None:
        """Raises `ModelError` for a directory that is no draft, `MissingExtraError` without onnxruntime."""
        from outrider.edge_client.drafting.spec import read_spec

        spec = read_spec(directory)
        with needs_extra("edge", "drafting"):
            if importlib.util.find_spec("onnxruntime") is None:
                raise ModuleNotFoundError(name="onnxruntime")
        self.num_tokens, self.max_context = spec.num_tokens, spec.max_context
        self.eos_token_ids = spec.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = spec.fingerprint, spec.tokenizer_fingerprint
        self._directory, self._num_threads = directory, num_threads
        self._model: DraftModel | None = None

    @property
    def is_loaded(self) -> bool:
        """Returns whether a sequence was asked for."""
        return self._model is not None

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> DraftSequence:
        """Returns a new, empty sequence. Raises `ModelError` where the weights cannot be loaded."""
        from outrider.edge_client.drafting.registry import create_draft_model

        if self._model is None:
            self._model = create_draft_model("model", self._directory, threads=self._num_threads)
        return self._model.sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)

    def close(self) -> None:
        """Releases the weights."""
        if self._model is not None:
            self._model.close()

    def __enter__(self) -> DeferredDraft:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_draft(
    strategy: str,
    directory: Path,
    tokenizer_fingerprint: str,
    *,
    num_threads: int,
    is_deferred: bool = False,
) -> DraftModel:
    """Returns the draft in `directory`, for a target whose tokenizer has this fingerprint; with `is_deferred` an
    exported one, loaded when it is first used.

    Raises `IncompatibleError` for another tokenizer, `ModelError` for a directory that cannot be loaded.
    """
    from outrider.edge_client.drafting.registry import create_draft_model

    draft: DraftModel
    if is_deferred:
        draft = DeferredDraft(directory, num_threads)
    else:
        draft = create_draft_model(strategy, directory, threads=num_threads)
    if draft.tokenizer_fingerprint != tokenizer_fingerprint:
        draft.close()
        raise IncompatibleError(
            f"--draft {directory}: its tokenizer is not the target's",
            "name a draft of the target's family, or none",
        )
    return draft


class CoLocatedDrafter:
    """Makes drafts for running co-located generations. Called by the engine only.

    A generation's draft sequence lives from its first step to its last. Drafts are made within its step;
    for several generations at once on a pool, where a draft takes long enough outside the interpreter lock.
    """

    def __init__(
        self,
        model: DraftModel | None,
        sources: Sequence[DraftSource] = (),
        *,
        max_kv_bytes: int = 256 << 20,
        clock: Clock = SYSTEM_CLOCK,
        pool: Executor | None = None,
    ) -> None:
        """The drafter closes `model`, the other sources and `pool`, its own where none is given."""
        self._model = model
        self._sources = {source.name: source for source in sources}
        self._max_kv_bytes = max_kv_bytes
        self._limiter = LogLimiter(log, clock=clock.now)
        self._clock = clock
        self._logs = WeakSet[FeatureLog]()  # of sessions that are open
        self._readers: dict[int, _Reader] = {}  # by identity of the work, which the reader keeps alive
        self._fastest_ns: int | None = None  # of all drafts so far
        self._token_s = 0.0  # lately, of a drafted token
        self._pool = pool or start_pool(min(_MAX_THREADS, os.cpu_count() or 1), "draft")

    @property
    def fingerprint(self) -> str:
        """Returns the draft's fingerprint; empty where there are other sources alone."""
        return "" if self._model is None else self._model.fingerprint

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the names of what may draft."""
        return (*(() if self._model is None else (DRAFT_SOURCE,)), *self._sources)

    @property
    def num_sequences(self) -> int:
        """Returns how many generations have a draft sequence."""
        return len(self._readers)

    def draft_for(
        self,
        works: Sequence[Work],
        max_context: int,
        isolate: Callable[[Job], AbstractContextManager[None]],
        budget_s: float = math.inf,
    ) -> None:
        """Gives a draft to every co-located generation among `works`, the active ones, that waits for none.

        No draft reaches past `max_context`, what a session may hold, which may be less than the target's own.
        All drafts together are expected to take `budget_s` at most: the last ones are shorter, or left out.

        Where the draft still reads a long sequence, has its context full or failed, the work stays without a
        draft: its step gives one token. Drafting for a job that raises otherwise does so within `isolate(job)`.
        """
        wanting = [work for work in works if _is_co_located(work) and not work.draft_tokens]
        if not wanting and not self._readers:
            return
        self._close_all_but({id(work) for work in works})
        self._bound_kv()
        start_ns = self._now_ns()
        ready: list[_Reader] = []
        for work in wanting:
            with isolate(work.job):
                if (reader := self._reader(work)).is_ready(self._pool):
                    ready.append(reader)
        rooms = self._rooms(ready, budget_s)
        durations_ns = self._propose(ready, max_context, rooms)
        draft_ns = self._now_ns() - start_ns
        for reader, duration_ns in zip(ready, durations_ns, strict=True):
            reader.work.draft_ns = draft_ns
            reader.work.draft_s += duration_ns / 1e9
            reader.work.start_ns = reader.work.start_ns or start_ns
            if num_tokens := len(reader.work.draft_tokens):
                self._fastest_ns = min(self._fastest_ns or duration_ns, duration_ns)
                token_s = duration_ns / 1e9 / num_tokens
                self._token_s += _TIME_SHARE * (token_s - self._token_s)

    def note_features(self, works: Sequence[Work], num_fed: Sequence[int]) -> None:
        """Keeps the features of the forward that fed so many tokens of each of `works`, where a head will read them."""
        if not self._sources:
            return
        self._bound_features()
        ends = accumulate(num_fed)
        for work, count, end in zip(works, num_fed, ends, strict=True):
            head = self._sources.get(work.session.opening.draft_source)
            if not isinstance(head, TellsFeatures):
                continue
            if work.session.features is None:
                work.session.features = FeatureLog(keeps_all=head.reads_all)
                self._logs.add(work.session.features)
            kept = count if head.reads_all else min(count, work.num_logit_rows)
            rows = head.last_features(slice(end - kept, end))
            work.session.features.append(work.session.kv_length - kept, rows)

    def close(self) -> None:
        """Closes the draft, the other sources and all their sequences."""
        self._close_all_but(set())
        self._pool.shutdown()
        for model in (self._model, *self._sources.values()):
            if model is not None:
                model.close()

    def check_integrity(self) -> None:
        """Raises AssertionError where a draft has read other ids than those it drafts for. For tests."""
        for reader in self._readers.values():
            reader.check_integrity()

    def _propose(self, readers: Sequence[_Reader], max_context: int, rooms: Sequence[int]) -> list[int]:
        """Has readers draft so many tokens at most; returns how long each took, in ns."""
        pairs = list(zip(readers, rooms, strict=True))
        together: dict[int, list[tuple[_Reader, int]]] = {}
        for pair in pairs:
            if pair[0].together is not None:
                together.setdefault(id(pair[0].together), []).append(pair)
        durations: dict[int, int] = {}  # by reader
        for group in together.values():
            duration_ns = _propose_together(group, max_context)
            durations |= {id(reader): duration_ns // len(group) for reader, _ in group}
        alone = [pair for pair in pairs if id(pair[0]) not in durations]
        is_slow = self._fastest_ns is not None and self._fastest_ns >= POOL_FROM_NS
        propose = self._pool.map if is_slow and len(alone) > 1 else map
        took = propose(lambda pair: pair[0].propose(max_context, pair[1]), alone)
        durations |= {id(reader): duration_ns for (reader, _), duration_ns in zip(alone, took, strict=True)}
        return [durations[id(reader)] for reader in readers]

    def _reader(self, work: Work) -> _Reader:
        reader = self._readers.get(id(work))
        if reader is None:
            opening = work.session.opening
            model = self._sources.get(opening.draft_source, self._model)
            assert model is not None, "an opening names a source that there is"
            sequence = model.sequence(
                opening.sampling,
                num_prompt_tokens=opening.num_prompt_tokens,
                num_support=num_support(opening.method),
            )
            together = model if isinstance(model, DraftsTogether) else None
            reader = _Reader(work, sequence, model.max_context, self._now_ns, together)
            self._readers[id(work)] = reader
        return reader

    def _rooms(self, readers: Sequence[_Reader], budget_s: float) -> list[int]:
        """Returns how many tokens each may draft; the first of all drafts one, whatever it takes."""
        left = max(1.0, budget_s / self._token_s) if self._token_s else math.inf
        rooms = []
        for reader in readers:
            rooms.append(math.floor(min(left, reader.num_wanted)))
            left -= rooms[-1]
        return rooms

    def _now_ns(self) -> int:
        return int(self._clock.now() * 1e9)

    def _bound_kv(self) -> None:
        """Ends drafting for the newest generations where the KV of all exceeds its bound.

        A new generation has no KV yet, so the bound is exceeded by what one step adds.
        """
        total = 0
        for reader in self._readers.values():
            num_bytes = reader.num_kv_bytes
            total += num_bytes
            if num_bytes and total > self._max_kv_bytes:
                reader.close()
                total -= num_bytes
                facts = {"max_kv_bytes": self._max_kv_bytes, "num_generations": len(self._readers)}
                self._limiter.info("kv", "generations go on without a draft (--draft-kv-memory)", facts)

    def _bound_features(self) -> None:
        """Drops the oldest features of the sessions that have most, where those of all exceed the bound of the KV.

        Called before features are added, so the bound is exceeded by those of one step.
        """
        total = sum(log.num_bytes for log in self._logs)
        while total > self._max_kv_bytes:
            largest = max(self._logs, key=lambda each: each.num_bytes)
            num_freed = largest.drop_oldest()
            if not num_freed:
                return
            total -= num_freed
            facts = {"max_kv_bytes": self._max_kv_bytes, "num_sessions": len(self._logs)}
            self._limiter.info(
                "features", "a head reads the end of a prompt alone (--draft-kv-memory)", facts
            )

    def _close_all_but(self, active: set[int]) -> None:
        for key in self._readers.keys() - active:
            self._readers.pop(key).close()


class _Reader:
    """Keeps the draft's sequence of one generation in step with the generation."""

    def __init__(
        self,
        work: Work,
        sequence: DraftSequence,
        draft_context: int,
        now_ns: Callable[[], int],
        together: DraftsTogether | None = None,
    ) -> None:
        """`together` is the source, where it drafts for several sequences at once."""
        self.work, self.together = work, together
        self._sequence = sequence
        self._on_target_kv = sequence if isinstance(sequence, UsesTargetKv) else None
        self._draft_context = draft_context
        self.now_ns = now_ns
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
        num_tokens, longest = self._bounds(max_context, room)
        if min(num_tokens, longest) <= 0:
            return 0
        try:
            new_ids = self._commit()
            draft: Draft | Exception = self._draft(num_tokens, longest, new_ids)
        except Exception as error:
            draft = error
        self.take(draft)
        return self.now_ns() - start_ns

    def begin(self, max_context: int, room: int) -> int:
        """Commits what is new, for a chain that is drafted together with others; returns of how many tokens, 0 for
        none."""
        request, together = self.work.request, self.together
        assert isinstance(request, GenerateRequest) and together is not None, "it is drafted for together"
        num_tokens = min(self._bounds(max_context, room))
        if request.is_tree:
            num_tokens = min(num_tokens, together.longest_for_tree)
        if num_tokens <= 0:
            return 0
        self._commit()
        return num_tokens

    def take(self, draft: Draft | Exception) -> None:
        """Gives the work a draft; none where drafting failed."""
        if isinstance(draft, Exception):
            self._fail(draft)
            draft = Draft((), ())
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

    def _bounds(self, max_context: int, room: int) -> tuple[int, int]:
        """Returns how many tokens may be drafted, and how many of them may follow one another."""
        work, request = self.work, self.work.request
        assert isinstance(request, GenerateRequest), "only generations are drafted for here"
        longest = request.max_new_tokens - work.num_generated - 1  # path of tokens that may still be wanted
        return min(room, max_context - work.session.chain.position - 1), longest

    def _commit(self) -> list[int]:
        new_ids = self.work.session.chain.token_ids[self._sequence.position :]
        self._sequence.commit(new_ids)
        return new_ids

    def _draft(self, num_tokens: int, longest: int, new_ids: Sequence[int]) -> Draft:
        """Returns a chain, or a tree where the request wants one and the draft can, whose paths have `longest` tokens
        at most; `new_ids` are the tokens since the last one."""
        request = self.work.request
        assert isinstance(request, GenerateRequest), "only generations are drafted for here"
        if not request.is_tree or not isinstance(self._sequence, ProposesTrees):
            return self._sequence.propose(min(num_tokens, longest))
        if self._values is None:  # numpy's share of the start-up is for those that draft trees
            from outrider.edge_client.drafting.node_values import NodeValues

            self._values = NodeValues()
        elif self._last is not None:
            nodes = nodes_along(self._last.token_ids, self._last.parents, new_ids)
            self._values.observe(self._last, nodes, next(iter(new_ids[len(nodes) :]), None))
        budget = TreeBudget(num_tokens, min(DEFAULT_DEPTH, longest), DEFAULT_WIDTH)
        self._last = self._sequence.propose_tree(budget, self._values)
        return self._last

    def close(self) -> None:
        """Closes the sequence; a reading under way stops after its chunk first. A failure is logged.

        Closing twice is allowed.
        """
        if self._is_closed:
            return
        self._is_over = self._is_closed = True
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
        self._is_over = True
        log.error("the draft failed: this generation goes on with the target alone", exc_info=error)


def _propose_together(group: Sequence[tuple[_Reader, int]], max_context: int) -> int:
    """Has the readers of one source draft in the same runs; returns how long all took, in ns."""
    start_ns, source = group[0][0].now_ns(), group[0][0].together
    assert source is not None, "a group has a source"
    asked: list[tuple[_Reader, int]] = []
    for reader, room in group:
        try:
            if num_tokens := reader.begin(max_context, room):
                asked.append((reader, num_tokens))
        except Exception as error:
            reader.take(error)
    drafts: Sequence[Draft | Exception]
    try:
        drafts = source.propose_together([reader.sequence for reader, _ in asked], [num for _, num in asked])
    except Exception as error:
        drafts = [error] * len(asked)
    for (reader, _), draft in zip(asked, drafts, strict=True):
        reader.take(draft)
    return group[0][0].now_ns() - start_ns


def _is_co_located(work: Work) -> bool:
    request = work.request
    return (
        isinstance(request, GenerateRequest) and request.is_co_located and request.num_speculative_tokens > 0
    )
