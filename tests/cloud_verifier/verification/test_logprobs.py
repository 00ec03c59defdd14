"""Log-probabilities of emitted tokens, against a plain log-softmax of the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.fakes import FakeBackend

from outrider.common.sampling.processors import process_logits
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Method,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Support,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)
from tests.cloud_verifier.engine.test_engine import GREEDY, Harness

PROMPT = (5, 6, 7)
SHAPED = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.3, seed=4)


def log_softmax(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    scores = scores.astype(np.float64)
    shifted = scores - scores.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def check(
    backend: FakeBackend,
    text: Sequence[int],
    sampling: SamplingParams,
    entries: Sequence[TokenLogprobs],
    num: int,
) -> None:
    """`entries` are those of the last tokens of `text`."""
    for index, entry in zip(range(len(text) - len(entries), len(text)), entries, strict=True):
        logits = backend.logits_after(text[:index])
        raw = log_softmax(logits[: backend.num_tokens])
        scores = process_logits(
            np,
            logits[None],
            sampling,
            prompt_ids=PROMPT,
            output_ids=text[3:index],
            eos_token_ids=backend.eos_token_ids,
            num_tokens=backend.num_tokens,
        )
        processed = 0.0 if sampling.temperature == 0 else log_softmax(scores[0])[text[index]]
        assert entry.raw_logprob == pytest.approx(raw[text[index]], abs=1e-5)
        assert entry.processed_logprob == pytest.approx(processed, abs=1e-5)
        order = np.argsort(-raw, kind="stable")[:num]
        assert list(entry.top_token_ids) == order.tolist()
        assert entry.top_logprobs == pytest.approx(raw[order], abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, SHAPED], ids=["greedy", "shaped"])
@pytest.mark.parametrize("num", [1, 5, 20])
def test_every_emitted_token_comes_with_its_own(sampling: SamplingParams, num: int) -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, sampling=sampling, num_logprobs=num, ignore_eos=True)
    text = [*PROMPT, opened.first_token]
    assert opened.logprobs is not None
    check(harness.backend, text, sampling, [opened.logprobs], num)
    right = harness.reference(PROMPT, sampling, 4)[1:3]
    last: Opened | Verdict = opened
    for round_id, draft in enumerate(([*right, 31], []), 1):
        fields = {"draft_tokens": tuple(draft), "q_token_probs": (0.5,) * len(draft)}
        verdict = harness.ask(session_id, VerifyRequest(round_id, last.position, last.hash, **fields))
        assert isinstance(verdict, Verdict)
        text += [*draft[: verdict.accepted_len], verdict.correction]
        assert len(verdict.logprobs) == verdict.accepted_len + 1
        check(harness.backend, text, sampling, verdict.logprobs, num)
        last = verdict
    request = GenerateRequest(9, last.position, last.hash, max_new_tokens=5)
    replies = harness.submit(session_id, request)
    harness.settle()
    for reply in replies:
        assert isinstance(reply, GeneratedTokens)
        text += reply.token_ids
        check(harness.backend, text, sampling, reply.logprobs, num)
    assert len(replies) == 5


def test_a_token_that_ends_the_text_has_its_own_and_nothing_else_does() -> None:
    harness = Harness()
    right = harness.reference(PROMPT, GREEDY, 4)
    session_id, opened = harness.open(
        prompt=PROMPT, sampling=GREEDY, num_logprobs=2, stop_token_ids=(right[2],), method=Method.SPARSE
    )
    draft = (*right[1:3], 9)
    supports = tuple(Support((token_id,), (1,)) for token_id in draft)
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=draft, q_support=supports)
    verdict = harness.ask(session_id, request)
    assert isinstance(verdict, Verdict) and verdict.correction_kind is CorrectionKind.NONE
    assert len(verdict.logprobs) == verdict.accepted_len == 2


def test_nobody_who_did_not_ask_gets_them_and_more_than_twenty_are_refused() -> None:
    harness = Harness()
    _, opened = harness.open(prompt=PROMPT)
    assert opened.logprobs is None
    opening = OpenRequest(b"t" * 16, PROMPT, 3, GREEDY, num_logprobs=21)
    error = harness.ask(opening.session_id, opening)
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "num_logprobs")
    opened = harness.ask(opening.session_id, replace(opening, num_logprobs=20))
    assert opened.logprobs is not None and len(opened.logprobs.top_token_ids) == 20  # type: ignore[union-attr]
