"""Texts written in this process by an engine, cloud-only or speculative, alone or several at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.config import QueueLimits, ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.types import (
    CloseRequest,
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Method,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionRequest,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.controller.settings import SETTINGS

DRAFT_TOKENS = 4
P_WRONG = 0.2  # of each drafted token
NO_LIMITS = QueueLimits(max_queue_ms=1e9, max_queue_tokens=0)  # a slow machine refuses nothing here


@dataclass
class Text:
    """Writes one text: speculatively with drafts out of `expected`, by cloud-only where that is None."""

    session_id: bytes
    prompt: Sequence[int]
    sampling: SamplingParams
    num_new: int
    expected: Sequence[int] | None = None
    num_prompt_choices: int = 0  # asked for
    token_ids: list[int] = field(default_factory=list)
    prompt_choices: TokenIds = ()
    is_done: bool = False
    _drafted: list[int] = field(default_factory=list)
    _replies: list[Any] = field(default_factory=list)
    _round_id: int = 0
    _asked: SessionRequest = field(default_factory=CloseRequest)

    def start(self, engine: Engine) -> None:
        """Opens the session."""
        opening = OpenRequest(
            self.session_id,
            tuple(self.prompt),
            len(self.prompt),
            self.sampling,
            Method.COUPLED,
            ignore_eos=True,
            num_prompt_choices=self.num_prompt_choices,
        )
        self._ask(engine, opening)

    def advance(self, engine: Engine) -> None:
        """Takes the replies that came, and sends the next request."""
        replies, self._replies[:] = list(self._replies), []
        for reply in replies:
            self._take(engine, reply)

    def _take(self, engine: Engine, reply: Any) -> None:
        if isinstance(reply, Progress):
            return
        if isinstance(reply, RoundError):
            assert reply.code is RoundErrorCode.REFUSED, reply  # no room in the KV pool now
            self._ask(engine, self._asked)
            return
        if isinstance(reply, Opened):
            self.token_ids.append(reply.first_token)
            self.prompt_choices = reply.prompt_choices
            if self.expected is None:
                self._ask(engine, GenerateRequest(1, reply.position, reply.hash, self.num_new - 1))
                return
        elif isinstance(reply, GeneratedTokens):
            self.token_ids += reply.token_ids
        else:
            assert isinstance(reply, Verdict), reply
            self.token_ids += self._drafted[: reply.accepted_len]
            if reply.correction_kind is not CorrectionKind.NONE:
                self.token_ids.append(reply.correction)
        if len(self.token_ids) >= self.num_new:
            self.is_done = True
            engine.submit(Job(self.session_id, CloseRequest(), lambda _: None, 0))
        elif self.expected is not None:
            self._verify(engine, reply, self.expected)

    def _verify(self, engine: Engine, reply: Any, expected: Sequence[int]) -> None:
        self._round_id += 1
        place = random.Random(f"{self.session_id!r} {self._round_id}")
        start = len(self.token_ids)
        likely = expected[start : start + min(DRAFT_TOKENS, self.num_new - start - 1)]
        wrong = [int(place.random() < P_WRONG) for _ in likely]
        self._drafted = [
            token - each if token > 1 else token for token, each in zip(likely, wrong, strict=True)
        ]
        request = VerifyRequest(self._round_id, reply.position, reply.hash, draft_tokens=tuple(self._drafted))
        self._ask(engine, request)

    def _ask(self, engine: Engine, request: SessionRequest) -> None:
        self._asked = request
        engine.submit(Job(self.session_id, request, self._replies.append, 0))


def write_texts(
    backend: PagedBackend,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    num_new: int,
    *,
    expected: Sequence[Sequence[int]] | None = None,
    num_together: int = 1,
    is_evicted: bool = False,
) -> list[list[int]]:
    """Returns the text after each prompt, `num_together` at once: speculative with drafts out of `expected`, by
    cloud-only where that is None. Speculative ones ask for the target's choices in their prompts, as edges do.

    With `is_evicted` a session's KV is given up after each of its rounds, and computed again for the next.
    """
    texts = texts_after(prompts, samplings, num_new, SETTINGS.num_prompt_choices if expected else 0)
    for text, its_own in zip(texts, expected or (), strict=expected is not None):
        text.expected = its_own
    write(backend, texts, num_together=num_together, is_evicted=is_evicted)
    return [text.token_ids[:num_new] for text in texts]


def texts_after(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    num_new: int,
    num_prompt_choices: int,
) -> list[Text]:
    """Returns a text to be written by cloud-only after each prompt."""
    return [
        Text(i.to_bytes(16, "big"), prompt, sampling, num_new, num_prompt_choices=num_prompt_choices)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def write(
    backend: PagedBackend,
    texts: Sequence[Text],
    *,
    num_together: int = 1,
    is_evicted: bool = False,
) -> None:
    """Writes the texts; see `write_texts`."""
    config, num_evicted = ServeConfig(), 0
    engine = Engine(
        backend,
        make_model_info(backend, config),
        prefill_chunk_tokens=config.prefill_chunk(backend.device),
        queue_limits=NO_LIMITS,
    )
    waiting, running = list(texts), list[Text]()
    while waiting or running:
        while waiting and len(running) < num_together:
            running.append(waiting.pop(0))
            running[-1].start(engine)
        engine.step()
        for session in list(engine.sessions) if is_evicted else ():
            if session.kv is not None and not session.is_busy:
                engine.sessions.evict(session)
                num_evicted += 1
        for each in running:
            each.advance(engine)
        running = [each for each in running if not each.is_done]
    while engine.step() or engine.num_jobs:
        pass
    engine.check_integrity()
    assert num_evicted or not is_evicted, "no session was evicted between its rounds"
