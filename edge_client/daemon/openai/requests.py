"""Reads a request's JSON into a `ParsedRequest`. Every field is read, or refused by name; none is ignored.

`null` counts as not given. A field of OpenAI's that is not supported may still ask for what is done anyway
(`n: 1`, `echo: false`): only asking for more is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.common.config.loader import did_you_mean
from outrider.edge_client.config.request_settings import OF_REQUESTS
from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import ApiError, invalid, unsupported
from outrider.edge_client.daemon.openai.extras import read_extras
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
_Reader = Callable[[ParsedRequest, str, object], None]


def parse_request(kind: Kind, body: object, num_tokens: int) -> ParsedRequest:
    """Returns the request that `body` describes; `num_tokens` is the tokenizer's size. Raises `ApiError`
    naming the first field that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    parsed = ParsedRequest(kind)
    known = _COMMON | (_CHAT if kind is Kind.CHAT else _COMPLETION)
    refused = _REFUSED | (_REFUSED_IN_CHAT if kind is Kind.CHAT else _REFUSED_IN_COMPLETIONS)
    for name, value in given.items():
        if name in known:
            known[name](parsed, name, value)
        elif name in refused:
            _check_neutral(name, value, refused[name])
        elif name in ("prompt", "messages"):
            _read_subject(parsed, name, value, num_tokens)
        elif name == "outrider":
            read_extras(parsed, fields.section(name, value))
        else:
            raise _unknown(name, (*known, *refused, "prompt", "messages", "outrider"))
    _check_whole(parsed, given)
    return parsed


def _read_subject(parsed: ParsedRequest, name: str, value: object, num_tokens: int) -> None:
    if name == "messages" and parsed.kind is Kind.CHAT:
        parsed.messages = fields.messages(name, value)
    elif name == "prompt" and parsed.kind is Kind.COMPLETION:
        parsed.prompt = fields.prompt(name, value, num_tokens)
    else:
        route = "/v1/chat/completions" if name == "messages" else "/v1/completions"
        raise unsupported(name, f"it belongs to {route}")


def _check_whole(parsed: ParsedRequest, given: Mapping[str, object]) -> None:
    subject = "messages" if parsed.kind is Kind.CHAT else "prompt"
    if subject not in given:
        raise ApiError(400, f"{subject} is missing", param=subject, code="missing_required_parameter")
    if "stream_options" in given and not parsed.is_stream:
        raise invalid("stream_options", "goes with stream: true")
    if parsed.has_tokens and not parsed.is_stream:
        raise invalid("outrider.tokens", "goes with stream: true")
    if "top_logprobs" in given and not given.get("logprobs"):
        raise invalid("top_logprobs", "goes with logprobs: true")
    names = ("max_tokens", "max_completion_tokens")
    if len({given[name] for name in names if name in given}) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens; they mean the same, give one")


# ------------------------------------------------------------------------------------- what is read


def _setting(name: str, read: Callable[[str, object], object]) -> _Reader:
    def reader(parsed: ParsedRequest, param: str, value: object) -> None:
        parsed.changes[name] = read(param, value)

    return reader


def _attribute(name: str, read: Callable[[str, object], object]) -> _Reader:
    def reader(parsed: ParsedRequest, param: str, value: object) -> None:
        setattr(parsed, name, read(param, value))

    return reader


def _read_stream_options(parsed: ParsedRequest, name: str, value: object) -> None:
    for key, each in fields.section(name, value).items():
        param = f"{name}.{key}"
        if key == "include_usage":
            parsed.has_usage = fields.boolean(param, each)
        elif key == "include_obfuscation":
            if fields.boolean(param, each):
                raise unsupported(param, "chunks carry no padding")
        else:
            raise _unknown(param, (f"{name}.include_usage",))


