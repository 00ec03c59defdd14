"""Turns samples into the parts of a plan: times as lines, acceptance by position, replayed sequences.
Pure."""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from outrider.common import sequences
from outrider.common.step_time import LeastSquaresTime

MEASURED = "measured"
MIN_JUDGED = 30  # times a position must have been judged to have an acceptance of its own
LONG_ENOUGH = 4  # drafted tokens of a round
RARE = 0.05  # a length seen more seldom than this share of the most frequent one is left out of a line

AcceptanceSequence = tuple[bool, ...]
"""By position of a sequence: whether the target accepts the token drafted there after all before it."""


@dataclass(frozen=True, slots=True)
class Known:
    """Holds a part and its source; of a measured one the 10th and 90th percentile of its samples too (of an
    acceptance the 95 % interval)."""

    value: float
    source: str  # "given" | "computed" | "measured" | "assumed"
    low: float | None = None
    high: float | None = None
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class SourceRounds:
    """Holds the measured rounds of a draft source at the verifier: seconds, and tokens that each brings."""

    name: str
    round: Known
    tokens_per_round: float


def streamed_rounds(token_times_ns: Sequence[int]) -> list[tuple[float, int]]:
    """Returns (seconds, tokens) of a co-located stream's rounds, by the times at which its tokens came: those of a
    round come together.

    A round begins where the one before it came, so the round trip is in none but the first, which followed the
    request and is left out, as are the opening's token and the last round, which `max_new_tokens` cuts.
    """
    messages = list(Counter(token_times_ns[1:]).items())[:-1]
    return [((after - before) / 1e9, num_tokens) for (before, _), (after, num_tokens) in pairwise(messages)]


def source_rounds(name: str, rounds: Sequence[tuple[float, int]]) -> SourceRounds:
    """Returns a source's part from (seconds, tokens) of its rounds."""
    tokens_per_round = statistics.fmean(num_tokens for _, num_tokens in rounds)
    return SourceRounds(name, known([seconds for seconds, _ in rounds]), tokens_per_round)


def known(samples: Sequence[float]) -> Known:
    """Returns the mean without the highest and the lowest tenth, and those bounds: one stall does not
    count."""
    ordered = sorted(samples)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Known(_trimmed_mean(ordered), MEASURED, low, high, len(ordered))


def cost_line(times: Sequence[tuple[int, float]], *, is_flat: bool) -> tuple[Known, Known]:
    """Returns (drafted tokens, seconds) as fixed and per-token time, neither below 0.

    It fits the means of the lengths, so that none counts more. Rare lengths, which only the ends of sequences
    have, are left out: one slow sample would tilt the line. The time of a single length is all fixed
    (`is_flat`) or all per token.
    """
    by_length: dict[int, list[float]] = defaultdict(list)
    for length, seconds in times:
        by_length[length].append(seconds)
    most = max(map(len, by_length.values()))
    by_length = {length: each for length, each in by_length.items() if len(each) >= RARE * most}
    lengths, means = list(by_length), [_trimmed_mean(each) for each in by_length.values()]
    if len(lengths) == 1:
        fixed_s, token_s = (means[0], 0.0) if is_flat or not lengths[0] else (0.0, means[0] / lengths[0])
    else:
        line = LeastSquaresTime()
        for length, mean_s in sorted(zip(lengths, means, strict=True), reverse=True):
            line.observe(length, mean_s)
        token_s = line.token_s if line.base_s > 0 else line.through_origin_s
        fixed_s = max(0.0, _trimmed_mean([seconds - token_s * length for length, seconds in times]))
    fixed = known([max(0.0, seconds - token_s * length) for length, seconds in times])
    token = known([max(0.0, seconds - fixed_s) / length for length, seconds in times if length] or [token_s])
    return replace(fixed, value=fixed_s), replace(token, value=token_s)


def acceptance_by_position(rounds: Iterable[tuple[int, int]]) -> tuple[Known, ...]:
    """Returns from (accepted, drafted) how often token i was accepted after all before it, and the 95 %
    interval (Wilson 1927). Positions judged fewer than MIN_JUDGED times share the last one."""
    counts = [each for each in sequences.acceptance_by_position(rounds) if each.reached]
    shares = [(each.accepted, each.reached) for each in counts if each.reached >= MIN_JUDGED]
    if rest := [each for each in counts if each.reached < MIN_JUDGED]:
        shares.append((sum(each.accepted for each in rest), sum(each.reached for each in rest)))
    if len(shares) > 1 and shares[-1][1] < MIN_JUDGED:  # too few even together: with the position before
        last, before = shares.pop(), shares.pop()
        shares.append((last[0] + before[0], last[1] + before[1]))
    return tuple(_share(num_accepted, num_judged) for num_accepted, num_judged in shares)


def sequence_of(rounds: Sequence[tuple[int, int]], alphas: Sequence[float]) -> AcceptanceSequence:
    """Returns one session's sequence from its rounds of (accepted, drafted), in order and without a gap.

    Sequences have easy and hard stretches, and rounds begin where those before them end: short ones mostly in
    easy stretches, long ones after a rejection. So acceptance by position is valid for the measured length
    only, while whether a token is accepted does not depend on how it was drafted (exactly so with `coupled`),
    and `replay_rounds` predicts every length. A bonus, where nothing was drafted, is drawn with the
    acceptance of that position in `alphas` (the last repeats).
    """
    chance = random.Random(len(rounds))
    found: list[bool] = []
    for num_accepted, num_drafted in rounds:
        found += [True] * num_accepted
        alpha = alphas[min(num_drafted, len(alphas) - 1)]
        found.append(chance.random() < alpha if num_accepted == num_drafted else False)
    return tuple(found)


def sequences_of(sessions: Sequence[Sequence[tuple[int, int]]]) -> tuple[AcceptanceSequence, ...]:
    """Returns the sequences of sessions with long drafts, of which few tokens are unknown; of all where none
    has."""
    long = [rounds for rounds in sessions if max(drafted for _, drafted in rounds) >= LONG_ENOUGH] or sessions
    alphas = [each.value for each in acceptance_by_position(each for rounds in long for each in rounds)]
    return tuple(sequence_of(rounds, alphas) for rounds in long)


def replay_rounds(
    sequences: Iterable[AcceptanceSequence], num_draft_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yields (accepted, drafted) of rounds of one length through the sequences, the last one cut to its
    end."""
    for sequence in sequences:
        position = 0
        while position < len(sequence):
            draft = sequence[position : position + num_draft_tokens]
            num_accepted = draft.index(False) if False in draft else len(draft)
            yield num_accepted, len(draft)
            position += num_accepted + 1


def _share(num: int, total: int) -> Known:
    z2, share = 1.96**2, num / total
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = (z2 * (share * (1 - share) / total + z2 / (4 * total**2))) ** 0.5 / (1 + z2 / total)
    return Known(share, MEASURED, max(0.0, middle - half), min(1.0, middle + half), total)


def _trimmed_mean(samples: Sequence[float]) -> float:
    num_cut = len(samples) // 10
    return statistics.fmean(sorted(samples)[num_cut : len(samples) - num_cut])
