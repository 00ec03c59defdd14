"""The end of a sequence, decided by the same code in every mode and on both sides (docs/design.md §4).

Token ids end with the token that completes a stop; text ends before the stop string; nothing after a stop is
kept. The verifier has ids alone (`stop_ids`, `first_stop`); the edge has the text too (`TextStopper`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from outrider.common.errors import InvalidFieldError
from outrider.common.types import FinishReason, SamplingParams, StopParams, TokenIds


def check_stop_params(stop: StopParams, num_tokens: int) -> None:
    """Raises InvalidFieldError naming the first value out of range; ids must be below `num_tokens`."""
    if stop.max_new_tokens < 1:
        raise InvalidFieldError("max_new_tokens", f"is {stop.max_new_tokens}; it must be at least 1")
    for token_id in stop.stop_token_ids:
        if not 0 <= token_id < num_tokens:
            raise InvalidFieldError("stop_token_ids", f"has {token_id}; ids must be below {num_tokens}")
    if "" in stop.stop_strings:
        raise InvalidFieldError("stop_strings", "has an empty string; it would stop at once")


def stop_ids(stop: StopParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Returns the ids that end a sequence by themselves."""
    return frozenset(stop.stop_token_ids).union(() if stop.ignore_eos else eos_token_ids)


def holding_back(sampling: SamplingParams, stop_token_ids: TokenIds) -> SamplingParams:
    """Returns the parameters that a side samples with: `stop_token_ids`, which are sent beside them, are held back as
    long as end-of-text is."""
    return replace(sampling, held_back=stop_token_ids) if sampling.min_new_tokens else sampling


def first_stop(token_ids: Iterable[int], stop_ids: Collection[int]) -> int | None:
    """Returns the index of the first token that ends the sequence, or None. The token itself is kept."""
    return next((index for index, token_id in enumerate(token_ids) if token_id in stop_ids), None)


@dataclass(frozen=True, slots=True)
class Step:
    """Contains the text that may be shown after one token, and whether generation ends with this token."""

    text: str
    finish: FinishReason | None = None
    num_chars: int = field(default=0, compare=False)  # that the token decoded to, shown now or later


class TextStopper:
    """Watches one generation token by token; the text depends on the tokens alone, not on their grouping.

    `decode(token_id)` returns the text that became final with this token: "" while a character is partial.
    Ids that stop are never decoded and show nothing, nor do end-of-text ids that are ignored unless special
    tokens are shown. Text that could still become a stop string is held back; of several stop strings the one
    completed first wins, and of those completed by one character the longest. None is looked for in what the first
    `min_new_tokens` tokens complete. The step that ends generation releases what was held.
    """

    def __init__(self, stop: StopParams, eos_token_ids: Iterable[int], decode: Callable[[int], str]) -> None:
        assert "" not in stop.stop_strings, "an empty stop string"
        eos = frozenset(eos_token_ids)
        self._stop_ids = stop_ids(stop, eos)
        self._silent_ids = self._stop_ids if stop.shows_special_tokens else self._stop_ids | eos
        self._stop_strings = stop.stop_strings
        self._longest = max(map(len, stop.stop_strings), default=0)
        self._num_left = stop.max_new_tokens
        # So many tokens are left when stop strings begin to count.
        self._first_cut = stop.max_new_tokens - stop.min_new_tokens
        self._decode = decode
        self._held = ""
        self.finish: FinishReason | None = None

    def push(self, token_id: int) -> Step:
        """Takes the next token. Must not be called after a step with a `finish`."""
        assert self.finish is None, "a token after the end of the text"
        self._num_left -= 1
        is_stopped, decoded = token_id in self._stop_ids, ""
        if token_id not in self._silent_ids:
            decoded = self._decode(token_id)
            num_judged = len(self._held)
            self._held += decoded
            is_stopped = self._num_left < self._first_cut and self._cut_at_stop_string(num_judged)
        if is_stopped:
            self.finish = FinishReason.STOP
        elif self._num_left <= 0:
            self.finish = FinishReason.LENGTH
        return Step(self.flush() if self.finish else self._release(), self.finish, len(decoded))

    def flush(self) -> str:
        """Releases the text held back, when generation ends for a reason of the caller's."""
        text, self._held = self._held, ""
        return text

    def _cut_at_stop_string(self, num_judged: int) -> bool:
        """Cuts what is held at the first stop string that ends after its first `num_judged` characters."""
        matches = [
            (start + len(s), start)
            for s in self._stop_strings
            if (start := self._held.find(s, max(0, num_judged - len(s) + 1))) >= 0
        ]
        if matches:
            self._held = self._held[: min(matches)[1]]
        return bool(matches)

    def _release(self) -> str:
        held = self._held
        num_held = min(len(held), self._longest - 1) if self._longest else 0
        while num_held and not any(s.startswith(held[len(held) - num_held :]) for s in self._stop_strings):
            num_held -= 1
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]