def _read_logprobs(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads how many log-probabilities are wanted: a number in completions; a truth value in chats, where
    `top_logprobs` has the number."""
    if parsed.kind is Kind.COMPLETION:
        parsed.num_top_logprobs = fields.integer(name, value, 0, MAX_TOP_LOGPROBS)
    elif not fields.boolean(name, value):
        parsed.num_top_logprobs = None
    elif parsed.num_top_logprobs is None:
        parsed.num_top_logprobs = 0


def _read_top_logprobs(parsed: ParsedRequest, name: str, value: object) -> None:
    parsed.num_top_logprobs = fields.integer(name, value, 0, MAX_TOP_LOGPROBS)


_READ_MAX_TOKENS = _setting("max_new_tokens", lambda name, value: fields.integer(name, value, 1, MAX_TOKENS))
_COMMON: dict[str, _Reader] = {
    "model": _attribute("model", fields.text),
    "stream": _attribute("is_stream", fields.boolean),
    "stream_options": _read_stream_options,
    "max_tokens": _READ_MAX_TOKENS,
    "temperature": _setting("temperature", lambda name, value: fields.number(name, value, 0, 1000)),
    "top_p": _setting("top_p", lambda name, value: fields.number(name, value, 1e-6, 1)),
    "presence_penalty": _setting("presence_penalty", lambda name, value: fields.number(name, value, -2, 2)),
    "frequency_penalty": _setting("frequency_penalty", lambda name, value: fields.number(name, value, -2, 2)),
    "logit_bias": _setting("logit_bias", fields.biases),
    "stop": _setting("stop", fields.stops),
    "seed": _attribute("seed", lambda name, value: fields.integer(name, value, 0, 2**64 - 1)),
    "user": _attribute("user", lambda name, value: fields.text(name, value, fields.MAX_USER_CHARS)),
    "logprobs": _read_logprobs,
}
_COMPLETION: dict[str, _Reader] = {}
_CHAT: dict[str, _Reader] = {
    "max_completion_tokens": _READ_MAX_TOKENS,
    "top_logprobs": _read_top_logprobs,
}

# ---------------------------------------------------------------------------------- what is refused

_Refusal = tuple[tuple[object, ...], str]  # values that ask for nothing, and why the others are refused
_NO_TOOLS = "this server calls no tools"
_REFUSED: dict[str, _Refusal] = {
    "n": ((1,), "one choice a request; send several requests, each with a seed of its own"),
    "metadata": (({},), "nothing is stored"),
    "safety_identifier": ((), "nothing is reported to anybody"),
    "prompt_cache_key": ((), "prefixes are found by their text"),
    "prompt_cache_retention": ((), "prefixes are kept as memory allows"),
}
_REFUSED_IN_COMPLETIONS: dict[str, _Refusal] = {
    "best_of": ((1,), "one choice a request"),
    "echo": ((False,), "the prompt is not sent back"),
    "suffix": (("",), "text is continued, not filled in"),
}
_REFUSED_IN_CHAT: dict[str, _Refusal] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "response_format": (({"type": "text"},), "text is not constrained to a grammar"),
    "modalities": ((["text"],), "this model writes text"),
    "audio": ((), "this model writes text"),
    "prediction": ((), "the draft model predicts here"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "reasoning_effort": (("none",), "this model has no such setting"),
    "verbosity": ((), "this model has no such setting"),
    "web_search_options": ((), "nothing is searched"),
}
# Where other servers take these: top level (vLLM, llama-server) or `options` (ollama).
_ELSEWHERE = {
    "repeat_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "bad_words": "bad_word",
    "stop_token_ids": "stop_token_id",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
}


def _check_neutral(name: str, value: object, refusal: _Refusal) -> None:
    neutral, reason = refusal
    if not any(value == each and type(value) is type(each) for each in neutral):
        raise unsupported(name, reason)


def _unknown(name: str, known: tuple[str, ...]) -> ApiError:
    name = name[: fields.MAX_NAME_CHARS]
    ours = _ELSEWHERE.get(name, name)
    if ours in OF_REQUESTS:
        hint = f'; give it as "outrider": {{"{ours}": ...}}'
    elif ours != name:
        hint = f"; it is called {ours} here"
    else:
        hint = did_you_mean(name, known)
    return ApiError(400, f"unknown parameter {name}{hint}", param=name, code="unknown_parameter")
