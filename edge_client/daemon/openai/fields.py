"""Reads single values of a request's JSON; raises `ApiError` for a wrong type or range."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.common.types import TokenIds
from outrider.edge_client.daemon.openai.errors import ApiError, invalid

MAX_CHOICES = 128  # of a request
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_IDS = 256
MAX_USER_CHARS = 128
MAX_NAME_CHARS = 64  # of a field that there is none of: to look for the nearest takes time by its length
_MAX_DIGITS = 10  # of a token id


def boolean(name: str, value: object) -> bool:
    """Returns a truth value. Raises `ApiError` for anything else."""
    if not isinstance(value, bool):
        raise type_error(name, value, "true or false")
    return value


def text(name: str, value: object, max_chars: int | None = None) -> str:
    """Returns a string of at most `max_chars`. Raises `ApiError` for anything else."""
    if not isinstance(value, str):
        raise type_error(name, value, "text")
    if max_chars is not None and len(value) > max_chars:
        raise invalid(name, f"is {len(value)} characters long; at most {max_chars}")
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Returns an integer between `low` and `high`. Raises `ApiError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(name, value, "an integer")
    if not low <= value <= high:
        raise invalid(name, f"is {value}; it must be from {low} to {high}")
    return value


def number(name: str, value: object, low: float, high: float) -> float:
    """Returns a number between `low` and `high`. Raises `ApiError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise type_error(name, value, "a number")
    if not low <= value <= high:
        raise invalid(name, f"is {value}; it must be from {low:g} to {high:g}")
    return float(value)


def section(name: str, value: object) -> Mapping[str, object]:
    """Returns an object. Raises `ApiError` for anything else."""
    if not isinstance(value, dict):
        raise type_error(name, value, "an object")
    return value


def stops(name: str, value: object) -> tuple[str, ...]:
    """Returns stop strings, given as one string or a list of them. Raises `ApiError` for anything else."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise type_error(name, value, "text, or a list of texts")
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
        raise type_error(name, value, "a list of token ids")
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


def prompts(name: str, value: object, num_tokens: int) -> tuple[str | TokenIds, ...]:
    """Returns the prompts, each a text or token ids: `value` is one, or a list of several."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > MAX_CHOICES:
            raise invalid(name, f"has {len(value)} prompts; at most {MAX_CHOICES}")
        several = len(value) > 1
        return tuple(
            _prompt(f"{name}[{index}]" if several else name, each, num_tokens)
            for index, each in enumerate(value)
        )
    return (_prompt(name, value, num_tokens),)


def _prompt(name: str, value: object, num_tokens: int) -> str | TokenIds:
    if not value and isinstance(value, str | list):
        raise invalid(name, "is empty")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise type_error(name, value, "text, or a list of token ids")
    return tuple(integer(name, each, 0, num_tokens - 1) for each in value)


def type_error(name: str, value: object, expected: str) -> ApiError:
    """Returns the error for a value of another type."""
    found = "nothing" if value is None else "an object" if isinstance(value, dict) else type(value).__name__
    return invalid(name, f"must be {expected}, not {found}", "invalid_type")
