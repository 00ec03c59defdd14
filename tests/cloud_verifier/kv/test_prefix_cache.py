"""The prefix cache under the engine: who finds what, and that nobody can tell by the text."""

from __future__ import annotations

import pytest
from support.fakes import FakeBackend

from outrider.common.types import (
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Verdict,
    VerifyRequest,
)
from tests.cloud_verifier.engine.test_engine import GREEDY, SAMPLED, Harness

PROMPT = tuple(range(1, 26))


def open_as(harness: Harness, name: int, tenant: str, prompt: tuple[int, ...] = PROMPT) -> int:
    """Opens a session; returns how many tokens were fed for it."""
    before = harness.backend.num_query_rows
    session_id = bytes([name]) * 16
    opened = harness.ask(session_id, OpenRequest(session_id, prompt, len(prompt), GREEDY), tenant)
    assert isinstance(opened, Opened)
    assert opened.first_token == harness.reference(prompt, GREEDY, 1)[0]
    return harness.backend.num_query_rows - before


def test_a_tenants_sessions_share_a_prompt_and_another_tenants_do_not() -> None:
    harness = Harness()
    assert open_as(harness, 1, "a") == len(PROMPT)
    assert open_as(harness, 2, "a") == 1, "the last token is always fed"
    assert open_as(harness, 3, "b") == len(PROMPT)
    assert harness.backend.num_free_tokens == harness.backend.kv_tokens - 2 * len(PROMPT), "one copy each"


def test_a_session_that_was_closed_finds_its_whole_text_when_it_is_opened_again() -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, sampling=SAMPLED)
    request = GenerateRequest(1, opened.position, opened.hash, 8)
    replies = harness.submit(session_id, request)
    harness.settle()
    text = [*PROMPT, opened.first_token]
    for reply in replies:
        assert isinstance(reply, GeneratedTokens)
        text += reply.token_ids
    harness.ask(session_id, CloseRequest())
    assert harness.backend.num_free_tokens == harness.backend.kv_tokens
    before = harness.backend.num_query_rows
    harness.open(2, text)
    assert harness.backend.num_query_rows - before == 1


def test_what_was_drafted_and_rejected_is_never_found() -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT)
    right = harness.reference(PROMPT, GREEDY, 2)[1]
    wrong = (right + 1) % 31
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=(wrong, 3))
    assert isinstance(harness.ask(session_id, request), Verdict)
    harness.ask(session_id, CloseRequest())
    assert open_as(harness, 2, "default", (*PROMPT, opened.first_token, wrong, 3)) == 2


def test_a_rebuild_with_another_text_computes_it_anew_where_it_differs() -> None:
    harness = Harness()
    session_id, _ = harness.open(prompt=PROMPT)
    other = (*PROMPT[:10], *(30 - token for token in PROMPT[10:]))
    rebuild = OpenRequest(session_id, other, len(other), GREEDY, round_id=7)
    opened = harness.ask(session_id, rebuild)
    assert isinstance(opened, Opened)
    assert opened.first_token == harness.reference(other, GREEDY, 1)[0]


def test_tokens_that_replace_others_replace_their_kv() -> None:
    """The base lies before what KV holds, and as many other tokens follow it."""
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    base = opened.position, opened.hash
    replies = harness.submit(session_id, GenerateRequest(1, *base, 6))
    harness.settle()
    assert isinstance(replies[-1], GeneratedTokens) and replies[-1].is_last
    kept = (11, 12, 13, 14, 15, 16)
    verdict = harness.ask(session_id, VerifyRequest(2, *base, committed_tokens=kept))
    assert isinstance(verdict, Verdict)
    text = [*PROMPT, opened.first_token, *kept]
    assert verdict.correction == harness.reference(text, GREEDY, 1)[0]


def test_a_refused_round_that_was_half_fed_leaves_no_kv_of_it() -> None:
    harness = Harness(FakeBackend(max_context=200, kv_tokens=100), max_step_tokens=16)
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    replies = harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, 4))
    harness.settle()
    last = replies[-1]
    assert isinstance(last, GeneratedTokens)
    again = VerifyRequest(2, opened.position, opened.hash, committed_tokens=(9,) * 80)
    refused = harness.ask(session_id, again)
    assert isinstance(refused, RoundError) and refused.code is RoundErrorCode.REFUSED
    assert (refused.position, refused.hash) == (last.position, last.hash)
    verdict = harness.ask(session_id, VerifyRequest(3, last.position, last.hash))
    assert isinstance(verdict, Verdict)
    assert verdict.correction == harness.reference(PROMPT, GREEDY, 6)[-1]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ten_sessions_in_a_pool_for_three_write_what_they_would_alone(sampling: SamplingParams) -> None:
    harness = Harness(FakeBackend(kv_tokens=3 * 24), max_sessions=16)
    prompts = {name: (*PROMPT[:8], name, name + 7) for name in range(1, 11)}
    states, texts, progress = {}, {}, []
    for name, prompt in prompts.items():
        session_id, opened = harness.open(name, prompt, sampling, ignore_eos=True)
        states[name], texts[name] = opened, [opened.first_token]
        assert session_id == bytes([name]) * 16
    for round_id in range(1, 12):
        for name in prompts:
            base = states[name]
            request = VerifyRequest(round_id, base.position, base.hash)
            replies = harness.submit(bytes([name]) * 16, request)
            harness.settle()
            *before, verdict = replies
            progress += before
            assert isinstance(verdict, Verdict)
            states[name] = verdict  # type: ignore[assignment]
            texts[name].append(verdict.correction)
    for name, prompt in prompts.items():
        assert texts[name] == harness.reference(prompt, sampling, 12)
        harness.ask(bytes([name]) * 16, CloseRequest())
    assert all(isinstance(each, Progress) for each in progress)
    assert harness.backend.num_free_tokens == harness.backend.kv_tokens
    harness.engine.check_integrity()
