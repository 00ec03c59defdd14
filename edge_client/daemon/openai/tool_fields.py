"""Reads `tools`, `tool_choice`, `parallel_tool_calls`, and the calls in a chat's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import invalid, unsupported
from outrider.edge_client.daemon.tools.request import Tool, ToolChoice, ToolUse

MAX_TOOLS = 128
_MAX_ID_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_tools(given: Mapping[str, object], ignored: list[str]) -> ToolUse | None:
    """Returns what a request says of tools; None where it may call none: it has none, or `tool_choice` says so. Adds
    fields that nothing here knows to `ignored`. Raises `ApiError` naming the field that is wrong."""
    tools = tuple(
        _tool(f"tools[{index}]", each, ignored)
        for index, each in enumerate(_list("tools", given.get("tools")))
    )
    names = [tool.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} items; at most {MAX_TOOLS}")
    if len(set(names)) < len(names):
        raise invalid("tools", "has two functions of one name")
    is_parallel = fields.boolean("parallel_tool_calls", given.get("parallel_tool_calls", True))
    choice = given.get("tool_choice", "auto" if tools else "none")
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise invalid("tool_choice", "goes with tools")
    if choice in ("auto", "required"):
        return ToolUse(tools, ToolChoice(str(choice)), is_parallel=is_parallel)
    return ToolUse(tools, ToolChoice.NAMED, _chosen(choice, names), is_parallel)


def _list(name: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise fields.type_error(name, value, "a list")
    return value


def _tool(where: str, value: object, ignored: list[str]) -> Tool:
    given = fields.section(where, value)
    if given.get("type") != "function":
        raise unsupported(f"{where}.type", f"{given.get('type')!r}; there is function")
    function = {
        key: each
        for key, each in fields.section(f"{where}.function", given.get("function")).items()
        if each is not None
    }
    name = fields.text(f"{where}.function.name", function.get("name"))
    if not _NAME.fullmatch(name):
        raise invalid(f"{where}.function.name", "must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
    fields.text(f"{where}.function.description", function.get("description", ""))
    parameters = fields.section(f"{where}.function.parameters", function.get("parameters", _NO_PARAMETERS))
    if (kind := parameters.get("type", "object")) != "object":  # a call's arguments are read as one
        raise invalid(f"{where}.function.parameters.type", f"is {str(kind)[:40]!r}; it must be 'object'")
    is_strict = fields.boolean(f"{where}.function.strict", function.pop("strict", False))
    for key in given.keys() - {"type", "function"}:
        ignored.append(f"{where}.{key}"[: fields.MAX_NAME_CHARS])
    definition = {"type": "function", "function": {**function, "parameters": parameters}}
    return Tool(name, parameters, definition, is_strict)


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _chosen(choice: object, names: list[str]) -> str:
    if not isinstance(choice, dict):
        raise invalid(
            "tool_choice", f"is {str(choice)[:40]!r}; there are none, auto, required and a function"
        )
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", f"{choice.get('type')!r}; there is function")
    where = "tool_choice.function"
    name = fields.text(f"{where}.name", fields.section(where, choice.get("function")).get("name"))
    if name not in names:
        raise invalid(f"{where}.name", f"is {name[: fields.MAX_NAME_CHARS]!r}, which is not among the tools")
    return name


def message_calls(name: str, value: object) -> list[Mapping[str, object]]:
    """Returns the calls of an assistant's message, with arguments as objects: that is what templates take."""
    return [_call(f"{name}[{index}]", each) for index, each in enumerate(_list(name, value))]


def _call(where: str, value: object) -> Mapping[str, object]:
    given = fields.section(where, value)
    function = fields.section(f"{where}.function", given.get("function"))
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # a half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise invalid(f"{where}.function.arguments", f"is no JSON: {error}") from error
    about = {
        "name": fields.text(f"{where}.function.name", function.get("name")),
        "arguments": dict(fields.section(f"{where}.function.arguments", arguments)),
    }
    return {"id": call_id(f"{where}.id", given.get("id")), "type": "function", "function": about}


def call_id(name: str, value: object) -> str:
    """Returns the id of a call. Raises `ApiError` for anything but a short text."""
    return fields.text(name, value, _MAX_ID_CHARS)
