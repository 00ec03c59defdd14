"""What a draft strategy offers: shared weights (`DraftModel`) and one text's state (`DraftSequence`).

The two are apart so that several requests share one set of weights. A sequence knows the committed
text and nothing else between rounds: what it proposed is speculation, kept only as reusable KV.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Self, runtime_checkable

from outrider.common.types import Draft, SamplingParams, Signals


class Stop(enum.Enum):
    """What a stop rule says of the token just sampled.

    BEFORE drops it, so it may depend on nothing but the tokens before it and signals that are functions of
    the distribution (entropy, margin, variance): a draft without the tokens that fell out badly is no sample
    of the draft's, and methods that trust its probabilities would go wrong. Whatever looks at the token
    itself says AFTER.
    """

    NO = "no"
    AFTER = "after"  # it is the draft's last
    BEFORE = "before"  # the draft ends with the token before it


ShouldStop = Callable[[int, Signals | None, int], Stop]
"""Asked after each sampled token: (its id, its signals, tokens sampled so far, it included). None: the draft
tells no signals."""


class DraftSequence(Protocol):
    """One text as the draft sees it. Not thread-safe; sequences of one model may run in parallel."""

    @property
    def position(self) -> int:
        """Length of the committed text, prompt included."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed ids. KV of proposed tokens that agree is kept, the rest is rolled back.

        Cheap: ids the KV lacks are fed by the next `propose`. Ids may lie past the draft's context;
        the sequence then proposes nothing. Raises `InvalidFieldError` for ids >= `num_tokens`.
        """
        ...

    def truncate(self, position: int) -> None:
        """Roll the committed text back to its first `position` tokens (0 <= position <= length)."""
        ...

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Sample up to `num_draft_tokens` tokens after the committed text, which stays as it is.

        `should_stop` ends the draft early: its tokens are then the first of those it would else have had,
        or none where it ends before the first.

        Fewer near the context limit, none at it; none too where the strategy has nothing to say, and the
        verifier then gives the one next token. The committed text must hold at least one token.
        """
        ...

    def close(self) -> None:
        """Free the KV. A closed sequence must not be used again; closing twice is fine."""
        ...

    def check_integrity(self) -> None:
        """Assert that KV and text agree (tests)."""
        ...


@runtime_checkable
class KeepsRunnerUps(Protocol):
    """A sequence that can say what it would have drafted instead of each token."""

    def keep_runner_ups(self) -> None:
        """From now on `Draft.runner_ups` are told. Only where drafts are sampled without a support."""
        ...


class DraftModel(Protocol):
    """Weights shared by sequences, and what identifies them."""

    @property
    def num_tokens(self) -> int:
        """Size of the tokenizer: ids at or above it do not exist and are never proposed."""
        ...

    @property
    def max_context(self) -> int:
        """Longest text, draft tokens included, that the draft can hold."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over configuration and weights."""
        ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Which of nll, entropy, margin, variance its drafts tell; none where it is a copy, say."""
        ...

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> DraftSequence:
        """A new, empty sequence. Penalties treat its first `num_prompt_tokens` ids as the prompt;
        None means everything the first `commit` brings.

        `num_support` (`outrider.common.methods.num_support`): 0 samples from the whole distribution with the noise
        both sides share; n from integer weights over the n most probable ids, told in `Draft.supports`.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def ended(draft: Draft, should_stop: ShouldStop | None) -> Draft:
    """What a stop rule leaves of a draft whose tokens were known beforehand."""
    if should_stop is None:
        return draft
    for number, token_id in enumerate(draft.token_ids, start=1):
        signals = draft.signals[number - 1] if draft.signals else None
        stop = should_stop(token_id, signals, number)
        if stop is not Stop.NO:
            is_before = stop is Stop.BEFORE
            return _first(draft, number - is_before, signals if is_before else None)
    return draft


def _first(draft: Draft, num_tokens: int, doubted: Signals | None) -> Draft:
    return replace(
        draft,
        token_ids=draft.token_ids[:num_tokens],
        draft_probs=draft.draft_probs[:num_tokens],
        signals=draft.signals[:num_tokens],
        supports=draft.supports[:num_tokens],
        runner_ups=draft.runner_ups[:num_tokens],
        doubted=doubted,
    )
