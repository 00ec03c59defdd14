"""Co-located speculation: a draft beside the target, proposing for `Generate` before each step.

It is the baseline that edge–cloud speculation is measured against, so it drafts, samples and verifies with the
same code: the edge's draft, or a head at the target (`cloud_verifier.heads`), and the session's method. With the heads
this is the one room here that imports `outrider.edge_client.drafting` (docs/decisions.md).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager

from outrider.cloud_verifier.engine.colocated.features import KeptFeatures
from outrider.cloud_verifier.engine.colocated.reader import Reader
from outrider.cloud_verifier.engine.colocated.together import propose_together
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.heads.source import DraftSource, DraftsTogether
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.methods import num_support
from outrider.common.process.logs import LogLimiter
from outrider.common.process.thread_pool import start_pool
from outrider.common.types import DRAFT_SOURCE, GenerateRequest
from outrider.edge_client.drafting.base import DraftModel

log = logging.getLogger(__name__)

POOL_FROM_NS = 3_000_000  # drafts shorter than this gain nothing by threads, measured on two cores
_MAX_THREADS = 8
_TIME_SHARE = 0.2  # of the newest draft in the mean time of a token


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
        self._features = KeptFeatures(self._sources, max_kv_bytes, self._limiter)
        self._clock = clock
        self._readers: dict[int, Reader] = {}  # by identity of the work, which the reader keeps alive
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
        ready: list[Reader] = []
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
        """Keeps the features of the forward that fed so many tokens of each of `works`, where a head will read them.
        What goes wrong with a work's is its `failure`."""
        self._features.note(works, num_fed)

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

    def _propose(self, readers: Sequence[Reader], max_context: int, rooms: Sequence[int]) -> list[int]:
        """Has readers draft so many tokens at most; returns how long each took, in ns."""
        pairs = list(zip(readers, rooms, strict=True))
        together: dict[int, list[tuple[Reader, int]]] = {}
        for pair in pairs:
            if pair[0].together is not None:
                together.setdefault(id(pair[0].together), []).append(pair)
        durations: dict[int, int] = {}  # by reader
        for group in together.values():
            duration_ns = propose_together(group, max_context)
            durations |= {id(reader): duration_ns // len(group) for reader, _ in group}
        alone = [pair for pair in pairs if id(pair[0]) not in durations]
        is_slow = self._fastest_ns is not None and self._fastest_ns >= POOL_FROM_NS
        propose = self._pool.map if is_slow and len(alone) > 1 else map
        took = propose(lambda pair: pair[0].propose(max_context, pair[1]), alone)
        durations |= {id(reader): duration_ns for (reader, _), duration_ns in zip(alone, took, strict=True)}
        return [durations[id(reader)] for reader in readers]

    def _reader(self, work: Work) -> Reader:
        reader = self._readers.get(id(work))
        if reader is None:
            opening, sampling = work.session.opening, work.session.sampling
            model = self._sources.get(opening.draft_source, self._model)
            assert model is not None, "an opening names a source that there is"
            sequence = model.sequence(
                sampling,
                num_prompt_tokens=opening.num_prompt_tokens,
                num_support=num_support(opening.method),
            )
            together = model if isinstance(model, DraftsTogether) else None
            reader = Reader(work, sequence, model.max_context, self._now_ns, self._limiter, together)
            self._readers[id(work)] = reader
        return reader

    def _rooms(self, readers: Sequence[Reader], budget_s: float) -> list[int]:
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

    def _close_all_but(self, active: set[int]) -> None:
        for key in self._readers.keys() - active:
            self._readers.pop(key).close()


def _is_co_located(work: Work) -> bool:
    request = work.request
    return (
        isinstance(request, GenerateRequest) and request.is_co_located and request.num_speculative_tokens > 0
    )
