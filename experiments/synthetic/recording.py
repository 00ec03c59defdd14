"""Rounds that a synthetic target answers as recorded, for load generators that need no model."""

from __future__ import annotations

from outrider.common.types import SamplingParams
from outrider.experiments.load.recording import RecordedRound, RecordedSession, Recording
from outrider.experiments.synthetic.keyed import FIRST_TOKEN, NUM_TOKENS, KeyedTokens
from outrider.experiments.synthetic.target import SyntheticBackend

DRAFTS_A_ROUND = 4
PROMPT_TOKENS = 64


def synthetic_recording(num_sessions: int = 32, num_rounds: int = 24) -> Recording:
    """Returns a recording of the default pair's target, greedy: all drafts are accepted."""
    backend = SyntheticBackend()
    tokens = KeyedTokens(backend.pair.seed)
    starts = [PROMPT_TOKENS + 1 + number * (DRAFTS_A_ROUND + 1) for number in range(num_rounds)]
    texts = [tuple(tokens.between(start, start + DRAFTS_A_ROUND + 1).tolist()) for start in starts]
    rounds = tuple(
        RecordedRound(text[:-1], (0.9,) * DRAFTS_A_ROUND, DRAFTS_A_ROUND, text[-1]) for text in texts
    )
    sessions = (
        RecordedSession(
            prompt_ids=tuple(FIRST_TOKEN + (number + i) % NUM_TOKENS for i in range(PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=0.0, seed=number),
            first_token=int(tokens.between(PROMPT_TOKENS, PROMPT_TOKENS + 1)[0]),
            rounds=rounds,
        )
        for number in range(num_sessions)
    )
    return Recording(backend.fingerprint, backend.dtype, tuple(sessions))
