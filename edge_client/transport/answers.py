"""Checks a verifier's answers against what was asked: what a message shows by itself, the codec has checked."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.common.errors import InvalidFieldError
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    SessionRequest,
    SessionResponse,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)


def check_answer(request: SessionRequest, reply: SessionResponse, num_tokens: int) -> None:
    """Raises `InvalidFieldError` where `reply` cannot answer `request`. Ids from `num_tokens` on do not exist."""
    match request, reply:
        case _, RoundError() | Progress():
            return
        case OpenRequest(), Opened():
            logprobs = () if reply.logprobs is None else (reply.logprobs,)
            if (num := len(reply.prompt_choices)) > (most := request.num_prompt_choices):
                raise InvalidFieldError("prompt_choices", f"has {num} tokens, and {most} were asked for")
            brought = (reply.first_token, *reply.prompt_choices)
            _check_tokens(brought, logprobs, min(num_tokens, reply.model.num_tokens))
        case VerifyRequest(), Verdict():
            _check_verdict(request, reply, num_tokens)
        case GenerateRequest(), GeneratedTokens():
            if not reply.token_ids and not reply.is_last:
                raise InvalidFieldError("token_ids", "a message of a stream brings none, and is not the last")
            _check_tokens(reply.token_ids, reply.logprobs, num_tokens)
        case _:
            asked, got = type(request).__name__, type(reply).__name__
            raise InvalidFieldError("body", f"the answer to {asked} is {got}")


def _check_verdict(request: VerifyRequest, verdict: Verdict, num_tokens: int) -> None:
    num_drafted, num_accepted = len(request.draft_tokens), verdict.accepted_len
    if num_accepted > num_drafted:
        raise InvalidFieldError("accepted_len", f"is {num_accepted} of {num_drafted} draft tokens")
    has_correction = verdict.correction_kind is not CorrectionKind.NONE
    num_new = num_accepted + has_correction
    if len(verdict.logprobs) > num_new:
        raise InvalidFieldError("logprobs", f"has {len(verdict.logprobs)} entries for {num_new} tokens")
    corrections = (verdict.correction,) if has_correction else ()
    candidates = (candidate.token_id for candidate in verdict.candidates)
    _check_tokens((*corrections, *candidates), verdict.logprobs, num_tokens)


def _check_tokens(token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs], num_tokens: int) -> None:
    tops = (token_id for each in logprobs for token_id in each.top_token_ids)
    if (highest := max((*token_ids, *tops), default=0)) >= num_tokens:
        raise InvalidFieldError("token_ids", f"id {highest} is past the tokenizer's {num_tokens} tokens")
