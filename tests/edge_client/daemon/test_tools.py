"""Tools through the `openai` package, with the templates that Qwen, Llama and Mistral publish."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import numpy as np
import openai
import pydantic
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon, wait_until
from support.grammars import NUM_TOKENS, TOKENIZER, vocabulary

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.grammar.state import GrammarState
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind
from outrider.edge_client.daemon.openai.tool_fields import read_tools
from outrider.edge_client.daemon.tools.families import FAMILIES, HERMES, LLAMA, MISTRAL, ToolFamily
from outrider.edge_client.daemon.tools.grammar import tool_grammar
from outrider.edge_client.daemon.tools.reader import CallDelta, CallReader, TextDelta
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

TEMPLATES = Path(__file__).parent / "templates"
PUBLISHED = {"qwen2_5": HERMES, "llama3_1": LLAMA, "mistral_nemo": MISTRAL}


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: Literal["Berlin", "Paris"]
    days: list[Literal[1, 2]] = pydantic.Field(min_length=1, max_length=2)


class Stop(pydantic.BaseModel):
    """Ends the conversation."""

    why: str = pydantic.Field(max_length=6)


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Stop)]
USER: Any = {"role": "user", "content": "How is the weather in Berlin?"}
DEMAND: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
WEATHER: Any = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "template.jinja"
    shutil.copy(TEMPLATES / "qwen2_5.jinja", path)
    return path


@pytest.fixture(scope="module")
def process(verifier: VerifierServer, template: Path) -> Iterator[DaemonProcess]:
    with running_daemon(f"127.0.0.1:{verifier.port}", "--chat-template", str(template)) as process:
        yield process


@pytest.fixture(scope="module")
def tools(process: DaemonProcess) -> Iterator[openai.OpenAI]:
    """A client of a daemon with Qwen's template."""
    url = f"{process.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    common = {"model": "outrider", "max_tokens": 96, "seed": 5}
    return client.chat.completions.create(messages=messages, **{**common, **fields})


