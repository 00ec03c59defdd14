"""The draft of one session: kept in step with the text, timed, and stretched for experiments."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams, Signals, TokenIds
from outrider.edge_client.drafting.base import DraftModel, KeepsRunnerUps, ShouldStop, Stop


class Drafter:
    """`min_draft_s` stretches every drafted token to stand for a larger draft; results carry the label."""

    def __init__(
        self,
        model: DraftModel,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        num_support: int = 0,
        min_draft_s: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.model = model
        self._clock = clock
        self._sequence = model.sequence(
            sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support
        )
        self._min_draft_s = min_draft_s
        self.warm_s = 0.0  # the clock at the end of `warm_up`
        self._assumed: TokenIds = ()  # what the sequence was told that may yet turn out wrong: its end

    def propose(
        self,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        should_stop: ShouldStop | None = None,
        assumed: TokenIds = (),
    ) -> tuple[Draft, float]:
        """A draft after the whole text `token_ids` and what is `assumed` to follow it, and the time it took
        in ms.

        Shorter than asked where `should_stop` ends it and near the draft's own context limit, empty at it and
        where the strategy has no idea.
        """
        start_s = self._clock.now()
        self._commit(token_ids, assumed)
        draft = self._sequence.propose(num_draft_tokens, self._stretched(should_stop, start_s))
        left_s = self._min_draft_s * len(draft.token_ids) - (self._clock.now() - start_s)
        if left_s > 0:
            self._clock.sleep(left_s)
        return draft, (self._clock.now() - start_s) * 1e3

    def keep_runner_ups(self) -> bool:
        """Whether drafts tell them from now on."""
        if not isinstance(self._sequence, KeepsRunnerUps):
            return False
        self._sequence.keep_runner_ups()
        return True

    def _commit(self, token_ids: Sequence[int], assumed: TokenIds) -> None:
        sequence = self._sequence
        if self._assumed:  # as far as it came true it stays
            start = sequence.position - len(self._assumed)
            now = (*token_ids[start:], *assumed)
            sequence.truncate(start + common_prefix(self._assumed, now))
        sequence.commit(token_ids[sequence.position :])
        if assumed:
            sequence.commit(assumed[sequence.position - len(token_ids) :])
        self._assumed = assumed

    def _stretched(self, should_stop: ShouldStop | None, start_s: float) -> ShouldStop | None:
        """Where drafting is stretched, each token is, so that `should_stop` is asked when it would be."""
        if should_stop is None or not self._min_draft_s:
            return should_stop

        def stretched(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            left_s = self._min_draft_s * num_drafted - (self._clock.now() - start_s)
            if left_s > 0:
                self._clock.sleep(left_s)
            return should_stop(token_id, signals, num_drafted)

        return stretched

    def roll_back(self, position: int) -> None:
        """The text keeps its first `position` tokens."""
        sequence = self._sequence
        num_dropped = sequence.position - position
        if num_dropped > 0:
            sequence.truncate(position)
            self._assumed = self._assumed[: max(0, len(self._assumed) - num_dropped)]

    @property
    def is_full(self) -> bool:
        """Whether the text has reached the draft's context limit: there will be no draft any more."""
        return self._sequence.position >= self.model.max_context

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Feeds the prompt while the verifier does the same; the proposal is thrown away."""
        self._sequence.commit(prompt_ids[self._sequence.position :])
        self._sequence.propose(1)
        self.warm_s = self._clock.now()

    def time_token(self) -> float:
        """Seconds a drafted token takes, by one that is thrown away, after `warm_up`."""
        start_s = self._clock.now()
        self._sequence.propose(1)
        return max(self._min_draft_s, self._clock.now() - start_s)

    def close(self) -> None:
        self._sequence.close()
