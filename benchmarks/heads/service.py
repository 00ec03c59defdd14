"""An engine in this process whose sessions generate side by side, each with a draft source of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.config import QueueLimits, ServeConfig
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.heads.source import DraftSource
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.alignment import TokenChain
from outrider.common.types import (
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Method,
    Opened,
    OpenRequest,
    Origin,
    Progress,
    SamplingParams,
    SessionResponse,
    TokenIds,
)
from outrider.edge_client.drafting.base import DraftModel

CLOUD_ONLY = "cloud-only"
NUM_NODES = 16
NO_LIMITS = QueueLimits(max_queue_ms=1e9, max_queue_tokens=0)  # a slow machine refuses nothing here


@dataclass(frozen=True, slots=True)
class Case:
    """Says how one text is written: by a source of `CoLocatedDrafter.sources`, or `CLOUD_ONLY`."""

    prompt: TokenIds
    sampling: SamplingParams
    source: str
    num_nodes: int = NUM_NODES
    is_tree: bool = True
    method: Method = Method.COUPLED


@dataclass(slots=True)
class Written:
    """Holds one text and the steps that it took after its first token."""

    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_accepted: int = 0

    def take(self, replies: Sequence[SessionResponse]) -> None:
        """Appends what the replies bring."""
        for reply in replies:
            match reply:
                case Opened():
                    self.token_ids.append(reply.first_token)
                case GeneratedTokens():
                    self.token_ids += reply.token_ids
                    self.num_steps += bool(reply.token_ids)
                    self.num_accepted += reply.origins.count(Origin.ACCEPTED)
                case _:
                    assert isinstance(reply, Progress), reply


class Service:
    """Serves a target with its draft and other sources."""

    def __init__(
        self,
        backend: PagedBackend,
        sources: Sequence[DraftSource] = (),
        draft: DraftModel | None = None,
        *,
        max_kv_bytes: int = 256 << 20,
    ) -> None:
        self.drafter = CoLocatedDrafter(draft, sources, max_kv_bytes=max_kv_bytes)
        self._model = make_model_info(backend, ServeConfig(), self.drafter)
        self.engine = Engine(
            backend, self._model, drafter=self.drafter, prefill_chunk_tokens=32, queue_limits=NO_LIMITS
        )
        self._num_sessions = 0
        self.seconds = 0.0  # that the last texts took after their openings

    def write(self, cases: Sequence[Case], num_new: int, *, is_evicted: bool = False) -> list[Written]:
        """Returns the texts of cases, all at once, `num_new` tokens each. With `is_evicted` they are asked for in two
        parts, and the KV of all sessions is given up between these."""
        ids = [self._open_id() for _ in cases]
        answers = [self._submit(each, _opening(each, case)) for each, case in zip(ids, cases, strict=True)]
        self._settle()
        texts = [Written() for _ in cases]
        begin_s = time.perf_counter()
        for part, end in enumerate((num_new // 2, num_new) if is_evicted else (num_new,), start=1):
            for text, replies in zip(texts, answers, strict=True):
                text.take(replies)
            answers = [
                self._submit(each, _request(case, part, replies[-1], end - len(text.token_ids)))
                for each, case, text, replies in zip(ids, cases, texts, answers, strict=True)
            ]
            self._settle()
            for session in self.engine.sessions if is_evicted else ():
                self.engine.sessions.evict(session)
        self.seconds = time.perf_counter() - begin_s
        for each, text, replies in zip(ids, texts, answers, strict=True):
            text.take(replies)
            self._submit(each, CloseRequest())
        self._settle()
        self.engine.check_integrity()
        return texts

    def write_resumed(self, case: Case, num_new: int, num_again: int) -> tuple[Written, Written]:
        """Returns a text, and the same with its last `num_again` tokens asked for again, as after a lost stream. The
        second counts the steps of these alone."""
        session_id = self._open_id()
        opened = self._submit(session_id, _opening(session_id, case))
        self._settle()
        replies = self._submit(session_id, _request(case, 1, opened[-1], num_new - 1))
        self._settle()
        first, again = Written(), Written()
        first.take([*opened, *replies])
        again.token_ids = first.token_ids[:-num_again]
        chain = TokenChain([*case.prompt, *again.token_ids])
        last = opened[-1]
        assert isinstance(last, Opened), last
        base = replace(last, position=chain.position, hash=chain.hash)
        replies = self._submit(session_id, _request(case, 2, base, num_again))
        self._settle()
        again.take(replies)
        self._submit(session_id, CloseRequest())
        self._settle()
        self.engine.check_integrity()
        return first, again

    def _open_id(self) -> bytes:
        self._num_sessions += 1
        return self._num_sessions.to_bytes(16, "big")

    def _submit(self, session_id: bytes, request: Any) -> list[SessionResponse]:
        replies: list[SessionResponse] = []
        self.engine.submit(Job(session_id, request, replies.append, 0))
        return replies

    def _settle(self) -> None:
        while self.engine.step() or self.engine.num_jobs:
            pass


def _opening(session_id: bytes, case: Case) -> OpenRequest:
    source = "" if case.source in (CLOUD_ONLY, "draft") else case.source
    return OpenRequest(
        session_id,
        case.prompt,
        len(case.prompt),
        case.sampling,
        case.method,
        ignore_eos=True,
        draft_source=source,
    )


def _request(case: Case, part: int, last: SessionResponse, num_new: int) -> GenerateRequest:
    assert isinstance(last, Opened | GeneratedTokens), last
    return GenerateRequest(
        part,
        last.position,
        last.hash,
        num_new,
        is_co_located=case.source != CLOUD_ONLY,
        num_speculative_tokens=0 if case.source == CLOUD_ONLY else case.num_nodes,
        is_tree=case.is_tree and case.source != CLOUD_ONLY,
    )
