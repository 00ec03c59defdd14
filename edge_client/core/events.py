"""What `EdgeSession.generate` yields: tokens as they become part of the text, then one end."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.types import FinishReason, Method, Origin, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token. `text` is what may be shown with it: it may belong to earlier tokens, or be empty."""

    index: int  # among the new tokens
    token_id: int
    text: str
    origin: Origin
    is_verified: bool
    time_ns: int  # `time.perf_counter_ns`
    logprobs: TokenLogprobs | None = None  # where asked for, and the target gave them
    approximation: Method | None = None  # the approximate method that let it in


@dataclass(frozen=True, slots=True)
class MarkClearedEvent:
    """A verdict agrees with an unverified token: it is the target's own after all."""

    index: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RolledBackEvent:
    """The target disagrees with a token that was kept unverified (`--reverify`): the text from it on is taken
    back. The next token has the index `num_tokens`."""

    num_tokens: int  # new ones, that stay
    num_chars: int  # of the text shown since the first of them, that stay


@dataclass(frozen=True, slots=True)
class EndEvent:
    """Always the last one. `text` was held back until now."""

    finish_reason: FinishReason
    text: str = ""


SessionEvent = TokenEvent | MarkClearedEvent | RolledBackEvent | EndEvent
