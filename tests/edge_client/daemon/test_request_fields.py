"""Requests field by field, without HTTP: read, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.common.config.fields import leaves
from outrider.common.errors import InvalidFieldError, OutriderError, RoundFailedError, UsageError
from outrider.common.grammar.checked import NotCheckedError
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.types import RoundError, RoundErrorCode
from outrider.edge_client.config.daemon import SECTION
from outrider.edge_client.config.request_config import request_config
from outrider.edge_client.config.request_settings import OF_OPENAI, OF_OPERATOR, OF_REQUESTS
from outrider.edge_client.config.run_config import RunConfig, run_config
from outrider.edge_client.daemon.openai.errors import ApiError, from_failure
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.request_config import config_of
from outrider.edge_client.daemon.openai.requests import parse_request
from outrider.edge_client.session.factory import check_settings

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
    assert not chat(stream=True, stream_options={"include_usage": None}).has_usage
    about = {"type": "json_schema", "json_schema": {"name": "n", "schema": None}}
    assert chat(response_format=about).changes == {"json_schema": '{"type": "object"}'}
    (message,) = chat(messages=[called(None)]).messages
    (call,) = cast(Any, message)["tool_calls"]
    assert call["function"]["arguments"] == {}


# What GuideLLM and `vllm bench serve` send, and the fields of llama-server's and vLLM's clients.
FOREIGN = {
    "ignore_eos": True,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "min_p": 0.05,
    "min_tokens": 3,
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "n_predict": 7,
    "skip_special_tokens": False,
    "cache_prompt": True,
    "continue_final_message": False,
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "u",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def test_fields_of_other_servers_mean_what_they_mean_there_or_change_nothing() -> None:
    parsed = chat(**FOREIGN)
    assert parsed.changes == {
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "top_k": 0,
        "min_p": 0.05,
        "min_new_tokens": 3,
        "stop_token_id": (5,),
        "bad_word": ("x",),
        "max_new_tokens": 7,
        "show_special_tokens": True,
    }
    assert parsed.has_usage and not parsed.ignored
    config = config_of(RunConfig(), completion(top_k=4, ignore_eos=True, min_tokens=2, n_predict=-1))
    assert (config.sampling.top_k, config.stop.ignore_eos, config.stop.min_new_tokens) == (4, True, 2)
    for name in ("max_tokens", "max_completion_tokens", "n_predict", "num_predict"):
        assert chat(**{name: -1}).changes == {"max_new_tokens": None}, "no limit, whatever the daemon's"


def test_the_operators_default_length_is_that_of_both_routes() -> None:
    unlimited, limited = run_config(max_new_tokens="none"), run_config(max_new_tokens=40)
    assert config_of(unlimited, chat()).max_new_tokens is None
    assert config_of(unlimited, completion()).max_new_tokens == 16
    for request in (chat, completion):
        assert config_of(limited, request()).max_new_tokens == 40
        assert config_of(limited, request(max_tokens=50)).max_new_tokens == 50
        assert config_of(limited, request(max_tokens=-1)).max_new_tokens is None


def test_the_operators_fewest_tokens_do_not_refuse_a_grammar() -> None:
    """A grammar says itself where a text may end; beside one of the request's own the number is refused by name."""
    base, form = run_config(min_new_tokens=5), {"type": "json_object"}
    assert config_of(base, chat(response_format=form)).stop.min_new_tokens == 0
    assert config_of(base, chat()).stop.min_new_tokens == 5
    assert config_of(base, chat(response_format=form, min_tokens=3)).stop.min_new_tokens == 3


