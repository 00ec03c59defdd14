"""Turns errors into those of OpenAI's API: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from outrider.common.errors import (
    IncompatibleError,
    InvalidFieldError,
    LinkError,
    ModelError,
    OutriderError,
    RoundFailedError,
    RoundTimeoutError,
    UsageError,
)
from outrider.common.grammar.checked import NotCheckedError
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.types import RoundErrorCode
from outrider.edge_client.config.flags import keys_of_flags, with_keys
from outrider.edge_client.config.request_settings import OF_OPENAI, OF_OPERATOR, OF_REQUESTS
from outrider.edge_client.tokenization.chat_template import TemplateRefusedError

_NO_PARAMS: Mapping[str, str] = MappingProxyType({})


@dataclass
class ApiError(Exception):
    """Answers a request with an error. `param` names the field of the request, `code` is for programs,
    `headers` go with the answer."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """Returns the answer's JSON; long texts are cut."""
        message, param = _clipped(self.message, 1000), self.param and _clipped(self.param, 100)
        about = {"message": message, "type": self.type, "param": param, "code": self.code}
        return {"error": about}

    def facts(self) -> dict[str, object]:
        """Returns why a request is refused, for the log. The messages of 400 and 404 quote the request, and are
        left out."""
        facts: dict[str, object] = {"status": self.status, "code": self.code}
        if self.param is not None:
            facts["param"] = _clipped(self.param, 100)
        return facts if self.status in (400, 404) else {**facts, "reason": _clipped(self.message, 300)}


def _clipped(text: str, max_chars: int) -> str:
    """Returns at most `max_chars` of a text: errors quote the request, which may hold megabytes."""
    return text if len(text) <= max_chars else text[:max_chars] + "…"


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Returns the 400 for a field whose value is wrong."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """Returns the 400 for a field that asks for something this server does not do."""
    return ApiError(400, f"{param} is not supported: {message}", param=param, code="unsupported_parameter")


def busy(message: str, retry_after_s: int) -> ApiError:
    """Returns the 429 for a full queue. OpenAI's clients read it as RateLimitError, wait as long as
    Retry-After says and try again."""
    return ApiError(
        429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": str(retry_after_s)}
    )


def stopping() -> ApiError:
    """Returns the 503 of a daemon that is stopping."""
    message = "the daemon is stopping"
    return ApiError(503, message, "server_error", code="stopping", headers={"Retry-After": "5"})


# Settings by the name that their field has on the wire, where it is another.
_SETTINGS = {"stop_strings": "stop", "bad_words": "bad_word", "stop_token_ids": "stop_token_id"}


def from_failure(
    error: Exception,
    subject: str = "prompt",
    grammar_param: str | None = None,
    params: Mapping[str, str] = _NO_PARAMS,
) -> ApiError:
    """Returns the error for a failed generation; `subject` is the field that holds its text, `grammar_param` the one
    that says what it obeys, `params` those that gave its settings, by setting. An exception that is not ours is a bug,
    and its message stays in the log."""
    match error:
        case ApiError():
            return error
        case GrammarLimitError():
            return ApiError(400, str(error), param=grammar_param, code="invalid_value")
        case TemplateRefusedError():
            return ApiError(400, str(error), param=subject, code="template_refused")
        case NotCheckedError():
            headers = {"Retry-After": "2"}
            return ApiError(503, str(error), "server_error", code="grammar_not_compiled", headers=headers)
        case InvalidFieldError():
            return invalid(_param(error.field, params), error.reason)
        case UsageError(__cause__=InvalidFieldError() as cause):
            return invalid(_param(cause.field, params), cause.reason)
        case UsageError():
            return _from_usage(error, params)
        case RoundFailedError():
            return _from_round(error, subject, grammar_param, params)
        case IncompatibleError():
            return ApiError(502, str(error), "server_error", code="models_do_not_fit")
        case RoundTimeoutError():
            return ApiError(504, str(error), "server_error", code="verifier_timeout")
        case LinkError():
            message, headers = str(error), {"Retry-After": "2"}
            return ApiError(503, message, "server_error", code="verifier_unreachable", headers=headers)
        case ModelError():
            return ApiError(500, str(error), "server_error", code="draft_failed")
        case OutriderError():
            return ApiError(502, str(error), "server_error", code="verifier_refused")
    return ApiError(500, "internal error; the daemon's log says where", "server_error", code="internal_error")


def _from_usage(error: UsageError, params: Mapping[str, str]) -> ApiError:
    """Returns the error for wrong flags, with flags renamed to fields of the request. Where no request can
    choose the flag, the daemon is misconfigured: 500."""
    names = keys_of_flags(str(error))
    if names and names[0] in OF_OPERATOR:
        return ApiError(500, str(error), "server_error", code="daemon_misconfigured")
    param = _param_of(names[0], params) if names else None
    return ApiError(400, with_keys(str(error)), param=param, code="invalid_value")


def _param_of(setting: str, params: Mapping[str, str]) -> str | None:
    """Returns the field that gave a setting, or one that could have."""
    if setting in params:
        return params[setting]
    if setting in OF_OPENAI:
        return "max_tokens" if setting == "max_new_tokens" else setting
    return f"outrider.{setting}" if setting in OF_REQUESTS else None


def _param(field: str, params: Mapping[str, str]) -> str:
    name = field.rpartition(".")[2]
    return _param_of(_SETTINGS.get(name, name), params) or name


def _from_round(
    error: RoundFailedError, subject: str, grammar_param: str | None, params: Mapping[str, str]
) -> ApiError:
    said, message = error.error, str(error)
    match said.code:
        case RoundErrorCode.INVALID if said.field == "token_ids":  # ids themselves were checked here
            return ApiError(400, f"{subject}: {said.message}", param=subject, code="context_length_exceeded")
        case RoundErrorCode.INVALID | RoundErrorCode.UNIMPLEMENTED:
            param = grammar_param if said.field == FIELD else _param(said.field, params) or None
            is_invalid = said.code is RoundErrorCode.INVALID
            code = "invalid_value" if is_invalid else "unsupported_parameter"
            return ApiError(400, message, param=param, code=code)
        case RoundErrorCode.REFUSED | RoundErrorCode.DRAINING:
            headers = {"Retry-After": str(max(1, round(said.retry_after_ms / 1e3)))}
            return ApiError(503, message, "server_error", code="verifier_busy", headers=headers)
    return ApiError(502, message, "server_error", code=str(said.code))
