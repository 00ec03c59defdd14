"""Reads a request's key `outrider`: settings of the edge for this request alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.common.config.fields import leaves_by_key
from outrider.common.config.loader import check_value, did_you_mean
from outrider.common.errors import ConfigError
from outrider.edge_client.config.request_settings import OF_REQUESTS
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import ApiError, invalid
from outrider.edge_client.daemon.openai.grammars import OF_OUTRIDER
from outrider.edge_client.daemon.openai.parsed import ParsedRequest

MAX_ITEMS = 256


def read_extras(parsed: ParsedRequest, given: Mapping[str, object]) -> None:
    """Adds the given settings to `parsed`. Raises `ApiError` naming the key that is wrong."""
    for name, value in given.items():
        if value is None:
            continue
        if name == "tokens":
            parsed.has_tokens = fields.boolean("outrider.tokens", value)
        elif name in OF_OUTRIDER:
            OF_OUTRIDER[name](parsed, f"outrider.{name}", value)
        elif name in OF_REQUESTS:
            parsed.changes[name], parsed.params[name] = _setting(name, value), f"outrider.{name}"
        else:
            name = name[: fields.MAX_NAME_CHARS]
            hint = did_you_mean(name, (*OF_REQUESTS, "tokens"))
            param = f"outrider.{name}"
            raise ApiError(400, f"unknown parameter {param}{hint}", param=param, code="unknown_parameter")


def _setting(name: str, value: object) -> Any:
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise invalid(f"outrider.{name}", f"has {len(value)} items; at most {MAX_ITEMS}")
    try:
        return check_value(leaves_by_key(RunConfig)[name], value, "outrider")
    except ConfigError as error:
        raise invalid(f"outrider.{name}", str(error)) from error
