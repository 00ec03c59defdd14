"""The events of `EdgeSession.generate`: tokens as they are committed, then one end."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.types import FinishReason, Method, Origin, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Reports a committed token. `text` may be shown with it: it may belong to earlier tokens, or be empty."""

    index: int  # among the new tokens
    token_id: int
    text: str
    origin: Origin
    is_verified: bool
    time_ns: int  # by the session's clock, the one of `time.perf_counter_ns`
    logprobs: TokenLogprobs | None = None  # where asked for, and the target sent them
    approximation: Method | None = None  # the approximate method that accepted it
    num_chars: int = 0  # that the token decoded to, shown with it or with a later one


@dataclass(frozen=True, slots=True)
class MarkClearedEvent:
    """Reports that a verdict agrees with a token that was committed unverified."""

    index: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RolledBackEvent:
    """Reports that the target disagrees with a token that was kept unverified (`--reverify`), or would end the
    text with it: the tokens from it on are dropped. The next token has the index `num_tokens`."""

    num_tokens: int  # new ones, that stay
    num_chars: int  # of the text shown since the first of them, that stay


@dataclass(frozen=True, slots=True)
class EndEvent:
    """Reports the end, always last. `text` was held back until now."""

    finish_reason: FinishReason
    text: str = ""


SessionEvent = TokenEvent | MarkClearedEvent | RolledBackEvent | EndEvent
