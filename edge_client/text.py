"""The text of one session as the edge knows it: ids, hashes, origins, marks, and where it ends. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.alignment import TokenChain, extend_hash
from common.stopping import TextStopper, stop_ids
from common.types import (
    CorrectionKind,
    FinishReason,
    Origin,
    StopParams,
    TokenIds,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)
from edge_client.events import MarkClearedEvent, TokenEvent


class SessionText:
    """The verifier agreed with the first `acked_position` tokens; those behind are ours alone so far."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        stop: StopParams,
        decode: Callable[[int], str],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
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
        self._clock_ns = clock_ns
        self._stopper: TextStopper | None = None
        self._stop_ids: frozenset[int] = frozenset()

    def set_eos(self, eos_token_ids: Sequence[int]) -> None:
        """The end-of-text ids, from whoever owns them. Needed before the first token; once."""
        if self._stopper is None:
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

    def unacked(self) -> tuple[TokenIds, tuple[Origin, ...]]:
        """The tokens after the acknowledged position, with their origins."""
        start = self.acked_position
        return tuple(self.chain.token_ids[start:]), tuple(self.origins[start - self.num_prompt_tokens :])

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
        events = []
        known = [*logprobs, *[None] * (len(token_ids) - len(logprobs))]
        for token_id, origin, its_logprobs in zip(token_ids, origins, known, strict=True):
            if self.finish is not None:
                break
            step = self._stopper.push(token_id)
            self.chain.extend((token_id,))
            self.origins.append(origin)
            self.is_verified.append(origin.is_verified)
            self.logprobs.append(its_logprobs)
            self.shown += step.text
            self.finish = step.finish
            events.append(
                TokenEvent(
                    len(self.origins) - 1,
                    token_id,
                    step.text,
                    origin,
                    origin.is_verified,
                    self._clock_ns(),
                    its_logprobs,
                )
            )
        return events

    def end(self, reason: FinishReason) -> str:
        """Ends the text for a reason of ours, and releases what was held back."""
        held = self._stopper.flush() if self._stopper is not None else ""
        self.shown += held
        self.finish = self.finish or reason
        return held

    def acknowledge(self) -> None:
        """The verifier has all of it."""
        self.acked_position = self.chain.position

    def clear_marks(self, request: VerifyRequest, verdict: Verdict) -> list[MarkClearedEvent]:
        """A late verdict: marks go from our tokens as far as the target chose the same ones after the
        same text."""
        start = request.base_position + len(request.committed_tokens)
        if not self.chain.agrees(start, extend_hash(request.base_hash, request.committed_tokens)):
            return []
        theirs = list(request.draft_tokens[: verdict.accepted_len])
        if verdict.correction_kind is not CorrectionKind.NONE:
            theirs.append(verdict.correction)
        cleared = []
        for position, token_id in enumerate(theirs, start):
            if position >= self.position or self.chain.token_ids[position] != token_id:
                break
            index = position - self.num_prompt_tokens
            if not self.is_verified[index]:
                self.is_verified[index] = True
                cleared.append(MarkClearedEvent(index))
        return cleared
