"""Computes the measures of a pair as pure functions of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.edge_client.planning.samples import replay_rounds


@dataclass(frozen=True)
class Acceptance:
    """Holds the figures of rounds of one draft length over many texts."""

    num_speculative_tokens: int
    acceptance_rate: float
    """Accepted / drafted tokens."""
    tokens_per_round: float
    """Accepted tokens and the correction or bonus token, a round."""
    per_position: list[float]
    """Share of the rounds whose draft was accepted up to and including each position."""


def acceptance(matches: Sequence[npt.NDArray[np.bool_]], num_speculative_tokens: int) -> Acceptance:
    """Replay the rounds of coupled (or greedy) verification from the matches at each position of the
    target's texts.

    `matches[i][t]` says whether the draft, given the target's text before position t, chooses the target's
    token at t. Under coupled verification the text never depends on the draft, and a draft token is only
    judged when all before it matched, so the matches alone decide every round. A round at the end of a text
    counts the positions that are left.
    """
    rounds = list(replay_rounds([tuple(match.tolist()) for match in matches], num_speculative_tokens))
    if not rounds:
        raise ValueError("no text to replay")
    num_accepted = [accepted for accepted, _ in rounds]
    return Acceptance(
        num_speculative_tokens,
        acceptance_rate=sum(num_accepted) / sum(num_drafted for _, num_drafted in rounds),
        tokens_per_round=sum(map(len, matches)) / len(rounds),
        per_position=[sum(n > i for n in num_accepted) / len(rounds) for i in range(num_speculative_tokens)],
    )


def repeated_runs(token_ids: Sequence[int], size: int = 12) -> list[bool]:
    """Returns for each run of `size` tokens, in order, whether it already occurred earlier in the same
    text."""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for start in range(len(token_ids) - size + 1):
        run = tuple(token_ids[start : start + size])
        marks.append(run in seen)
        seen.add(run)
    return marks


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """Returns the share of the runs of 12 tokens of all texts that are repeats; 0 where all are shorter."""
    marks = [mark for token_ids in texts for mark in repeated_runs(token_ids)]
    return sum(marks) / len(marks) if marks else 0.0


def overlap(
    target_logits: npt.NDArray[np.float32], draft_logits: npt.NDArray[np.float32], temperature: float
) -> float:
    """Returns the mean Σ min(target, draft) over rows of [num_rows, vocab] logits: the chance that
    rejection sampling accepts."""
    return float(
        np.minimum(softmax(target_logits / temperature), softmax(draft_logits / temperature)).sum(-1).mean()
    )


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the row-wise softmax, [num_rows, vocab]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True), dtype=np.float32)
