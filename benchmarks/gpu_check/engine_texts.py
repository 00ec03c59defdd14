"""Texts of an engine in this process: cloud-only, or verified from drafts that are partly wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.common.types import (
    PROTOCOL_VERSION,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Limits,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    TokenIds,
    Verdict,
    VerifyRequest,
)

NUM_DRAFT_TOKENS = 4
CORRUPTED_SHARE = 0.2
NO_LIMITS = QueueLimits(max_queue_ms=1e9, max_queue_tokens=0)  # a slow machine refuses nothing here
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50),
)


@dataclass(eq=False)
class Session:
    """Holds one text as it grows, and what the next request must build on."""

    session_id: bytes
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    hash: int = 0
    replies: list[SessionResponse] = field(default_factory=list)


class EngineTexts:
    """Decodes several sessions at once with an engine over `backend`."""

    def __init__(self, backend: TargetBackend) -> None:
        model = ModelInfo(
            protocol_version=PROTOCOL_VERSION,
            model_id=backend.model_id,
            target_fingerprint=backend.fingerprint,
            tokenizer_fingerprint=backend.tokenizer_fingerprint,
            dtype=backend.dtype,
            device=backend.device,
            eos_token_ids=backend.eos_token_ids,
            num_tokens=backend.num_tokens,
            limits=Limits(backend.max_context, 64, 1 << 20, 1024, 600_000),
            methods=(Method.COUPLED,),
            server_version="",
        )
        self.engine = Engine(backend, model, queue_limits=NO_LIMITS)
        self._num_tokens = backend.num_tokens
        self._num_sessions = 0
        self.num_evicted = 0

    def cloud_only(
        self, prompts: Sequence[TokenIds], samplings: Sequence[SamplingParams], num_new: int
    ) -> list[list[int]]:
        """Returns `num_new` tokens after each prompt, a token a step, all sessions in the same steps."""
        sessions = self._open(prompts, samplings)
        self._ask({each: GenerateRequest(2, each.position, each.hash, num_new - 1) for each in sessions})
        for session in sessions:
            for reply in session.replies:
                assert isinstance(reply, GeneratedTokens), reply
                session.token_ids += reply.token_ids
        return self._close(sessions)

    def verified(
        self,
        prompts: Sequence[TokenIds],
        samplings: Sequence[SamplingParams],
        texts: Sequence[Sequence[int]],
        *,
        is_evicted: bool = False,
    ) -> list[list[int]]:
        """Returns texts as long as `texts`, from which the drafts are taken, a fifth of their tokens changed.

        With `is_evicted` all KV is given up after every round.
        """
        sessions, draws = self._open(prompts, samplings), random.Random(0)
        text_of = dict(zip(sessions, texts, strict=True))
        round_id = 1
        while going_on := [each for each in sessions if len(each.token_ids) < len(text_of[each])]:
            round_id += 1
            drafts = {each: self._draft(text_of[each], len(each.token_ids), draws) for each in going_on}
            self._ask(
                {
                    each: VerifyRequest(round_id, each.position, each.hash, draft_tokens=draft)
                    for each, draft in drafts.items()
                }
            )
            for session, draft in drafts.items():
                verdict = session.replies[-1]
                assert isinstance(verdict, Verdict), verdict
                session.token_ids += [*draft[: verdict.accepted_len], verdict.correction]
                session.position, session.hash = verdict.position, verdict.hash
            while is_evicted and self.engine.sessions.evict_kv():
                self.num_evicted += 1
        for session, text in text_of.items():
            del session.token_ids[len(text) :]
        return self._close(sessions)

    def _draft(self, text: Sequence[int], start: int, draws: random.Random) -> TokenIds:
        return tuple(
            (token_id + 1) % self._num_tokens if draws.random() < CORRUPTED_SHARE else token_id
            for token_id in text[start : start + NUM_DRAFT_TOKENS]
        )

    def _open(self, prompts: Sequence[TokenIds], samplings: Sequence[SamplingParams]) -> list[Session]:
        requests: dict[Session, OpenRequest] = {}
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self._num_sessions += 1
            session = Session(self._num_sessions.to_bytes(16, "big"))
            requests[session] = OpenRequest(
                session.session_id, tuple(prompt), len(prompt), sampling, ignore_eos=True, round_id=1
            )
        self._ask(requests)
        for session in requests:
            opened = session.replies[-1]
            assert isinstance(opened, Opened), opened
            session.token_ids.append(opened.first_token)
            session.position, session.hash = opened.position, opened.hash
        return list(requests)

    def _ask(self, requests: Mapping[Session, SessionRequest]) -> None:
        """Submits one request each, and steps until nothing is left to do: `replies` are then its answers."""
        arrival_ns = int(self.engine.clock.now() * 1e9)
        for session, request in requests.items():
            session.replies = []
            self.engine.submit(Job(session.session_id, request, session.replies.append, arrival_ns))
        while self.engine.step():
            pass

    def _close(self, sessions: Sequence[Session]) -> list[list[int]]:
        self._ask(dict.fromkeys(sessions, CloseRequest()))
        return [session.token_ids for session in sessions]


def find_differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the first differing position of each text that differs, by the text's number."""
    differing: dict[int, int] = {}
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if list(mine) != list(theirs):
            pairs = enumerate(zip(mine, theirs, strict=False))
            differing[number] = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return differing