@pytest.mark.parametrize("name", ["llama3_1", "mistral_nemo", "qwen2_5"])
def test_a_conversation_with_a_tool_goes_round(
    tools: openai.OpenAI, process: DaemonProcess, template: Path, name: str
) -> None:
    template.write_text((TEMPLATES / f"{name}.jinja").read_text())
    process.server.process.send_signal(signal.SIGHUP)
    family = PUBLISHED[name]

    def is_loaded() -> bool:
        (model,) = httpx.get(f"{process.url}/v1/models").json()["data"]
        return bool(model["outrider"]["tool_calls"] == family.name)

    assert wait_until(is_loaded)
    first = ask(tools, [USER], tools=TOOLS, tool_choice=WEATHER)
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].message.content is None and first.choices[0].finish_reason == "stop"
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"}
    told = [USER, first.choices[0].message.model_dump(exclude_none=True), result]
    last = ask(tools, told, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert last.choices[0].message.tool_calls is None and last.choices[0].message.content


def test_a_stream_is_read_by_the_parse_helper(tools: openai.OpenAI) -> None:
    with tools.chat.completions.stream(
        model="outrider", messages=[USER], max_tokens=400, seed=6, **DEMAND
    ) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls" and not message.content
    assert message.tool_calls
    for call in message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Weather | Stop)
    whole = ask(tools, [USER], seed=6, max_tokens=400, **DEMAND)
    pairs = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert pairs == [
        (call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls
    ]


def test_a_demanded_call_is_the_targets_own(tools: openai.OpenAI) -> None:
    def called(mode: str) -> list[tuple[str, str]]:
        body = {"outrider": {"mode": mode}}
        answer = ask(tools, [USER], tools=TOOLS, tool_choice="required", seed=7, extra_body=body)
        return [
            (call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls
        ]

    assert called("speculative") == called("cloud-only")


def test_calls_of_the_models_own_choice_are_read(tools: openai.OpenAI) -> None:
    text = 'Let me see!\\n<tool_call>\\n\\{"name": "Weather", "arguments": \\{"city": "Paris"\\}\\}\\n</tool_call>'
    answer = ask(tools, [USER], tools=TOOLS, extra_body={"guided_regex": text})
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see!"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    stream = ask(tools, [USER], tools=TOOLS, extra_body={"guided_regex": text}, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see!"
    pieces = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert pieces[0].id and pieces[0].function.name == "Weather"
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "Paris"}'
    free = ask(tools, [USER], tools=TOOLS, max_tokens=8).choices[0]
    assert free.message.content and free.message.tool_calls is None


def test_with_a_schema_an_answer_is_that_or_a_call(tools: openai.OpenAI) -> None:
    choice = ask(tools, [USER], tools=TOOLS, response_format=SCHEMA, max_tokens=400).choices[0]
    assert choice.message.tool_calls or json.loads(choice.message.content)["yes"] in (True, False)
    schema = SCHEMA["json_schema"]["schema"]
    contents = [written(HERMES, {"tools": TOOLS, "schema": schema}, seed)[0] for seed in range(8)]
    assert "" in contents, "calls"
    assert {json.loads(each)["yes"] for each in contents if each} <= {True, False} and any(contents)


SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "Answer",
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "guided_regex", "demands a call"),
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "a", "strict": True, "parameters":
            {"properties": {"a": {"type": "strin"}}}}}]}, "tools", "strin"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(
    tools: openai.OpenAI, fields: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        ask(tools, [USER], **{"tools": TOOLS, **fields})
    assert caught.value.param == param


def test_a_template_without_tools_refuses_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Qwen and Hermes, Llama 3, Mistral") as caught:
        ask(client, [USER], tools=TOOLS)
    assert caught.value.param == "tools"
    call = {"id": "1", "type": "function", "function": {"name": "Stop", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "17 degrees"}
    with pytest.raises(openai.BadRequestError, match="calls of tools"):
        ask(client, [USER, {"role": "assistant", "tool_calls": [call]}, result])


# ------------------------------------------------------------------------------------------- the grammar


def written(family: ToolFamily, fields: dict[str, Any], seed: int) -> tuple[str, list[tuple[str, str]]]:
    """A text that a model without any sense writes under the grammar, and the calls in it."""
    use = read_tools(fields, [])
    assert use is not None
    text = tool_grammar(family, use, lambda name: None, fields.get("schema"))
    state = GrammarState(vocabulary().compile(Grammar(GrammarKind.LARK, text)).compiled)
    chance = np.random.default_rng(seed)
    reader = CallReader(family, [tool.name for tool in use.callable], use.max_calls(family.max_calls))
    deltas = []
    while True:
        words = state.allowed()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:NUM_TOKENS])
        token_id = int(0 if 0 in allowed and chance.random() < 0.3 else chance.choice(allowed))
        if token_id == 0:
            break
        state.extend([token_id])
        deltas += reader.feed(vocabulary().text(token_id))
    deltas += reader.end()
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    names = [delta.name for delta in calls if delta.call_id]
    arguments = ["".join(d.arguments for d in calls if d.index == index) for index in range(len(names))]
    content = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_whatever_a_model_writes_under_a_demand_is_read_as_calls(family: ToolFamily) -> None:
    names, most = set(), 0
    for seed in range(12):
        content, calls = written(family, {"tools": TOOLS, "tool_choice": "required"}, seed)
        assert content == "" and 1 <= len(calls) <= family.max_calls
        for name, arguments in calls:
            cast(Any, Weather if name == "Weather" else Stop).model_validate_json(arguments)
            names.add(name)
        most = max(most, len(calls))
        single = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        assert len(written(family, single, seed)[1]) == 1
    assert names == {"Weather", "Stop"} and (most > 1 or family is LLAMA)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_with_strict_tools_every_call_of_a_free_text_is_valid(family: ToolFamily) -> None:
    use = read_tools({"tools": TOOLS}, [])
    assert use is not None
    text = tool_grammar(family, use, lambda name: None)
    compiled = vocabulary().compile(Grammar(GrammarKind.LARK, text)).compiled
    opening = family.opening + ("[" if family.is_array else "\n" if family.opening else "")
    call = f'{opening}{{"name": "Weather", "{family.arguments_key}": {{"city": "'
    before = "" if family is LLAMA else "Well: "
    for path, is_allowed in (("Par", True), ("Rom", False)):
        ids = vocabulary().encode(before + call + path)
        state = GrammarState(compiled)
        state.extend(ids[:-1])
        bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
        assert bool(bits[ids[-1]]) is is_allowed, path


def test_special_tokens_are_asked_for_by_id_and_shown(tmp_path: Path) -> None:
    """Mistral's opening is a special token, which has no text of its own."""
    source = json.loads(TOKENIZER.read_text())
    opening = {"id": NUM_TOKENS, "content": "[TOOL_CALLS]", "special": True, "normalized": False}
    source["added_tokens"].append({**opening, "single_word": False, "lstrip": False, "rstrip": False})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(source))
    tokenizer = EdgeTokenizer(path)
    use = read_tools({"tools": TOOLS, "tool_choice": "required"}, [])
    assert use is not None and tokenizer.is_special(NUM_TOKENS) and not tokenizer.is_special(5)
    assert f"calls: <[{NUM_TOKENS}]>" in tool_grammar(MISTRAL, use, tokenizer.token_id)
    free = read_tools({"tools": TOOLS}, [])
    assert free is not None
    known = Vocabulary.open(path, NUM_TOKENS + 1, (0,))
    grammar = Grammar(GrammarKind.LARK, tool_grammar(MISTRAL, free, tokenizer.token_id))
    state = GrammarState(known.compile(grammar).compiled)
    for ids in ([], tokenizer.encode("So", is_complete=True)):
        state.extend(ids)
        assert np.unpackbits(state.allowed().view(np.uint8), bitorder="little")[NUM_TOKENS]
    for has_special, text in ((False, "a"), (True, "a[TOOL_CALLS]")):
        decode = tokenizer.decoder(None, has_special)
        ids = [*tokenizer.encode("a", is_complete=True), NUM_TOKENS]
        assert "".join(map(decode, ids)) == text