def test_unknown_fields_are_ignored_and_named_unless_requests_are_strict() -> None:
    message = {**USER, "colour": "red", "tool_calls": []}
    given = {"messages": [message], "temprature": 1, "stream": True, "stream_options": {"speed": 1}}
    parsed = parse_request(Kind.CHAT, given, NUM_TOKENS)
    assert parsed.ignored == ["messages[0].colour", "temprature", "stream_options.speed"]
    for name, body in (
        ("temprature", {"messages": [USER], "temprature": 1}),
        ("messages[0].colour", {"messages": [message]}),
    ):
        with pytest.raises(ApiError) as caught:
            parse_request(Kind.CHAT, body, NUM_TOKENS, is_strict=True)
        assert (caught.value.code, caught.value.param) == ("unknown_parameter", name)
    with pytest.raises(ApiError, match="did you mean temperature"):
        parse_request(Kind.CHAT, {"messages": [USER], "temprature": 1}, NUM_TOKENS, is_strict=True)


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(arguments: str | None) -> dict[str, object]:
    call = {"id": "1", **function("a", arguments=arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = {"a": value} if isinstance(value, dict) else [value]
    return value


TOOL = function("a")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "setting", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a.b", "c|d"]}, "regex", r"a\.b|c\|d"),
        ({"guided_choice": ["", "a"]}, "regex", "|a"),
        ({"guided_choice": [""]}, "regex", "(?:)"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"outrider": {"json_schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"outrider": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ],
)
def test_what_the_text_must_obey_is_read_in_the_words_of_openai_and_vllm(
    given: dict[str, object], setting: str, text: str
) -> None:
    parsed = chat(**given)
    assert parsed.changes == {setting: text}
    assert getattr(config_of(RunConfig(), parsed).grammar, setting) == text


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], "b"], ((1, 2), "b"))],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_them(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_tools_are_read_and_calls_become_what_templates_take() -> None:
    asked = chat(tools=[{**TOOL, "colour": 1}, function("b", strict=True)], parallel_tool_calls=False)
    use = asked.tool_use
    assert use is not None and use.choice == "auto" and not use.is_forced and use.max_calls(9) == 1
    assert [tool.is_strict for tool in use.tools] == [False, True] and asked.ignored == ["tools[0].colour"]
    assert "strict" not in str(use.tools[1].definition), "it is for this server, not for the model"
    named = chat(tools=[TOOL, function("b")], tool_choice=function("b")).tool_use
    assert named is not None and [tool.name for tool in named.callable] == ["b"] and named.max_calls(9) == 1
    assert chat(tools=[TOOL], tool_choice="none").tool_use is None
    (message,) = chat(messages=[called('{"x": 1}')]).messages
    about = {"name": "a", "arguments": {"x": 1}}
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": about}]
    assert message["content"] == ""


def test_messages_may_have_parts_and_the_newer_word_for_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": "c"}, {"role": "user", "content": parts}])
    assert asked.messages == ({"role": "system", "content": "c"}, {"role": "user", "content": "ab"})


@pytest.mark.parametrize(
    ("kind", "fields", "param", "word"),
    [
        ("completion", {"n": True}, "n", "integer"),
        ("completion", {"n": 129}, "n", "from 1 to 128"),
        ("completion", {"n": 100, "prompt": ["a", "b"]}, "n", "is 200"),
        ("completion", {"best_of": 3}, "best_of", "give n"),
        ("completion", {"suffix": "x"}, "suffix", "filled in"),
        ("completion", {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ("completion", {"prompt": ["a", [NUM_TOKENS]]}, "prompt[1]", "from 0 to 999"),
        ("completion", {"tools": [TOOL]}, "tools", "/v1/chat/completions"),
        ("completion", {"prompt": [1, NUM_TOKENS]}, "prompt", "from 0 to 999"),
        ("completion", {"prompt": [1, "a"]}, "prompt", "integer"),
        ("completion", {"messages": [USER]}, "messages", "/v1/chat/completions"),
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
        ("completion", {"top_k": 1.5}, "top_k", "integer"),
        ("completion", {"top_k": -2}, "top_k", "from -1"),
        ("completion", {"min_p": 2}, "min_p", "from 0 to 1"),
        ("completion", {"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
        ("completion", {"ignore_eos": 1}, "ignore_eos", "true or false"),
        ("completion", {"stop_token_ids": ["a"]}, "stop_token_ids", "integer"),
        ("completion", {"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
        ("completion", {"repeat_penalty": 1.1}, "repeat_penalty", "repetition_penalty"),
        ("completion", {"n_predict": 0}, "n_predict", "from 1"),
        ("completion", {"use_beam_search": True}, "use_beam_search", "not built"),
        ("completion", {"grammar": "root ::= x"}, "grammar", "GBNF"),
        ("completion", {"guided_json": "{"}, "guided_json", "no JSON"),
        ("completion", {"guided_json": []}, "guided_json", "an object"),
        ("completion", {"guided_choice": []}, "guided_choice", "1 to 1024"),
        ("completion", {"guided_regex": "a", "guided_json": {}}, "guided_json", "guided_regex"),
        ("completion", {"guided_regex": ""}, "guided_regex", "is empty"),
        ("completion", {"guided_grammar": ""}, "guided_grammar", "is empty"),
        ("completion", {"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "is empty"),
        ("completion", {"outrider": {"regex": ""}}, "outrider.regex", "is empty"),
        ("completion", {"outrider": {"json_schema": "not json"}}, "outrider.json_schema", "no JSON"),
        ("completion", {"outrider": {"json_schema": "[1]"}}, "outrider.json_schema", "an object"),
        ("completion", {"outrider": {"mode": nested(900, [])}}, "outrider.mode", "…"),
        ("completion", {"outrider": {"mode": nested(900, {})}}, "outrider.mode", "…"),
        (
            "chat",
            {"response_format": {"type": "json_object"}, "outrider": {"json_schema": {}}},
            "outrider.json_schema",
            "does not go with response_format",
        ),
        (
            "completion",
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "json",
        ),
        ("completion", {"outrider": {"verifier": "x:1"}}, "outrider.verifier", "unknown"),
        ("completion", {"outrider": {"top_k": "x"}}, "outrider.top_k", "integer"),
        ("completion", {"outrider": {"tokens": True}}, "outrider.tokens", "stream"),
        ("completion", {"outrider": {"bad_word": ["a"] * 257}}, "outrider.bad_word", "at most 256"),
        ("completion", {"outrider": {"timeout_ms": math.inf}}, "outrider.timeout_ms", "at most"),
        ("completion", {"outrider": {"recover_timeout_s": 1e300}}, "outrider.recover_timeout_s", "at most"),
        ("chat", {"tools": {}}, "tools", "a list"),
        ("chat", {"tools": [{}]}, "tools[0].type", "function"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "text"),
        ("chat", {"tools": [function("a b")]}, "tools[0].function.name", "a-z"),
        ("chat", {"tools": [function("a", parameters=[])]}, "tools[0].function.parameters", "object"),
        (
            "chat",
            {"tools": [function("a", parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
            "object",
        ),
        ("chat", {"tools": [TOOL, TOOL]}, "tools", "one name"),
        ("chat", {"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "required"),
        ("chat", {"tools": [TOOL], "tool_choice": function("b")}, "tool_choice.function.name", "not among"),
        ("chat", {"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "goes with tools"),
        ("chat", {"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
        ("completion", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "/v1/chat/completions"),
        ("chat", {"functions": [{}]}, "functions", "tool_choice"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("chat", {"logprobs": 2}, "logprobs", "true or false"),
        ("chat", {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differs"),
        ("chat", {"messages": []}, "messages", "empty"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "tool"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "text"),
        ("chat", {"messages": [called("{")]}, "messages[0].tool_calls[0].function.arguments", "no JSON"),
        (
            "chat",
            {"messages": [called('{"a": "\\ud800"}')]},
            "messages[0].tool_calls[0].function.arguments",
            "surrogate",
        ),
        ("chat", {"messages": [called("[]")]}, "messages[0].tool_calls[0].function.arguments", "object"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "text"),
        ("chat", {"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls", "role, content"),
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


@pytest.mark.parametrize("where", [{}, {"outrider": {}}, {"stream_options": {}}])
def test_a_name_of_megabytes_is_neither_looked_up_nor_sent_back(where: dict[str, dict[str, object]]) -> None:
    name = "x" * 2**22
    given = {key: {name: 1} for key in where} or {name: 1}
    if "outrider" in where:
        with pytest.raises(ApiError) as caught:
            completion(stream=True, **given)
        assert len(str(caught.value.body())) < 2000
    else:
        assert len(str(completion(stream=True, **given).ignored)) < 200
        with pytest.raises(ApiError) as caught:
            parse_request(
                Kind.COMPLETION, {"prompt": "x", "stream": True, **given}, NUM_TOKENS, is_strict=True
            )
        assert len(str(caught.value.body())) < 2000
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": name, "content": "x"}])
    assert len(str(caught.value.body())) < 2000


@pytest.mark.parametrize("body", [[], "x", None, {}, {"prompt": None}])
def test_a_body_without_a_prompt_is_refused(body: object) -> None:
    with pytest.raises(ApiError):
        parse_request(Kind.COMPLETION, body, NUM_TOKENS)


# --------------------------------------------------------------------- settings of the edge by request


def refusal(code: RoundErrorCode, field: str) -> RoundFailedError:
    return RoundFailedError(RoundError(1, code, "no", field))


def asked(base: RunConfig | None = None, **extras: object) -> RunConfig:
    return config_of(base or RunConfig(), completion(outrider=extras))


def test_every_setting_of_the_edge_is_a_requests_or_the_operators() -> None:
    known = [leaf.key for leaf in leaves(RunConfig) if not leaf.key.startswith(f"{SECTION}.")]
    assert sorted(known) == sorted((*OF_REQUESTS, *OF_OPENAI, *OF_OPERATOR)), (
        "edge_client/config/request_settings.py"
    )


@pytest.mark.parametrize(
    ("extras", "param", "word"),
    [
        ({"mode": "cloud-only", "num_speculative_tokens": 3}, "num_speculative_tokens", "no rounds"),
        ({"mode": "edge-only", "depth_policy": "ratio"}, "depth_policy", "no rounds"),
        ({"mode": "co-located", "pipeline": "on"}, "pipeline", "no rounds"),
        ({"pipeline": "off", "num_rounds_in_flight": 4}, "num_rounds_in_flight", "goes with pipeline"),
        ({"mode": "edge-only", "on_timeout": "wait"}, "on_timeout", "waits for no verifier"),
        ({"mode": "cloud-only", "method": "sparse"}, "method", "no draft is judged"),
        ({"reverify": True, "on_timeout": "wait"}, "reverify", "on_timeout wait keeps none"),
        ({"reverify": True, "method": "block"}, "reverify", "goes with method coupled"),
        ({"tree": 16, "mode": "cloud-only"}, "tree", "no rounds"),
        ({"json_whitespace": True, "regex": "a"}, "json_whitespace", "goes with a JSON schema"),
        ({"tree": "auto", "method": "typical"}, "tree", "goes with method coupled or sparse"),
        ({"tree_depth": 5, "num_speculative_tokens": 4}, "tree_depth", "goes with tree auto or a number"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(
    extras: dict[str, object], param: str, word: str
) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**extras)
    assert caught.value.param == f"outrider.{param}" and caught.value.code == "unsupported_parameter"
    assert word in caught.value.message


def test_a_requests_own_grammar_takes_the_place_of_the_operators() -> None:
    operators = run_config(regex="a+", json_whitespace=True)
    assert asked(operators).grammar.regex == "a+"
    config = config_of(operators, completion(guided_json={"type": "object"}))
    assert (config.grammar.regex, config.grammar.json_schema) == ("", '{"type": "object"}')


def test_rounds_ahead_may_be_asked_for() -> None:
    assert asked(pipeline="on", num_rounds_in_flight=4).pipelining.num_rounds_in_flight == 4
    assert asked(mode="auto", num_rounds_in_flight=4).mode == "auto"
    assert asked(mode="cloud-only", pipeline="off", method="coupled").pipelining.use == "off"


def test_trees_may_be_asked_for_and_the_operators_are_dropped_where_none_are_sent() -> None:
    assert asked(tree=16, tree_width=2).tree.use == 16
    assert asked(method="typical").tree.use == asked(num_speculative_tokens=4).tree.use == "off"
    trees = run_config(tree="auto", mode="speculative")
    assert asked(trees).tree.use == "auto"
    assert asked(trees, mode="cloud-only").tree.use == "off"
    assert asked(trees, tree="off").tree.use == "off"


def test_the_operators_shape_of_trees_is_dropped_where_it_cannot_be(tmp_path: Path) -> None:
    shape = tmp_path / "tree.json"
    shape.write_text('{"choices": [[0], [1], [0, 0]]}')
    trees = run_config(tree=3, tree_shape=shape, mode="speculative")
    assert asked(trees).tree.shape == shape and asked(trees, tree=2).tree.shape == shape
    for other in (
        {"tree": "off"},
        {"tree": "auto"},
        {"tree": 4},
        {"tree_width": 2},
        {"mode": "cloud-only"},
        {"method": "sparse"},
    ):
        assert asked(trees, **other).tree.shape is None


def test_a_default_of_the_operators_that_a_request_makes_pointless_is_dropped() -> None:
    sparse = run_config(method="sparse", support_size=8, logprobs=5, seed=3)
    assert (
        asked(sparse).verification.support_size == 8
        and asked(sparse).logprobs == 0
        and asked(sparse).seed == 3
    )
    assert asked(sparse, method="coupled").verification.support_size is None
    assert asked(sparse, method="block").verification.support_size == 8
    reverified = run_config(reverify=True)
    assert asked(reverified).outage.reverify and asked(reverified, mode="auto").outage.reverify
    assert not asked(reverified, mode="cloud-only").outage.reverify
    assert not asked(reverified, on_timeout="wait").outage.reverify
    gated = run_config(gate="stop", gate_entropy=1.0)
    assert asked(gated).gate.use == "stop" and asked(gated, mode="auto").gate.use == "stop"
    assert asked(gated, mode="cloud-only").gate.use == "off"
    assert asked(gated, gate="off").gate.entropy is None


OPERATORS: tuple[dict[str, object], ...] = (
    {"pipeline": "on"},
    {"num_rounds_in_flight": 4},
    {"pipeline": "on", "num_rounds_in_flight": 4},
    {"mode": "co-located", "draft_source": "medusa"},
    {"mode": "co-located", "tree": 8},
    {"mode": "edge-only"},
    {"mode": "cloud-only"},
    {"method": "sparse", "support_size": 8},
    {"method": "candidates", "num_candidates": 2, "num_speculative_tokens": 3},
    {"num_speculative_tokens": 4},
    {"depth_policy": "optimal"},
    {"tree": 8, "tree_depth": 3},
    {"tree": "auto"},
    {"gate": "stop", "gate_nll": 1.0},
    {"gate": "commit", "gate_nll": 1.0, "reverify": True},
    {"reverify": True, "on_timeout": "edge_only"},
    {"learn": "somewhere"},
    {"logprobs": 2},
)
REQUESTS: tuple[dict[str, object], ...] = (
    {},
    {"mode": "speculative"},
    {"mode": "cloud-only"},
    {"mode": "co-located"},
    {"mode": "edge-only"},
    {"mode": "auto"},
    {"pipeline": "off"},
    {"gate": "off"},
    {"gate": "commit", "gate_nll": 2.0},
    {"gate": "stop", "gate_nll": 2.0},
    {"tree": 8},
    {"tree": "off"},
    {"on_timeout": "wait"},
)


@pytest.mark.parametrize("values", OPERATORS, ids=str)
def test_no_request_is_refused_for_a_default_of_the_operators(values: dict[str, object]) -> None:
    operators = run_config(**values)
    check_settings(operators)  # which a daemon starts with
    for extras in REQUESTS:
        try:
            check_settings(asked(operators, **extras))
            check_settings(request_config(operators, extras))  # of a call in Python, with log-probabilities
        except (ApiError, OutriderError) as error:
            refused = from_failure(error)
            assert str(refused.param).removeprefix("outrider.") in extras, refused


def test_errors_that_speak_of_flags_reach_a_client_as_its_own_fields() -> None:
    said = from_failure(UsageError("--threshold-pass goes with --method threshold, not with --method sparse"))
    assert said.param == "outrider.threshold_pass" and said.status == 400
    assert said.message == "threshold_pass goes with method threshold, not with method sparse"
    assert from_failure(UsageError("--max-new-tokens is 0")).param == "max_tokens"
    given = completion(top_k=3).params
    assert from_failure(UsageError("--top-k is wrong"), params=given).param == "top_k"
    of_operator = from_failure(UsageError(f"--token-file {Path('x')}: cannot read it"))
    assert (of_operator.status, of_operator.code) == (500, "daemon_misconfigured")


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (GrammarLimitError("takes too much"), "guided_json", "invalid_value"),
        (refusal(RoundErrorCode.INVALID, "sampling.grammar"), "guided_json", "invalid_value"),
        (refusal(RoundErrorCode.INVALID, "sampling.bad_words"), "outrider.bad_word", "invalid_value"),
        (refusal(RoundErrorCode.UNIMPLEMENTED, "sampling.grammar"), "guided_json", "unsupported_parameter"),
        (refusal(RoundErrorCode.INVALID, ""), None, "invalid_value"),
    ],
)
def test_what_a_generation_finds_wrong_has_the_requests_own_words(
    error: OutriderError, param: str | None, code: str
) -> None:
    failure = from_failure(error, "prompt", completion(guided_json={}).constraint_param)
    assert (failure.status, failure.param, failure.code) == (400, param, code)
    assert chat(tools=[TOOL]).constraint_param == "tools" and completion().constraint_param is None


def test_a_grammar_that_could_not_be_looked_at_may_be_sent_again() -> None:
    failure = from_failure(NotCheckedError("the machine is too busy", "try again"))
    assert (failure.status, failure.code, failure.headers) == (
        503,
        "grammar_not_compiled",
        {"Retry-After": "2"},
    )


@pytest.mark.parametrize(
    ("fields", "wire_field", "param"),
    [
        ({"bad_words": ["x"]}, "sampling.bad_words", "bad_words"),
        ({"outrider": {"bad_word": ["x"]}}, "sampling.bad_words", "outrider.bad_word"),
        ({"stop_token_ids": [3]}, "stop_token_ids", "stop_token_ids"),
        ({"outrider": {"stop_token_id": [3]}}, "stop_token_ids", "outrider.stop_token_id"),
        ({"top_k": 3}, "sampling.top_k", "top_k"),
        ({"min_tokens": 3}, "sampling.min_new_tokens", "min_tokens"),
        ({"max_completion_tokens": 3}, "max_new_tokens", "max_completion_tokens"),
        ({"num_predict": 3}, "max_new_tokens", "num_predict"),
        ({}, "max_new_tokens", "max_tokens"),
        ({}, "sampling.top_k", "outrider.top_k"),
    ],
)
def test_an_error_names_the_field_that_the_request_used(
    fields: dict[str, Any], wire_field: str, param: str
) -> None:
    params = completion(**fields).params
    refused = refusal(RoundErrorCode.INVALID, wire_field)
    assert from_failure(refused, params=params).param == param
    assert from_failure(InvalidFieldError(wire_field, "is wrong"), params=params).param == param
