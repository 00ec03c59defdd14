"""The text of one session as the edge knows it: ids, hashes, origins, marks, and where it ends. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.common.alignment import TokenChain
from outrider.common.sequences import common_prefix
from outrider.common.stopping import TextStopper, stop_ids
from outrider.common.types import FinishReason, Origin, StopParams, TokenIds, TokenLogprobs
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, TokenEvent

Decode = Callable[[int], str]


class SessionText:
    """The verifier agreed with the first `acked_position` tokens; those behind are ours alone so far.

    Where `is_reverified` (`--reverify`), tokens kept unverified never become part of what is agreed before
    the target has judged them, so that behind the first of them every one is unverified:

        [ agreed with ][ verified, to be sent along ][ kept, to be judged ]
                       ^ acked_position              ^ settled_position    ^ position

    `renew_decode` makes a decoder that has seen the prompt alone, for a text that is taken back.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        stop: StopParams,
        decode: Decode,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        is_reverified: bool = False,
        renew_decode: Callable[[], Decode] | None = None,
    ) -> None:
        self.is_reverified = is_reverified
        self.chain = TokenChain(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.acked_position = len(prompt_ids)
        self.origins: list[Origin] = []  # of new tokens
        self.is_verified: list[bool] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.shown = ""
        self.finish: FinishReason | None = None
        self._stop = stop
        self._decode = decode
        self._renew_decode = renew_decode or (lambda: decode)
        self._clock_ns = clock_ns
        self._num_verified = 0  # new tokens before the first unverified one, as far as was looked
        self._stopper: TextStopper | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._stop_ids: frozenset[int] = frozenset()

    def set_eos(self, eos_token_ids: Sequence[int]) -> None:
        """The end-of-text ids, from whoever owns them. Needed before the first token; once."""
        if self._stopper is None:
            self._eos_token_ids = tuple(eos_token_ids)
            self._stopper = TextStopper(self._stop, eos_token_ids, self._decode)
            self._stop_ids = stop_ids(self._stop, eos_token_ids)

    # ------------------------------------------------------------------------------------- reading

    @property
    def position(self) -> int:
        return self.chain.position

    @property
    def new_token_ids(self) -> TokenIds:
        return tuple(self.chain.token_ids[self.num_prompt_tokens :])

    @property
    def num_remaining(self) -> int:
        return self._stop.max_new_tokens - len(self.origins)

    @property
    def num_unverified(self) -> int:
        return self.is_verified.count(False)

    @property
    def settled_position(self) -> int:
        """The tokens before it stand."""
        if not self.is_reverified:
            return self.position
        flags, number = self.is_verified, self._num_verified
        while number < len(flags) and flags[number]:
            number += 1
        self._num_verified = number
        return self.num_prompt_tokens + number

    @property
    def to_judge(self) -> TokenIds:
        """Kept unverified, and to be judged."""
        return tuple(self.chain.token_ids[self.settled_position :])

    def unacked(self) -> tuple[TokenIds, tuple[Origin, ...]]:
        """The tokens after the acknowledged position that stand, with their origins."""
        start, end = self.acked_position, self.settled_position
        first, last = start - self.num_prompt_tokens, end - self.num_prompt_tokens
        return tuple(self.chain.token_ids[start:end]), tuple(self.origins[first:last])

    @property
    def acked_hash(self) -> int:
        return self.chain.hash_at(self.acked_position)

    def until_stop(self, token_ids: Sequence[int]) -> TokenIds:
        """`token_ids` up to, without, the first that would end the text: what may be kept unverified."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._stop_ids:
                return tuple(token_ids[:index])
        return tuple(token_ids)

    # ------------------------------------------------------------------------------------- writing

    def add(
        self,
        token_ids: Sequence[int],
        origins: Sequence[Origin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[TokenEvent]:
        """Appends up to the token that ends the text; `finish` then says why. `logprobs` are those of the
        first tokens, as far as they are known."""
        assert self._stopper is not None, "tokens before anybody said what ends the text"
        events: list[TokenEvent] = []
        first = len(self.origins)
        known = [*logprobs, *[None] * (len(token_ids) - len(logprobs))]
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
            events.append(
                TokenEvent(index, token_id, step.text, origin, is_verified, self._clock_ns(), its_logprobs)
            )
        self.chain.extend(token_ids[: len(events)])
        return events

    def end(self, reason: FinishReason) -> str:
        """Ends the text for a reason of ours, and releases what was held back."""
        held = self._stopper.flush() if self._stopper is not None else ""
        self.shown += held
        self.finish = self.finish or reason
        return held

    def acknowledge(self, position: int) -> None:
        """The verifier has `position` tokens, the first of which are ours."""
        self.acked_position = min(position, self.position)

    def num_alike(self, start: int, theirs: Sequence[int]) -> int:
        """How many of `theirs`, from `start` on, are what the text has there."""
        return common_prefix(self.chain.token_ids[start : start + len(theirs)], theirs)

    def confirm(
        self, start: int, num_tokens: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[MarkClearedEvent]:
        """The target has the same `num_tokens` tokens from `start` on: their marks go. `logprobs` are those
        of the first ones."""
        cleared = []
        first = start - self.num_prompt_tokens
        for index in range(max(0, first), first + num_tokens):
            if not self.is_verified[index]:
                self.is_verified[index] = True
                if index - first < len(logprobs):
                    self.logprobs[index] = logprobs[index - first]
                cleared.append(MarkClearedEvent(index, self.logprobs[index]))
        return cleared

    def roll_back(self, position: int) -> RolledBackEvent:
        """Takes the tokens from `position` on back, the end of the text too. What was shown of the ones
        before does not depend on those behind, so it stands."""
        assert self._stopper is not None and self.settled_position <= position < self.position
        num_tokens = position - self.num_prompt_tokens
        self.chain.truncate(position)
        for each in (self.origins, self.is_verified, self.logprobs):
            del each[num_tokens:]
        self.finish = None
        self._decode = self._renew_decode()
        self._stopper = TextStopper(self._stop, self._eos_token_ids, self._decode)
        self.shown = "".join(self._stopper.push(token_id).text for token_id in self.new_token_ids)
        return RolledBackEvent(num_tokens, len(self.shown))
