"""Reads single values of a request's JSON; raises `ApiError` for a wrong type or range."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.common.types import TokenIds
from outrider.edge_client.daemon.openai.errors import ApiError, invalid, unsupported

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_IDS = 256
MAX_USER_CHARS = 128
MAX_NAME_CHARS = 64  # of a field that there is none of: to look for the nearest takes time by its length
_MAX_DIGITS = 10  # of a token id
_OF_MESSAGES = ("tool_calls", "tool_call_id", "function_call", "audio")  # empty, they ask for nothing
_PARTS = ("text", "input_text")


def boolean(name: str, value: object) -> bool:
    """Returns a truth value. Raises `ApiError` for anything else."""
    if not isinstance(value, bool):
        raise _type_error(name, value, "true or false")
    return value


def text(name: str, value: object, max_chars: int | None = None) -> str:
    """Returns a string of at most `max_chars`. Raises `ApiError` for anything else."""
    if not isinstance(value, str):
        raise _type_error(name, value, "text")
    if max_chars is not None and len(value) > max_chars:
        raise invalid(name, f"is {len(value)} characters long; at most {max_chars}")
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Returns an integer between `low` and `high`. Raises `ApiError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _type_error(name, value, "an integer")
    if not low <= value <= high:
        raise invalid(name, f"is {value}; it must be from {low} to {high}")
    return value


def number(name: str, value: object, low: float, high: float) -> float:
    """Returns a number between `low` and `high`. Raises `ApiError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise _type_error(name, value, "a number")
    if not low <= value <= high:
        raise invalid(name, f"is {value}; it must be from {low:g} to {high:g}")
    return float(value)


def section(name: str, value: object) -> Mapping[str, object]:
    """Returns an object. Raises `ApiError` for anything else."""
    if not isinstance(value, dict):
        raise _type_error(name, value, "an object")
    return value


def stops(name: str, value: object) -> tuple[str, ...]:
    """Returns stop strings, given as one string or a list of them. Raises `ApiError` for anything else."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise _type_error(name, value, "text, or a list of texts")
    if len(items) > MAX_STOPS:
        raise invalid(name, f"has {len(items)} items; at most {MAX_STOPS}")
    for item in items:
        if not text(name, item, MAX_STOP_CHARS):
            raise invalid(name, "has an empty text; it would stop at once")
    return tuple(items)


def top_k(name: str, value: object) -> int:
    """Returns how many tokens are sampled from; 0 and, as in vLLM, -1 are off. Raises `ApiError` for anything else."""
    return max(0, integer(name, value, -1, 2**32 - 1))


def token_ids(name: str, value: object) -> TokenIds:
    """Returns a list of token ids. Raises `ApiError` for anything else."""
    if not isinstance(value, list):
        raise _type_error(name, value, "a list of token ids")
    if len(value) > MAX_IDS:
        raise invalid(name, f"has {len(value)} items; at most {MAX_IDS}")
    return tuple(integer(name, each, 0, 2**32 - 1) for each in value)


def biases(name: str, value: object) -> tuple[str, ...]:
    """Returns an object of token id to bias as ID:B strings, the form that `logit_bias` has in the
    configuration."""
    entries = []
    for token_id, bias in section(name, value).items():
        if not token_id.isdecimal() or len(token_id) > _MAX_DIGITS:
            raise invalid(name, f"{token_id[:MAX_USER_CHARS]!r} is not a token id")
        entries.append(f"{int(token_id)}:{number(name, bias, -100, 100)!r}")
    return tuple(entries)


def prompt(name: str, value: object, num_tokens: int) -> str | TokenIds:
    """Returns a prompt: text or token ids, or a list that holds one of them."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise unsupported(name, f"{len(value)} prompts in a request; send one request for each")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise invalid(name, "is empty")
        return value
    if not isinstance(value, list):
        raise _type_error(name, value, "text, or a list of token ids")
    if not value:
        raise invalid(name, "is empty")
    return tuple(integer(name, each, 0, num_tokens - 1) for each in value)


def messages(name: str, value: object, ignored: list[str]) -> tuple[Mapping[str, object], ...]:
    """Returns a chat's messages with role and content, and adds fields that nothing here knows to `ignored`. Raises
    `ApiError` naming the part that is wrong."""
    if not isinstance(value, list):
        raise _type_error(name, value, "a list of messages")
    if not value:
        raise invalid(name, "is empty")
    return tuple(_message(f"{name}[{index}]", each, ignored) for index, each in enumerate(value))


def _message(name: str, value: object, ignored: list[str]) -> Mapping[str, object]:
    given = {key: each for key, each in section(name, value).items() if each is not None}
    role = text(f"{name}.role", given.pop("role", None))
    if role == "developer":  # OpenAI's newer word for the same
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise unsupported(f"{name}.role", f"{role!r}; there are system, developer, user and assistant")
    message: dict[str, object] = {"role": role, "content": _content(name, given.pop("content", None))}
    if "name" in given:
        message["name"] = text(f"{name}.name", given.pop("name"))
    for key, each in given.items():
        if key in _OF_MESSAGES:
            if each:
                raise unsupported(f"{name}.{key}", "messages have role, content and name here")
        else:
            ignored.append(f"{name}.{key}"[:MAX_NAME_CHARS])
    return message


def _content(name: str, value: object) -> str:
    if not isinstance(value, list):
        return text(f"{name}.content", value)
    parts = []
    for index, each in enumerate(value):
        where = f"{name}.content[{index}]"
        part = section(where, each)
        if part.get("type") not in _PARTS:
            raise unsupported(f"{where}.type", f"{part.get('type')!r}; this model reads text")
        parts.append(text(f"{where}.text", part.get("text")))
    return "".join(parts)


def _type_error(name: str, value: object, expected: str) -> ApiError:
    found = "nothing" if value is None else "an object" if isinstance(value, dict) else type(value).__name__
    return invalid(name, f"must be {expected}, not {found}", "invalid_type")
