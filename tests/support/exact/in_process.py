"""An edge in the engine's own process: whole texts without a link, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.codec import decode_request, encode_request
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.sampling.support import choose_candidate
from outrider.common.stopping import first_stop
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Method,
    Opened,
    OpenRequest,
    Origin,
    SamplingParams,
    SessionRequest,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.drafting.onnx.runner import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler

DraftLogits = Callable[[Sequence[int]], NDArray[np.float32]]  # text → [num_tokens]


class InProcessEdge:
    """Writes texts with a verifier that serves `backend`. Every request crosses the codec."""

    def __init__(self, backend: TargetBackend) -> None:
        self.model = make_model_info(backend, ServeConfig())
        self._engine = Engine(backend, self.model)
        self._num_sessions = 0
        self.num_accepted = 0  # over all texts

    def cloud_only(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        num_new: int,
        stop_token_ids: TokenIds = (),
        *,
        ignore_eos: bool = False,
    ) -> list[int]:
        opened = self._open(prompt, sampling, Method.COUPLED, stop_token_ids, ignore_eos)
        text = [opened.first_token]
        if text[0] in self._stops(stop_token_ids, ignore_eos) or num_new == 1:
            return text
        request = GenerateRequest(1, opened.position, opened.hash, num_new - 1)
        for reply in self._ask(request):
            assert isinstance(reply, GeneratedTokens), reply
            text += reply.token_ids
        return text

    def speculative(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        num_new: int,
        stop_token_ids: TokenIds = (),
        *,
        method: Method,
        draft: DraftLogits,
        num_draft_tokens: int = 4,
        ignore_eos: bool = False,
    ) -> list[int]:
        opened = self._open(prompt, sampling, method, stop_token_ids, ignore_eos)
        stops = self._stops(stop_token_ids, ignore_eos)
        sampler = DraftSampler(sampling, self.model.eos_token_ids, num_support(method))
        text = [opened.first_token]
        position, hash_, round_id = opened.position, opened.hash, 0
        committed: TokenIds = ()
        while len(text) < num_new and text[-1] not in stops:
            count = min(num_draft_tokens, num_new - len(text) - 1)
            drafted = _propose(sampler, draft, prompt, text, stops, count, sampling.temperature)
            verdict = self._verify(
                VerifyRequest(
                    (round_id := round_id + 1),
                    position,
                    hash_,
                    committed_tokens=committed,
                    origins=(Origin.CORRECTION,) * len(committed),
                    draft_tokens=tuple(each[0] for each in drafted),
                    q_token_probs=tuple(each[1] for each in drafted) if sends_probs(method) else (),
                    q_support=tuple(each[3] for each in drafted) if sends_support(method) else (),
                )
            )
            text += [each[0] for each in drafted[: verdict.accepted_len]]
            self.num_accepted += verdict.accepted_len
            committed = ()
            num_kept, num_seen = verdict.accepted_len, 0
            while verdict.candidates:
                support = drafted[num_kept][3]
                start = len(prompt) + len(text)
                chosen = choose_candidate(support, verdict.candidates, sampling.seed, start, num_seen)
                if chosen is not None:
                    text.append(chosen)
                    committed = (chosen,)
                    break
                num_seen += len(verdict.candidates)
                more = VerifyRequest(
                    (round_id := round_id + 1), verdict.position, verdict.hash, candidates_from=num_seen
                )
                verdict = self._verify(more)
            if verdict.correction_kind is not CorrectionKind.NONE:
                text.append(verdict.correction)
            position, hash_ = verdict.position, verdict.hash
        return text

    def _stops(self, stop_token_ids: TokenIds, ignore_eos: bool) -> frozenset[int]:
        return frozenset((*stop_token_ids, *(() if ignore_eos else self.model.eos_token_ids)))

    def _open(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        method: Method,
        stop_token_ids: TokenIds,
        ignore_eos: bool,
    ) -> Opened:
        self._num_sessions += 1
        self._session_id = self._num_sessions.to_bytes(16, "big")
        (opened,) = self._ask(
            OpenRequest(
                self._session_id,
                prompt,
                len(prompt),
                sampling,
                method,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            )
        )
        assert isinstance(opened, Opened), opened
        return opened

    def _verify(self, request: VerifyRequest) -> Verdict:
        (verdict,) = self._ask(request)
        assert isinstance(verdict, Verdict), verdict
        return verdict

    def _ask(self, request: SessionRequest) -> list[Any]:
        message = encode_request(request)
        arrived = decode_request(type(message).FromString(message.SerializeToString()))
        replies: list[Any] = []
        self._engine.submit(Job(self._session_id, arrived, replies.append, 0))
        while self._engine.step() or self._engine.num_jobs:
            pass
        return replies


def _propose(
    sampler: DraftSampler,
    draft: DraftLogits,
    prompt: TokenIds,
    text: list[int],
    stops: frozenset[int],
    count: int,
    temperature: float,
) -> list[Any]:
    drafted: list[Any] = []
    output = list(text)
    for offset in range(count):
        rows = _draft_rows(draft((*prompt, *output)), temperature)
        drafted.append(sampler.sample(rows, len(prompt) + len(text), offset, prompt, output))
        output.append(drafted[-1][0])
        if first_stop(output[-1:], stops) is not None:
            break
    return drafted


def _draft_rows(logits: NDArray[np.float32], temperature: float) -> Rows:
    tempered = logits[None] / np.float32(temperature or 1)
    return Rows(logits[None], _softmax(logits[None]), tempered, _softmax(tempered))


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
