"""The grammar that makes an answer's tool calls well-formed, in llguidance's dialect of Lark.

It is needed where a call is demanded, where a tool is `strict`, and where `response_format` gives the answers without
a call a schema. Spaces between JSON's tokens are those of the templates, which are what the models were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from outrider.edge_client.daemon.tools.families import ToolFamily
from outrider.edge_client.daemon.tools.request import Tool, ToolUse

TokenId = Callable[[str], int | None]
_AS_IN_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False}
_ANYWHERE = {"whitespace_flexible": True}


def tool_grammar(
    family: ToolFamily,
    use: ToolUse,
    token_id: TokenId,
    answer_schema: Mapping[str, object] | None = None,
    has_whitespace: bool = False,
) -> str:
    """Returns the grammar of an answer. `token_id` returns the id of a text that the tokenizer has one token for, else
    None; `answer_schema` is what an answer without a call obeys, with any whitespace where it `has_whitespace`."""
    opening = _token(family.opening, token_id)
    is_token = opening.startswith("<")
    is_free = not use.is_forced and answer_schema is None  # text may be there, with calls or without
    first = "FIRST" if is_free and not is_token else opening
    rules = _calls(family, use, opening, _token(family.closing, token_id), first)
    if use.is_forced:
        start = "calls"
    elif answer_schema is not None:
        start = "answer | calls"
        rules.append(f"answer: %json {_schema(answer_schema, _ANYWHERE if has_whitespace else _COMPACT)}")
    elif not family.opening:  # a call begins with a brace, so other texts do not
        start = "TEXT? | calls"
        rules.append(r"TEXT: /[^{\s](?s:.*)/")
    elif is_token:
        start = "TEXT? | TEXT? calls"
        rules.append("TEXT: /(?s:.+)/")
    else:  # one lexeme with the text before: it is not known before its end which of the two it is
        start = "TEXT? | calls"
        rules += [f"TEXT: {_without(family.opening)}", f"FIRST: TEXT? {opening}"]
    return "\n".join((f"start: {start}", *rules))


def _calls(family: ToolFamily, use: ToolUse, opening: str, closing: str, first: str) -> list[str]:
    """Returns the rules of `calls`, of which the first is opened by `first`."""
    more = use.max_calls(family.max_calls) - 1
    objects = " | ".join(f"object_{index}" for index in range(len(use.callable)))
    if family.is_array:
        rules = [f'calls: {first} "[" object {_repeated(", ", "object", more)} "]"', f"object: {objects}"]
    elif family.opening:
        rest = f'"\\n" object "\\n" {closing}'
        rules = [f"calls: {first} {rest} {_repeated(chr(10), 'call', more)}", f"object: {objects}"]
        rules += [f"call: {opening} {rest}"] if more else []
    else:
        rules = [f"calls: {objects}"]
    for index, tool in enumerate(use.callable):
        before = json.dumps(f'{{"name": "{tool.name}", "{family.arguments_key}": ')
        rules.append(f'object_{index}: {before} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {_schema(_arguments(tool), _AS_IN_TEMPLATES)}")
    return rules


def _repeated(separator: str, rule: str, most: int) -> str:
    return f"({json.dumps(separator)} {rule}){{0,{most}}}" if most else ""


def _token(text: str, token_id: TokenId) -> str:
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


def _without(opening: str) -> str:
    """Returns a pattern for text that does not contain `opening`."""
    escaped = "".join(f"\\{each}" if each in "[]" else each for each in opening)
    return f"/(?s:.+)/ & ~/(?s:.*){escaped}(?s:.*)/"


def _arguments(tool: Tool) -> Mapping[str, object]:
    """Returns the schema of a tool's arguments: none but those that it names, unless it says otherwise."""
    closed = {"additionalProperties": False} if "properties" in tool.parameters else {}
    return {"type": "object", **closed, **tool.parameters}


def _schema(schema: Mapping[str, object], spacing: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": spacing})
