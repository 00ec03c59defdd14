"""A draft that errs as often, and takes as long, as the pair says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Self, cast

import numpy as np

from outrider.common.errors import InvalidFieldError
from outrider.common.sampling.support import certain
from outrider.common.types import Draft, SamplingParams, Signals
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.drafting.base import ShouldStop, Stop, ended
from outrider.edge_client.session.factory import Edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.synthetic.keyed import (
    FIRST_TOKEN,
    NUM_TOKENS,
    VOCAB_SIZE,
    KeyedCoins,
    KeyedTokens,
    wait_until,
)
from outrider.experiments.synthetic.pair import SyntheticPair

TOKENIZER_FINGERPRINT = hashlib.sha256(b"outrider synthetic bytes").hexdigest()


class SyntheticTokenizer:
    """Makes every byte a token. Offers what sessions ask of an `EdgeTokenizer`."""

    fingerprint = TOKENIZER_FINGERPRINT
    num_tokens = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        """Returns the text's bytes."""
        return list(text.encode())

    def token_text(self, token_id: int) -> str:
        """Returns the token's character."""
        return bytes((token_id,)).decode(errors="replace")

    def decoder(
        self, prompt_ids: list[int] | None = None, has_special_tokens: bool = False
    ) -> Callable[[int], str]:
        """Returns `token_text`."""
        return self.token_text


class SyntheticSequence:
    """A synthetic `DraftSequence`. Token t of the text, drafted as token i of a proposal, is right where coin t is
    below alphas[i]. So whether it is accepted does not depend on how many are drafted, and given that those
    before it are, it is with exactly that chance: no coin is used by two rounds' verdicts.
    """

    def __init__(
        self,
        pair: SyntheticPair,
        tokens: KeyedTokens,
        sampling: SamplingParams,
        num_prompt_tokens: int | None,
        has_supports: bool,
    ) -> None:
        self._pair, self._tokens = pair, tokens
        self._sampling_seed = sampling.seed
        self._num_prompt_tokens = num_prompt_tokens
        self._has_supports = has_supports
        self._text: list[int] = []
        self._coins: KeyedCoins | None = None

    @property
    def position(self) -> int:
        """Returns the tokens that the text has."""
        return len(self._text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the text."""
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidFieldError("token_ids", f"{token_id} is not below {VOCAB_SIZE}")
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = len(token_ids)
        self._text += token_ids

    def truncate(self, position: int) -> None:
        """Drops what is past `position`."""
        assert 0 <= position <= self.position, f"cannot truncate {self.position} tokens to {position}"
        del self._text[position:]

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Proposes with a probability of 1 and no confidence: it knows nothing."""
        assert self._text, "a draft needs at least one committed token"
        start_s = time.perf_counter()
        if num_draft_tokens <= 0:
            return Draft((), ())
        token_ids = self._token_ids(num_draft_tokens)
        supports = tuple(map(certain, token_ids)) if self._has_supports else ()
        draft = Draft(token_ids, (1.0,) * num_draft_tokens, supports=supports)
        if should_stop is not None:
            return ended(draft, self._paced(should_stop, start_s))
        wait_until(start_s + num_draft_tokens * self._pair.draft_token_s)
        return draft

    def _paced(self, should_stop: ShouldStop, start_s: float) -> ShouldStop:
        """Lets a rule that looks at the world see it as late as it would with a draft of these times."""

        def paced(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            wait_until(start_s + num_drafted * self._pair.draft_token_s)
            return should_stop(token_id, signals, num_drafted)

        return paced

    def _token_ids(self, num: int) -> tuple[int, ...]:
        start, alphas = self.position, self._pair.alphas
        chances = np.array(alphas[:num] + alphas[-1:] * (num - len(alphas)))
        errs = self._coins_here().between(start, start + num) >= chances
        right = self._tokens.between(start, start + num)
        wrong = FIRST_TOKEN + (right - FIRST_TOKEN + 1) % NUM_TOKENS
        return tuple(np.where(errs, wrong, right).tolist())

    def _coins_here(self) -> KeyedCoins:
        assert self._num_prompt_tokens is not None, "nothing was committed"
        if self._coins is not None:
            return self._coins
        prompt_ids = self._text[: self._num_prompt_tokens]
        coins = KeyedCoins(self._pair.seed, self._sampling_seed, prompt_ids)
        if len(prompt_ids) == self._num_prompt_tokens:
            self._coins = coins
        return coins

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def check_integrity(self) -> None:
        """Does nothing: there is nothing beside the text."""


class SyntheticDraft:
    """Is a `DraftModel` for texts of any length. `is_colocated`: as the verifier runs it."""

    num_tokens = VOCAB_SIZE
    max_context = 1 << 30
    eos_token_ids: tuple[int, ...] = ()
    signal_names = ()
    tokenizer_fingerprint = TOKENIZER_FINGERPRINT

    def __init__(self, pair: SyntheticPair) -> None:
        self.pair = pair
        self._tokens = KeyedTokens(pair.seed)

    @property
    def fingerprint(self) -> str:
        """Returns a name of the pair."""
        return hashlib.sha256(f"synthetic draft {self.pair.alphas} {self.pair.seed}".encode()).hexdigest()

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> SyntheticSequence:
        """Returns a sequence. Sampling parameters but the seed change nothing."""
        return SyntheticSequence(self.pair, self._tokens, sampling, num_prompt_tokens, num_support > 0)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def create_synthetic_edge(config: RunConfig, pair: SyntheticPair) -> Edge:
    """Returns an edge as `outrider.edge_client.session.factory.create_edge` does; the configuration's
    draft and strategy are not used."""
    draft = SyntheticDraft(pair) if config.mode.has_draft else None
    tokenizer = cast(EdgeTokenizer, SyntheticTokenizer())
    slowed = (f"min-draft-ms={config.min_draft_ms:g}",) if draft and config.min_draft_ms else ()
    return Edge(config, tokenizer, draft, 0.0, (*slowed, *pair.labels))
