"""What an opening tells of the prompt: the target's own choices in the place of its last tokens."""

from __future__ import annotations

import pytest

from outrider.common.types import (
    MAX_PROMPT_CHOICES,
    GenerateRequest,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Verdict,
    VerifyRequest,
)
from tests.cloud_verifier.engine.test_engine import GREEDY, SAMPLED, Harness

PROMPT = tuple(5 + 7 * i % 24 for i in range(30))
BIASED = SamplingParams(temperature=0.8, seed=3, top_k=20, logit_bias=((7, 4.0), (9, -2.0)))


def choices_of(harness: Harness, sampling: SamplingParams, num: int) -> tuple[int, ...]:
    """What the target writes after every shorter prompt."""
    places = range(len(PROMPT) - num, len(PROMPT))
    return tuple(harness.reference(PROMPT[:place], sampling, 1)[0] for place in places)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, BIASED], ids=["greedy", "sampled", "biased"])
def test_they_are_what_the_target_writes_after_every_shorter_prompt(sampling: SamplingParams) -> None:
    harness = Harness()
    others = {name: (5, 6, name) for name in (2, 3)}
    asked = {
        name: harness.submit(bytes([name]) * 16, OpenRequest(bytes([name]) * 16, prompt, 3, sampling))
        for name, prompt in others.items()
    }
    session_id, opened = harness.open(1, PROMPT, sampling, num_prompt_choices=8)
    assert opened.prompt_choices == choices_of(harness, sampling, 8)
    text = harness.reference(PROMPT, sampling, 5)
    assert opened.first_token == text[0], "the text is the same"
    draft = tuple(text[1:4])
    verdict = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=draft))
    assert isinstance(verdict, Verdict) and (verdict.accepted_len, verdict.correction) == (3, text[4])
    for name, replies in asked.items():
        assert isinstance(other := replies[-1], Opened) and not other.prompt_choices
        assert [other.first_token] == harness.reference(others[name], sampling, 1), "in the same step"


def test_nobody_gets_them_unasked_and_a_repeated_opening_gets_the_same() -> None:
    harness = Harness()
    assert not harness.open(1, PROMPT)[1].prompt_choices
    first, again = (harness.open(2, PROMPT[1:], num_prompt_choices=4)[1] for _ in range(2))
    assert (
        again.is_existing and again.prompt_choices == first.prompt_choices and len(first.prompt_choices) == 4
    )


def test_there_are_fewer_where_the_last_forward_has_fewer_rows() -> None:
    harness = Harness(max_step_tokens=26)
    _, opened = harness.open(1, PROMPT, num_prompt_choices=8)  # 26 tokens, then 4
    assert opened.prompt_choices == choices_of(harness, GREEDY, 3)
    _, opened = Harness().open(1, PROMPT[:3], num_prompt_choices=8)
    assert len(opened.prompt_choices) == 2, "nothing is known before the first token"


def test_a_known_prefix_leaves_as_many_tokens_as_they_are_wanted_of() -> None:
    harness = Harness()
    harness.open(1, PROMPT)
    num_fed = harness.backend.num_query_rows
    _, opened = harness.open(2, PROMPT, num_prompt_choices=8)
    assert opened.prompt_choices == choices_of(harness, GREEDY, 8)
    assert harness.backend.num_query_rows == num_fed + 9


def test_an_opening_does_not_wait_for_a_step_with_room_for_all_their_rows() -> None:
    """A generation beside it leaves fewer tokens of each step than there are rows."""
    harness = Harness(max_step_tokens=8)
    _, busy = harness.open(1, (5, 6, 7))
    harness.submit(b"\1" * 16, GenerateRequest(1, busy.position, busy.hash, max_new_tokens=40))
    replies = harness.submit(b"\2" * 16, OpenRequest(b"\2" * 16, PROMPT, 30, GREEDY, num_prompt_choices=20))
    for _ in range(20):
        harness.engine.step()
    assert isinstance(opened := replies[-1], Opened)
    assert opened.prompt_choices == choices_of(harness, GREEDY, len(opened.prompt_choices))


def test_where_tokens_depend_on_the_text_before_there_are_none() -> None:
    for sampling in (
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, min_new_tokens=3),
        SamplingParams(temperature=0.0, bad_words=((6, 7),)),
    ):
        harness = Harness()
        _, opened = harness.open(1, PROMPT, sampling, num_prompt_choices=8)
        assert opened.prompt_choices == ()
        assert [opened.first_token] == harness.reference(PROMPT, sampling, 1)


def test_more_than_there_may_be_are_refused_by_name() -> None:
    most = MAX_PROMPT_CHOICES
    request = OpenRequest(b"\1" * 16, PROMPT, len(PROMPT), GREEDY, num_prompt_choices=most + 1)
    reply = Harness().ask(b"\1" * 16, request)
    assert isinstance(reply, RoundError) and reply.code is RoundErrorCode.INVALID
    assert reply.field == "num_prompt_choices" and "at most 32" in reply.message
