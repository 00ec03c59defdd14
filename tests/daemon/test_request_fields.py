"""Requests field by field, without HTTP: read, or refused by name."""

from __future__ import annotations

import math

import pytest

from edge_client.daemon.errors import ApiError
from edge_client.daemon.parsed import Kind, ParsedRequest
from edge_client.daemon.requests import parse_request

NUM_TOKENS = 1000
USER = {"role": "user", "content": "hi"}


def completion(**fields: object) -> ParsedRequest:
    return parse_request(Kind.COMPLETION, {"prompt": "x", **fields}, NUM_TOKENS)


def chat(**fields: object) -> ParsedRequest:
    return parse_request(Kind.CHAT, {"messages": [USER], **fields}, NUM_TOKENS)


def test_fields_become_settings_of_the_edge() -> None:
    parsed = completion(
        max_tokens=5,
        temperature=1,
        top_p=0.5,
        presence_penalty=1.5,
        frequency_penalty=-1,
        logit_bias={"3": -2, "12": 0.5},
        stop="END",
        seed=2**64 - 1,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=0,
        user="ann",
        outrider={"mode": "cloud-only", "top_k": 3, "min_p": 0.1, "tokens": True, "method": None},
    )
    assert parsed.changes == {
        "max_new_tokens": 5,
        "temperature": 1.0,
        "top_p": 0.5,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.0,
        "logit_bias": ("3:-2.0", "12:0.5"),
        "stop": ("END",),
        "mode": "cloud-only",
        "top_k": 3,
        "min_p": 0.1,
    }
    assert parsed.seed == 2**64 - 1
    assert parsed.is_stream and parsed.has_usage and parsed.has_tokens
    assert parsed.num_top_logprobs == 0 and parsed.user == "ann"


def test_null_counts_as_not_given_and_neutral_values_are_taken() -> None:
    assert completion(n=1, best_of=1, echo=False, suffix="", stop=None, seed=None, metadata={}).changes == {}
    asked = chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=False, n=1)
    assert asked.changes == {} and asked.messages == (USER,)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_one(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_messages_may_have_parts_and_the_newer_word_for_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": "c"}, {"role": "user", "content": parts}])
    assert asked.messages == ({"role": "system", "content": "c"}, {"role": "user", "content": "ab"})


@pytest.mark.parametrize(
    ("kind", "fields", "param", "word"),
    [
        ("completion", {"n": True}, "n", "one choice"),
        ("completion", {"best_of": 3}, "best_of", "one choice"),
        ("completion", {"suffix": "x"}, "suffix", "filled in"),
        ("completion", {"prompt": ["a", "b"]}, "prompt", "2 prompts"),
        ("completion", {"prompt": [1, NUM_TOKENS]}, "prompt", "from 0 to 999"),
        ("completion", {"prompt": [1, "a"]}, "prompt", "integer"),
        ("completion", {"messages": [USER]}, "messages", "/v1/chat/completions"),
        ("completion", {"max_completion_tokens": 4}, "max_completion_tokens", "unknown"),
        ("completion", {"stop": ["a", ""]}, "stop", "empty"),
        ("completion", {"stop": ["x"] * 17}, "stop", "at most 16"),
        ("completion", {"seed": -1}, "seed", "from 0"),
        ("completion", {"seed": 1.5}, "seed", "integer"),
        ("completion", {"temperature": "hot"}, "temperature", "number"),
        ("completion", {"top_p": 0}, "top_p", "from 1e-06"),
        ("completion", {"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ("completion", {"logit_bias": {"a": 1}}, "logit_bias", "token id"),
        ("completion", {"logprobs": 21}, "logprobs", "20"),
        ("completion", {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ("completion", {"top_k": 4}, "top_k", '"outrider": {"top_k"'),
        ("completion", {"repeat_penalty": 1.1}, "repeat_penalty", "repetition_penalty"),
        ("completion", {"n_predict": 4}, "n_predict", "max_tokens"),
        ("completion", {"temprature": 1}, "temprature", "did you mean temperature"),
        ("completion", {"outrider": {"verifier": "x:1"}}, "outrider.verifier", "unknown"),
        ("completion", {"outrider": {"top_k": "x"}}, "outrider.top_k", "integer"),
        ("completion", {"outrider": {"tokens": True}}, "outrider.tokens", "stream"),
        ("completion", {"outrider": {"timeout_ms": math.inf}}, "outrider.timeout_ms", "at most"),
        ("completion", {"outrider": {"recover_timeout_s": 1e300}}, "outrider.recover_timeout_s", "at most"),
        ("chat", {"tools": [{}]}, "tools", "no tools"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format", "grammar"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("chat", {"logprobs": 2}, "logprobs", "true or false"),
        ("chat", {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differs"),
        ("chat", {"messages": []}, "messages", "empty"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "text"),
        ("chat", {"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls", "role, content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    kind: str, fields: dict[str, object], param: str, word: str
) -> None:
    with pytest.raises(ApiError) as caught:
        (chat if kind == "chat" else completion)(**fields)
    assert caught.value.status == 400 and caught.value.param == param
    assert word in caught.value.message


@pytest.mark.parametrize("body", [[], "x", None, {}, {"prompt": None}])
def test_a_body_without_a_prompt_is_refused(body: object) -> None:
    with pytest.raises(ApiError):
        parse_request(Kind.COMPLETION, body, NUM_TOKENS)
