"""Reads a chat's messages into what its template takes."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import invalid, unsupported
from outrider.edge_client.daemon.openai.tool_fields import call_id, message_calls

_ROLES = ("system", "user", "assistant", "tool")
_NOT_READ = ("function_call", "audio", "tool_calls", "tool_call_id")  # empty, they ask for nothing
_PARTS = ("text", "input_text")


def read_messages(name: str, value: object, ignored: list[str]) -> tuple[Mapping[str, object], ...]:
    """Returns a chat's messages with role and content, and an assistant's calls, and adds fields that nothing here
    knows to `ignored`. Raises `ApiError` naming the part that is wrong."""
    if not isinstance(value, list):
        raise fields.type_error(name, value, "a list of messages")
    if not value:
        raise invalid(name, "is empty")
    return tuple(_message(f"{name}[{index}]", each, ignored) for index, each in enumerate(value))


def _message(name: str, value: object, ignored: list[str]) -> Mapping[str, object]:
    given = {key: each for key, each in fields.section(name, value).items() if each is not None}
    role = fields.text(f"{name}.role", given.pop("role", None))
    if role == "developer":  # OpenAI's newer word for the same
        role = "system"
    if role not in _ROLES:
        raise unsupported(f"{name}.role", f"{role!r}; there are {', '.join((*_ROLES, 'developer'))}")
    calls = message_calls(f"{name}.tool_calls", given.pop("tool_calls", None)) if role == "assistant" else []
    content = given.pop("content", "" if calls else None)
    message: dict[str, object] = {"role": role, "content": _content(name, content)}
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = call_id(f"{name}.tool_call_id", given.pop("tool_call_id", None))
    if "name" in given:
        message["name"] = fields.text(f"{name}.name", given.pop("name"))
    for key, each in given.items():
        if key in _NOT_READ:
            if each:
                raise unsupported(f"{name}.{key}", f"a message of {role} has role, content and name here")
        else:
            ignored.append(f"{name}.{key}"[: fields.MAX_NAME_CHARS])
    return message


def _content(name: str, value: object) -> str:
    if not isinstance(value, list):
        return fields.text(f"{name}.content", value)
    parts = []
    for index, each in enumerate(value):
        where = f"{name}.content[{index}]"
        part = fields.section(where, each)
        if part.get("type") not in _PARTS:
            raise unsupported(f"{where}.type", f"{part.get('type')!r}; this model reads text")
        parts.append(fields.text(f"{where}.text", part.get("text")))
    return "".join(parts)
