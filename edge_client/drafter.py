"""The draft of one session: kept in step with the text, timed, and stretched for experiments."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.types import Draft, SamplingParams
from edge_client.drafting.base import DraftModel, ShouldStop


class Drafter:
    """`min_draft_s` stretches every drafted token to stand for a larger draft; results carry the label."""

    def __init__(
        self,
        model: DraftModel,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        num_support: int = 0,
        min_draft_s: float = 0.0,
    ) -> None:
        self.model = model
        self._sequence = model.sequence(
            sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support
        )
        self._min_draft_s = min_draft_s

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, should_stop: ShouldStop | None = None
    ) -> tuple[Draft, float]:
        """A draft after the whole text `token_ids`, and the time it took in ms.

        Shorter than asked where `should_stop` ends it and near the draft's own context limit, empty at it and
        where the strategy has no idea.
        """
        start_s = time.perf_counter()
        self._sequence.commit(token_ids[self._sequence.position :])
        draft = self._sequence.propose(num_draft_tokens, should_stop)
        left_s = self._min_draft_s * len(draft.token_ids) - (time.perf_counter() - start_s)
        if left_s > 0:
            time.sleep(left_s)
        return draft, (time.perf_counter() - start_s) * 1e3

    @property
    def is_full(self) -> bool:
        """Whether the text has reached the draft's context limit: there will be no draft any more."""
        return self._sequence.position >= self.model.max_context

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Feeds the prompt while the verifier does the same; the proposal is thrown away."""
        self._sequence.commit(prompt_ids[self._sequence.position :])
        self._sequence.propose(1)

    def close(self) -> None:
        self._sequence.close()
