"""Checks of the fields that depend on the verification method: docs/protocol.md.

A field that the session's method has no use for is rejected, not ignored: whoever sent it believes that it
does something. Every check raises `InvalidFieldError` naming the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from outrider.common.errors import InvalidFieldError
from outrider.common.methods import sends_probs, sends_support, takes_trees
from outrider.common.types import Method, MethodParams, OpenRequest, VerifyRequest

MAX_CANDIDATES = 64


class _Range(NamedTuple):
    method: Method  # whose parameter it is
    is_valid: Callable[[float], bool]
    expected: str


def _is_share(value: float) -> bool:
    return 0.0 < value <= 1.0


_PARAMS = {
    "threshold_pass": _Range(Method.THRESHOLD, _is_share, "above 0, at most 1"),
    "threshold_ratio": _Range(Method.THRESHOLD, lambda v: 0.0 < v < math.inf, "above 0, and finite"),
    "typical_epsilon": _Range(Method.TYPICAL, _is_share, "above 0, at most 1"),
    "typical_delta": _Range(Method.TYPICAL, _is_share, "above 0, at most 1"),
    "num_candidates": _Range(
        Method.CANDIDATES, lambda v: 1 <= v <= MAX_CANDIDATES, f"from 1 to {MAX_CANDIDATES}"
    ),
}
assert set(_PARAMS) == {field.name for field in fields(MethodParams)}, "a parameter without a rule"


def check_method_params(request: OpenRequest) -> None:
    """Raises `InvalidFieldError` for a parameter out of range, or of another method than the request's."""
    for name, (method, is_valid, expected) in _PARAMS.items():
        value = getattr(request.method_params, name)
        if value is None:
            continue
        field = f"method_params.{name}"
        if request.method is not method:
            raise InvalidFieldError(field, f"is of method {method}; this session's is {request.method}")
        if not is_valid(value):
            raise InvalidFieldError(field, f"is {value}; it must be {expected}")


def check_draft_fields(request: VerifyRequest, method: Method, num_tokens: int) -> None:
    """Raises `InvalidFieldError` for `parents`, `q_support`, `q_token_probs` or `candidates_from` that `method` cannot
    use.

    Ids at or above `num_tokens` do not exist.
    """
    if request.parents and not takes_trees(method):
        raise InvalidFieldError("parents", f"method {method} takes chains alone")
    if request.draft_tokens:
        _check_supports(request, method, num_tokens)
        _check_probs(request, method)
    if request.candidates_from:
        _check_candidates_from(request, method)


def _check_supports(request: VerifyRequest, method: Method, num_tokens: int) -> None:
    if not sends_support(method):
        if request.q_support:
            raise InvalidFieldError("q_support", f"method {method} takes none: it goes with sparse and block")
        return
    if not request.q_support:
        raise InvalidFieldError(
            "q_support",
            f"method {method} needs the distribution each draft token was sampled from; "
            "a draft without chance sends its one id with weight 1",
        )
    for i, support in enumerate(request.q_support):
        if max(support.token_ids) >= num_tokens:
            past = max(support.token_ids)
            raise InvalidFieldError(
                "q_support", f"[{i}] has id {past}, past the tokenizer's {num_tokens} tokens"
            )


def _check_probs(request: VerifyRequest, method: Method) -> None:
    if sends_probs(method):
        if not request.q_token_probs and method is not Method.COUPLED:  # to `coupled` they are telemetry
            raise InvalidFieldError(
                "q_token_probs", f"method {method} needs the probability of each draft token"
            )
    elif request.q_token_probs:
        instead = "q_support has them" if sends_support(method) else "it does not look at the draft's"
        raise InvalidFieldError("q_token_probs", f"method {method} takes none: {instead}")


def _check_candidates_from(request: VerifyRequest, method: Method) -> None:
    if method is not Method.CANDIDATES:
        raise InvalidFieldError("candidates_from", f"method {method} sends no candidates")
    if request.draft_tokens or request.committed_tokens:
        raise InvalidFieldError(
            "candidates_from", "asks for more of the last answer: commit nothing and draft nothing with it"
        )
