"""Shapes log-probabilities as OpenAI does, in two ways. They are the target's own, before sampling
parameters.

A token without any (kept unverified, or chosen at the edge by the method candidates) has null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.common.types import TokenLogprobs
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

_REPLACEMENT = "�"


def chat_logprobs(tokenizer: EdgeTokenizer, events: Sequence[TokenEvent], num_top: int) -> dict[str, object]:
    """Returns the `logprobs` of a chat's choice."""
    return {"content": [_chat_token(tokenizer, event, num_top) for event in events], "refusal": None}


def _chat_token(tokenizer: EdgeTokenizer, event: TokenEvent, num_top: int) -> dict[str, object]:
    known = event.logprobs
    return {
        **_entry(tokenizer, event.token_id, known.raw_logprob if known else None),
        "top_logprobs": [_entry(tokenizer, *each) for each in _top(known, num_top)],
    }


def _entry(tokenizer: EdgeTokenizer, token_id: int, logprob: float | None) -> dict[str, object]:
    token = tokenizer.token_text(token_id)
    is_partial = _REPLACEMENT in token  # part of a character: its bytes cannot be told by themselves
    return {"token": token, "logprob": logprob, "bytes": None if is_partial else list(token.encode())}


class ScoredToken(NamedTuple):
    """Holds a token, how many characters became complete with it, and its log-probabilities, where they are known."""

    token_id: int
    num_chars: int
    logprobs: TokenLogprobs | None


def scored_prompt(
    tokenizer: EdgeTokenizer,
    prompt_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    echo: str,
    has_special_tokens: bool,
) -> list[ScoredToken]:
    """Returns a prompt's tokens, whose characters are those of `echo`; `logprobs` are those of all but the first, which
    has none. Special tokens have characters where the echo `has_special_tokens`."""
    decode = tokenizer.decoder(has_special_tokens=has_special_tokens)
    sizes = [len(decode(each)) for each in prompt_ids]
    sizes[-1] = len(echo) - sum(sizes[:-1])  # also of a character that the prompt cuts
    return [ScoredToken(*each) for each in zip(prompt_ids, sizes, (None, *logprobs), strict=True)]


def scored(events: Sequence[TokenEvent]) -> list[ScoredToken]:
    """Returns the tokens of some events."""
    return [ScoredToken(event.token_id, event.num_chars, event.logprobs) for event in events]


def completion_logprobs(
    tokenizer: EdgeTokenizer, tokens: Sequence[ScoredToken], num_top: int, num_chars: int
) -> dict[str, object]:
    """Returns the `logprobs` of a completion's choice. `num_chars` of text came before `tokens`;
    `text_offset` counts from the completion's start."""
    offsets, tops = [], []
    for token in tokens:
        offsets.append(num_chars)
        num_chars += token.num_chars
        top: dict[str, float] = {}
        for token_id, logprob in _top(token.logprobs, num_top):
            top.setdefault(tokenizer.token_text(token_id), logprob)  # of tokens with one text, the likeliest
        tops.append(top if token.logprobs else None)
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [token.logprobs.raw_logprob if token.logprobs else None for token in tokens],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _top(known: TokenLogprobs | None, num_top: int) -> list[tuple[int, float]]:
    if known is None:
        return []
    return list(zip(known.top_token_ids, known.top_logprobs, strict=True))[:num_top]
