"""Reads a request's JSON into a `ParsedRequest`.

`null` counts as not given. A known field is read, has no say (`neutral.PASSED`), or is refused by name where it asks
for what is not built: `use_beam_search: false` asks for what is done anyway. One that nothing here knows is ignored,
and the answer says so; `is_strict` refuses it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.common.config.loader import did_you_mean
from outrider.edge_client.daemon.openai import fields
from outrider.edge_client.daemon.openai.errors import ApiError, invalid, unsupported
from outrider.edge_client.daemon.openai.extras import read_extras
from outrider.edge_client.daemon.openai.grammars import READERS
from outrider.edge_client.daemon.openai.messages import read_messages
from outrider.edge_client.daemon.openai.neutral import (
    PASSED,
    PASSED_IN_STREAM_OPTIONS,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    check_neutral,
)
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.tool_fields import read_tools

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")  # read together
_Reader = Callable[[ParsedRequest, str, object], None]


def parse_request(kind: Kind, body: object, num_tokens: int, is_strict: bool = False) -> ParsedRequest:
    """Returns the request that `body` describes; `num_tokens` is the tokenizer's size. Raises `ApiError`
    naming the first field that is wrong, or with `is_strict` unknown."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    parsed = ParsedRequest(kind)
    known = _COMMON | (_CHAT if kind is Kind.CHAT else _COMPLETION)
    refused = REFUSED | (REFUSED_IN_CHAT if kind is Kind.CHAT else REFUSED_IN_COMPLETIONS)
    for name, value in given.items():
        if name in known:
            known[name](parsed, name, value)
        elif name in refused:
            check_neutral(name, value, refused[name])
        elif name in ("prompt", "messages"):
            _read_subject(parsed, name, value, num_tokens)
        elif name == "outrider":
            read_extras(parsed, fields.section(name, value))
        elif name in PASSED or (name in _OF_TOOLS and kind is Kind.CHAT):
            continue
        elif is_strict:
            raise _unknown(name, (*known, *refused, *PASSED, *_OF_TOOLS, "prompt", "messages", "outrider"))
        else:
            parsed.ignored.append(name[: fields.MAX_NAME_CHARS])
    if kind is Kind.CHAT:
        parsed.tool_use = read_tools(given, parsed.ignored)
    if is_strict and parsed.ignored:
        raise _unknown(parsed.ignored[0], ())
    _check_whole(parsed, given)
    return parsed


def _read_subject(parsed: ParsedRequest, name: str, value: object, num_tokens: int) -> None:
    if name == "messages" and parsed.kind is Kind.CHAT:
        parsed.messages = read_messages(name, value, parsed.ignored)
    elif name == "prompt" and parsed.kind is Kind.COMPLETION:
        parsed.prompts = fields.prompts(name, value, num_tokens)
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
    if given.get("best_of", parsed.num_choices) != parsed.num_choices:
        raise unsupported("best_of", "all choices are returned; give n")
    if parsed.num_texts > fields.MAX_CHOICES:
        raise invalid("n", f"times the prompts is {parsed.num_texts}; at most {fields.MAX_CHOICES}")
    if parsed.is_prompt_only and not parsed.has_echo:
        raise invalid("max_tokens", "is 0; it must be at least 1 without echo")
    names = ("max_tokens", "max_completion_tokens")
    if len({given[name] for name in names if name in given}) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens; they mean the same, give one")


# ------------------------------------------------------------------------------------- what is read


def _setting(name: str, read: Callable[[str, object], object]) -> _Reader:
    def reader(parsed: ParsedRequest, param: str, value: object) -> None:
        parsed.changes[name], parsed.params[name] = read(param, value), param

    return reader


def _attribute(name: str, read: Callable[[str, object], object]) -> _Reader:
    def reader(parsed: ParsedRequest, param: str, value: object) -> None:
        setattr(parsed, name, read(param, value))

    return reader


def _read_stream_options(parsed: ParsedRequest, name: str, value: object) -> None:
    for key, each in fields.section(name, value).items():
        param = f"{name}.{key}"
        if each is None:
            continue
        if key == "include_usage":
            parsed.has_usage = fields.boolean(param, each)
        elif key not in PASSED_IN_STREAM_OPTIONS:
            parsed.ignored.append(param[: fields.MAX_NAME_CHARS])


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


def _read_max_tokens(parsed: ParsedRequest, name: str, value: object) -> None:
    """Reads a number of tokens; 0, of a completion that echoes its prompt, generates one that is not shown."""
    parsed.is_prompt_only = value == 0 and value is not False and parsed.kind is Kind.COMPLETION
    _read_num_predict(parsed, name, 1 if parsed.is_prompt_only else value)


def _read_num_predict(parsed: ParsedRequest, name: str, value: object) -> None:
    if value == -1:  # llama-server's and ollama's word for no limit but the context
        parsed.changes["max_new_tokens"], parsed.params["max_new_tokens"] = None, name
    else:
        _READ_MAX_TOKENS(parsed, name, value)


_COMMON: dict[str, _Reader] = {
    "model": _attribute("model", fields.text),
    "stream": _attribute("is_stream", fields.boolean),
    "stream_options": _read_stream_options,
    "max_tokens": _read_max_tokens,
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
_COMMON |= READERS | {  # vLLM's and llama-server's, which mean here what they mean there
    "top_k": _setting("top_k", fields.top_k),
    "min_p": _setting("min_p", lambda name, value: fields.number(name, value, 0, 1)),
    "repetition_penalty": _setting(
        "repetition_penalty", lambda name, value: fields.number(name, value, 0.01, 100)
    ),
    "min_tokens": _setting("min_new_tokens", lambda name, value: fields.integer(name, value, 0, MAX_TOKENS)),
    "ignore_eos": _setting("ignore_eos", fields.boolean),
    "stop_token_ids": _setting("stop_token_id", fields.token_ids),
    "bad_words": _setting("bad_word", fields.stops),
    "max_completion_tokens": _read_num_predict,
    "skip_special_tokens": _setting(
        "show_special_tokens", lambda name, value: not fields.boolean(name, value)
    ),
    "n": _attribute("num_choices", lambda name, value: fields.integer(name, value, 1, fields.MAX_CHOICES)),
    "best_of": lambda parsed, name, value: None,  # as n, which is looked at in the end
    "n_predict": _read_num_predict,
    "num_predict": _read_num_predict,
}
_COMPLETION: dict[str, _Reader] = {
    "echo": _attribute("has_echo", fields.boolean),
}
_CHAT: dict[str, _Reader] = {
    "top_logprobs": _read_top_logprobs,
    "chat_template_kwargs": _attribute("template_variables", fields.section),
}


def _unknown(name: str, known: tuple[str, ...]) -> ApiError:
    name = name[: fields.MAX_NAME_CHARS]
    hint = did_you_mean(name, known)
    return ApiError(400, f"unknown parameter {name}{hint}", param=name, code="unknown_parameter")
