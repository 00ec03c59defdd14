"""Tool calls read out of texts: any cut into pieces gives the same calls; what only looks like a call stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.edge_client.daemon.tools.families import HERMES, LLAMA, MISTRAL, ToolFamily, family_of
from outrider.edge_client.daemon.tools.reader import CallReader, Delta, TextDelta
from outrider.edge_client.tokenization.chat_template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
NAMES = ("look", "add_2")


class Read(NamedTuple):
    text: str
    calls: list[tuple[str, str]]


def read(family: ToolFamily, pieces: list[str], max_calls: int = 16, is_forced: bool = False) -> Read:
    reader = CallReader(family, NAMES, max_calls, is_forced)
    deltas: list[Delta] = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
    text, calls = "", []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif delta.call_id:
            assert delta.index == len(calls), "calls are numbered in order"
            calls.append((delta.name, delta.arguments))
        else:
            name, arguments = calls[delta.index]
            calls[delta.index] = name, arguments + delta.arguments
    return Read(text, calls)


CASES = [
    (HERMES, "no call", Read("no call", [])),
    (HERMES, "a < b <tool", Read("a < b <tool", [])),
    (HERMES, " spaced \n", Read(" spaced \n", [])),
    (
        HERMES,
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"a": "}\\"{", "b": [1, {}]}}\n</tool_call>\n'
        '<tool_call>{"name":"add_2","arguments":{}}</tool_call>\n',
        Read("I look.", [("look", '{"a": "}\\"{", "b": [1, {}]}'), ("add_2", "{}")]),
    ),
    (HERMES, '<tool_call>\n{"name": "look", "arguments": {"a": 1', Read("", [("look", '{"a": 1')])),
    (
        HERMES,
        'x <tool_call>{"name": "other", "arguments": {}}</tool_call>',
        Read('x <tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ),
    (
        HERMES,
        '<tool_call>look()</tool_call> <tool_call>{"name": "look", "arguments": {}}</tool_call> after',
        Read("<tool_call>look()</tool_call>after", [("look", "{}")]),
    ),
    (HERMES, '<tool_call>\n{"name": "lo', Read('<tool_call>\n{"name": "lo', [])),
    (LLAMA, ' {"name": "look", "parameters": {"a": 1}} ', Read("", [("look", '{"a": 1}')])),
    (LLAMA, '{"name": "look", "arguments": {}}', Read('{"name": "look", "arguments": {}}', [])),
    (LLAMA, '{"answer": 1}', Read('{"answer": 1}', [])),
    (LLAMA, 'Say {"name": "look", "parameters": {}}', Read('Say {"name": "look", "parameters": {}}', [])),
    (
        MISTRAL,
        'ok [TOOL_CALLS] [{"name": "look", "arguments": {"a": 1}, "id": "abcdefghi"}, '
        '{"name": "add_2", "arguments": {"b": "]"}}]',
        Read("ok", [("look", '{"a": 1}'), ("add_2", '{"b": "]"}')]),
    ),
    (MISTRAL, "[TOOL_CALLS] no", Read("[TOOL_CALLS] no", [])),
    (MISTRAL, "[AVAILABLE", Read("[AVAILABLE", [])),
]


DEMANDED = (
    (HERMES, '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n<tool_call>'),
    (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "add_2", '),
    (LLAMA, '{"name": "look", "parameters": {}}'),
)


@pytest.mark.parametrize(("family", "text"), DEMANDED)
def test_a_call_that_is_cut_leaves_no_markup(family: ToolFamily, text: str) -> None:
    for length in range(len(text) + 1):
        demanded = read(family, [text[:length]], is_forced=True)
        assert demanded.text == "", length
        own = read(family, [text[:length]])
        assert own.calls == demanded.calls and (own.text == "" or not own.calls)


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_calls_and_content_do_not_depend_on_the_pieces(family: ToolFamily, text: str, expected: Read) -> None:
    assert read(family, [text]) == expected
    assert read(family, list(text)) == expected
    for cut in range(len(text)):
        assert read(family, [text[:cut], text[cut:]]) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200)))
def test_any_number_of_cuts_gives_the_same(case: tuple[ToolFamily, str, Read], cuts: list[int]) -> None:
    family, text, expected = case
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(family, pieces) == expected


@given(st.text(alphabet='<tool_ca>/{}[]",:\\nameglk \n', max_size=80), st.integers(0, 80))
def test_nothing_is_lost_of_text_without_a_call(text: str, cut: int) -> None:
    for family in (HERMES, LLAMA, MISTRAL):
        found = read(family, [text[:cut], text[cut:]])
        assert found.calls or found.text == text


def test_calls_beyond_the_most_are_left_out() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert read(HERMES, [call * 3], max_calls=1) == Read("", [("look", "{}")])


@pytest.mark.parametrize(
    ("name", "family"), [("qwen2_5", HERMES), ("llama3_1", LLAMA), ("mistral_nemo", MISTRAL)]
)
def test_a_published_template_writes_the_calls_that_its_family_reads(name: str, family: ToolFamily) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert family_of(source) is family
    template = ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"})
    arguments = {"city": "Zürich", "days": [1, 2]}
    call_id = family.new_id()
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    user = {"role": "user", "content": "How is it?"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    before = template.render([user], tools)
    assert '"name": "look"' in before
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": call_id}
    whole = template.render([user, assistant, result], tools)
    written = whole.removeprefix(before)
    for end in ("<|im_end|>", "<|eot_id|>", "</s>"):
        written = written.partition(end)[0]
    if family is MISTRAL:  # it has the tools before the last question alone
        written = "[TOOL_CALLS]" + whole.partition("[TOOL_CALLS]")[2].partition("</s>")[0]
    found = read(family, [written])
    assert found.text == "" and [name for name, _ in found.calls] == ["look"]
    assert json.loads(found.calls[0][1]) == arguments
    assert "sunny" in whole


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "<tool_call>\n<function=", "[TOOL_CALLS]name[ARGS]{}", "{{ tools }}"]
)
def test_a_template_without_calls_that_are_read_has_no_family(source: str) -> None:
    assert family_of(source) is None
