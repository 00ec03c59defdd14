"""Reads what a request's text must obey: OpenAI's `response_format`, vLLM's fields, llama-server's `json_schema`,
and those of the object `outrider`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import invalid, unsupported
from outrider.edge_client.daemon.openai.parsed import ParsedRequest

ANY_OBJECT = {"type": "object"}
MAX_CHOICES = 1024
_EMPTY_TEXT = "(?:)"  # matches it; an empty setting is none


def read_response_format(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads `text`, `json_object` and `json_schema`. A schema is obeyed whether it is `strict` or not."""
    given = fields.section(name, value)
    kind = given.get("type")
    if kind == "text":
        return
    if kind == "json_object":
        _set(parsed, "json_schema", ANY_OBJECT, name)
    elif kind == "json_schema":
        where = f"{name}.json_schema"
        about = fields.section(where, given.get("json_schema"))
        given_schema = about.get("schema")
        schema = fields.section(f"{where}.schema", ANY_OBJECT if given_schema is None else given_schema)
        _set(parsed, "json_schema", schema, f"{where}.schema")
    else:
        raise unsupported(f"{name}.type", f"{kind!r}; there are text, json_object and json_schema")


def read_structured_outputs(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads vLLM's object, which holds one of its constraints."""
    for key, each in fields.section(name, value).items():
        if each is None or each is False:
            continue
        if key not in _STRUCTURED:
            raise unsupported(f"{name}.{key}", f"there are {', '.join(_STRUCTURED)}")
        _STRUCTURED[key](parsed, f"{name}.{key}", each)


def read_json(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads a schema, an object or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(name, f"is no JSON: {error}") from error
    _set(parsed, "json_schema", fields.section(name, value), name)


def read_regex(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads a regular expression that the whole text matches."""
    _set(parsed, "regex", _not_empty(name, value), name)


def read_lark(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads a Lark grammar."""
    _set(parsed, "grammar", _not_empty(name, value), name)


def read_choice(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads texts, of which one is generated."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise invalid(name, f"must be a list of 1 to {MAX_CHOICES} texts", "invalid_type")
    texts = [fields.text(f"{name}[{index}]", each) for index, each in enumerate(value)]
    _set(parsed, "regex", "|".join(map(_escaped, texts)) or _EMPTY_TEXT, name)


def _not_empty(name: str, value: object) -> str:
    if not (text := fields.text(name, value)):
        raise invalid(name, "is empty; leave it out where the text may be any")
    return text


def _read_object(parsed: ParsedRequest, name: str, value: object) -> None:
    if fields.boolean(name, value):
        _set(parsed, "json_schema", ANY_OBJECT, name)


def _set(parsed: ParsedRequest, setting: str, value: object, param: str) -> None:
    if parsed.grammar_param:
        raise invalid(param, f"does not go with {parsed.grammar_param}: give one of them")
    parsed.grammar_param = param
    parsed.changes[setting] = value if isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    """Returns a pattern that matches a text alone; `re.escape` escapes what other dialects know no escape for."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text)


_STRUCTURED: dict[str, Callable[[ParsedRequest, str, object], None]] = {
    "json": read_json,
    "regex": read_regex,
    "choice": read_choice,
    "grammar": read_lark,
    "json_object": _read_object,
}
OF_OUTRIDER: dict[str, Callable[[ParsedRequest, str, object], None]] = {  # by key of `RunConfig`
    "json_schema": read_json,
    "regex": read_regex,
    "grammar": read_lark,
}
READERS: dict[str, Callable[[ParsedRequest, str, object], None]] = {
    "response_format": read_response_format,
    "structured_outputs": read_structured_outputs,
    "guided_json": read_json,
    "guided_regex": read_regex,
    "guided_choice": read_choice,
    "guided_grammar": read_lark,
    "json_schema": read_json,
}
