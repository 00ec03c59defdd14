"""Keeps what heads read of the target's forwards, by session, within a bound of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from weakref import WeakSet

from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.source import DraftSource, TellsFeatures
from outrider.common.process.logs import LogLimiter


class KeptFeatures:
    """Fills the feature logs of sessions that a head drafts for."""

    def __init__(self, sources: Mapping[str, DraftSource], max_bytes: int, limiter: LogLimiter) -> None:
        self._sources = sources
        self._max_bytes = max_bytes
        self._limiter = limiter
        self._logs = WeakSet[FeatureLog]()  # of sessions that are open

    def note(self, works: Sequence[Work], num_fed: Sequence[int]) -> None:
        """Keeps the features of the forward that fed so many tokens of each of `works`, where a head will read them.
        What goes wrong with a work's is its `failure`."""
        if not self._sources:
            return
        self._bound()
        ends = accumulate(num_fed)
        for work, count, end in zip(works, num_fed, ends, strict=True):
            head = self._sources.get(work.session.opening.draft_source)
            if isinstance(head, TellsFeatures):
                try:
                    self._note(work, head, count, end)
                except Exception as error:
                    work.failure = error

    def _note(self, work: Work, head: TellsFeatures, count: int, end: int) -> None:
        """Keeps those of the last of `count` tokens, whose rows of the forward end at `end`."""
        if work.session.features is None:
            work.session.features = FeatureLog(keeps_all=head.reads_all)
            self._logs.add(work.session.features)
        kept = count if head.reads_all else min(count, work.num_logit_rows)
        rows = head.last_features(slice(end - kept, end))
        work.session.features.append(work.session.kv_length - kept, rows)

    def _bound(self) -> None:
        """Drops the oldest features of the sessions that have most, where those of all exceed their bound.

        Called before features are added, so the bound is exceeded by those of one step.
        """
        total = sum(log.num_bytes for log in self._logs)
        while total > self._max_bytes:
            largest = max(self._logs, key=lambda each: each.num_bytes)
            num_freed = largest.drop_oldest()
            if not num_freed:
                return
            total -= num_freed
            facts = {"max_kv_bytes": self._max_bytes, "num_sessions": len(self._logs)}
            self._limiter.info(
                "features", "a head reads the end of a prompt alone (--draft-kv-memory)", facts
            )
