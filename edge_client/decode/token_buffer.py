"""The tokens of one session as the edge has them: ids, hashes, origins, marks, and the end. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.common.alignment import TokenChain
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.sequences import common_prefix
from outrider.common.stopping import TextStopper, first_stop, stop_ids
from outrider.common.types import FinishReason, Origin, StopParams, TokenIds, TokenLogprobs
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, TokenEvent

Decode = Callable[[int], str]


class TokenBuffer:
    """Holds the sequence. The verifier agreed with the first `acked_position` tokens; the others are the
    edge's alone so far.

    Where `is_reverified` (`--reverify`), the verifier agrees with no token that was kept unverified before
    the target has judged it, so every token after the first such one is unverified:

        [ agreed with ][ verified, to be sent along ][ kept, to be judged ]
                       ^ acked_position              ^ settled_position    ^ position

    `renew_decode` makes a decoder that has seen the prompt alone, for a sequence that is rolled back. Of
    log-probabilities the `num_logprobs` likeliest ids are kept, and nothing for 0: a draft that learns has the target
    tell more.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        stop: StopParams,
        decode: Decode,
        clock: Clock = SYSTEM_CLOCK,
        *,
        is_reverified: bool = False,
        num_logprobs: int = 0,
        renew_decode: Callable[[], Decode] | None = None,
    ) -> None:
        self.is_reverified = is_reverified
        self._num_logprobs = num_logprobs
        self.chain = TokenChain(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.acked_position = len(prompt_ids)
        self.origins: list[Origin] = []  # one a new token, as the next two
        self.is_verified: list[bool] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.shown = ""  # the text
        self.finish: FinishReason | None = None
        self._stop = stop
        self._decode = decode
        self._renew_decode = renew_decode or (lambda: decode)
        self._now = clock.now
        self._num_verified = 0  # new tokens before the first unverified one that were looked at
        self._stopper: TextStopper | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._stop_ids: frozenset[int] = frozenset()

    def set_eos(self, eos_token_ids: Sequence[int]) -> int | None:
        """Sets the end-of-sequence ids. Needed before the first token; the target's replace those of a draft
        that continued alone. Returns the position of the first token kept by these that would end the sequence
        by those, or did by these alone: it is to be rolled back. None where there is none."""
        changed = set(self._eos_token_ids).symmetric_difference(eos_token_ids)
        if self._stopper is not None and (not changed or any(self.is_verified)):
            return None
        self._eos_token_ids = tuple(eos_token_ids)
        self._stop_ids = stop_ids(self._stop, eos_token_ids)
        index = first_stop(self.new_token_ids, changed)
        if index is None:
            self._restart()
        return None if index is None else self.num_prompt_tokens + index

    # ------------------------------------------------------------------------------------- reading

    @property
    def position(self) -> int:
        """Returns the number of tokens, the prompt's included."""
        return self.chain.position

    @property
    def new_token_ids(self) -> TokenIds:
        """Returns the tokens after the prompt."""
        return tuple(self.chain.token_ids[self.num_prompt_tokens :])

    @property
    def num_remaining(self) -> int:
        """Returns how many tokens `max_new_tokens` still allows."""
        return self._stop.max_new_tokens - len(self.origins)

    @property
    def settled_position(self) -> int:
        """Returns the number of tokens that no verdict can roll back."""
        if not self.is_reverified:
            return self.chain.position
        flags, number = self.is_verified, self._num_verified
        while number < len(flags) and flags[number]:
            number += 1
        self._num_verified = number
        return self.num_prompt_tokens + number

    @property
    def to_judge(self) -> TokenIds:
        """Returns the tokens that were kept unverified and are to be judged."""
        return tuple(self.chain.token_ids[self.settled_position :])

    def unacked(self) -> tuple[TokenIds, tuple[Origin, ...]]:
        """Returns the settled tokens after the acknowledged position, with their origins."""
        start, end = self.acked_position, self.settled_position
        first, last = start - self.num_prompt_tokens, end - self.num_prompt_tokens
        return tuple(self.chain.token_ids[start:end]), tuple(self.origins[first:last])

    @property
    def acked_hash(self) -> int:
        """Returns the hash of the sequence up to the acknowledged position."""
        return self.chain.hash_at(self.acked_position)

    def until_stop(self, token_ids: Sequence[int]) -> TokenIds:
        """Returns `token_ids` before the first that would end the sequence: those that may be kept
        unverified."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._stop_ids:
                return tuple(token_ids[:index])
        return tuple(token_ids)

    def num_alike(self, start: int, theirs: Sequence[int]) -> int:
        """Returns the length of the common prefix of `theirs` and the sequence from `start` on."""
        return common_prefix(self.chain.token_ids[start : start + len(theirs)], theirs)

    # ------------------------------------------------------------------------------------- writing

    def add(
        self,
        token_ids: Sequence[int],
        origins: Sequence[Origin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[TokenEvent]:
        """Appends tokens up to the one that ends the sequence, which sets `finish`. `logprobs` are those of
        the first tokens, as far as they are known."""
        assert self._stopper is not None, "tokens before the end-of-sequence ids were set"
        events: list[TokenEvent] = []
        time_ns = int(self._now() * 1e9)
        first = len(self.origins)
        known = [*map(self._asked_for, logprobs), *[None] * (len(token_ids) - len(logprobs))]
        for index, (token_id, origin, its_logprobs) in enumerate(
            zip(token_ids, origins, known, strict=True), start=first
        ):
            if self.finish is not None:
                break
            step = self._stopper.push(token_id)
            is_verified = origin.is_verified
            self.origins.append(origin)
            self.is_verified.append(is_verified)
            self.logprobs.append(its_logprobs)
            self.shown += step.text
            self.finish = step.finish
            event = TokenEvent(
                index,
                token_id,
                step.text,
                origin,
                is_verified,
                time_ns,
                its_logprobs,
                num_chars=step.num_chars,
            )
            events.append(event)
        self.chain.extend(token_ids[: len(events)])
        return events

    def end(self, reason: FinishReason) -> str:
        """Ends the sequence for `reason` unless it has ended, and returns the text that was held back."""
        held = self._stopper.flush() if self._stopper is not None else ""
        self.shown += held
        self.finish = self.finish or reason
        return held

    def acknowledge(self, position: int) -> None:
        """Notes that the verifier has the first `position` tokens, as far as there are so many."""
        self.acked_position = min(position, self.position)

    def confirm(
        self, start: int, num_tokens: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[MarkClearedEvent]:
        """Clears the marks of `num_tokens` tokens from `start` on, which the target has chosen too.
        `logprobs` are those of the first ones."""
        cleared = []
        first = start - self.num_prompt_tokens
        for index in range(max(0, first), first + num_tokens):
            if not self.is_verified[index]:
                self.is_verified[index] = True
                if index - first < len(logprobs):
                    self.logprobs[index] = self._asked_for(logprobs[index - first])
                cleared.append(MarkClearedEvent(index, self.logprobs[index]))
        return cleared

    def _asked_for(self, told: TokenLogprobs) -> TokenLogprobs | None:
        number = self._num_logprobs
        if not number or number >= len(told.top_token_ids):
            return told if number else None
        return replace(
            told, top_token_ids=told.top_token_ids[:number], top_logprobs=told.top_logprobs[:number]
        )

    def roll_back(self, position: int) -> RolledBackEvent:
        """Drops the tokens from `position` on, and the end of the sequence. The text shown with the ones
        before does not depend on those dropped, so it stays."""
        assert self.settled_position <= position or not any(self.is_verified), "verified tokens stay"
        num_tokens = position - self.num_prompt_tokens
        self.chain.truncate(position)
        for each in (self.origins, self.is_verified, self.logprobs):
            del each[num_tokens:]
        self.finish = None
        self._restart()
        return RolledBackEvent(num_tokens, len(self.shown))

    def _restart(self) -> None:
        """Decodes the new tokens again and looks for their end, by the present end-of-sequence ids."""
        self._decode = self._renew_decode()
        self._stopper = TextStopper(self._stop, self._eos_token_ids, self._decode)
        self.shown = "".join(self._stopper.push(token_id).text for token_id in self.new_token_ids)
