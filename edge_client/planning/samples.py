"""From samples to what a plan knows: times as lines, acceptance by position, whole texts replayed. Pure."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.common import sequences

MEASURED = "measured"
JUDGED_APART = 30  # times a position must have been judged to have an acceptance of its own
LONG_ENOUGH = 4  # drafted tokens of a round
RARE = 0.05  # a length seen more seldom than this, against the one seen most, draws no line

Standing = tuple[bool, ...]
"""Of a text, position by position: whether the draft's token there, made after the text before it, stands."""


@dataclass(frozen=True, slots=True)
class Known:
    """A part, where it comes from, and for a measured one the 10th and 90th percentile of its samples (of an
    acceptance: the 95 % interval)."""

    value: float
    source: str  # "given" | "measured" | "assumed"
    low: float | None = None
    high: float | None = None
    num_samples: int = 0


def known(samples: Sequence[float]) -> Known:
    """Their mean without the highest and the lowest tenth, and those bounds: what is usual counts, one stall
    does not."""
    ordered = sorted(samples)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Known(_trimmed_mean(ordered), MEASURED, low, high, len(ordered))


def cost_line(times: Sequence[tuple[int, float]], *, is_flat: bool) -> tuple[Known, Known]:
    """(drafted tokens, seconds) as fixed + per token, neither below 0: least squares through the means of the
    lengths, so that none counts more, but for the rare ones, which the ends of texts make: one slow sample
    there would tilt the line. One length alone is all fixed (`is_flat`) or all per token."""
    by_length: dict[int, list[float]] = defaultdict(list)
    for length, seconds in times:
        by_length[length].append(seconds)
    most = max(map(len, by_length.values()))
    by_length = {length: each for length, each in by_length.items() if len(each) >= RARE * most}
    lengths, means = list(by_length), [_trimmed_mean(each) for each in by_length.values()]
    if len(lengths) == 1:
        fixed_s, token_s = (means[0], 0.0) if is_flat or not lengths[0] else (0.0, means[0] / lengths[0])
    else:
        line = statistics.linear_regression(lengths, means)
        through_zero = statistics.linear_regression(lengths, means, proportional=True)
        token_s = max(0.0, line.slope if line.intercept >= 0 else through_zero.slope)
        fixed_s = max(0.0, _trimmed_mean([seconds - token_s * length for length, seconds in times]))
    fixed = known([max(0.0, seconds - token_s * length) for length, seconds in times])
    token = known([max(0.0, seconds - fixed_s) / length for length, seconds in times if length] or [token_s])
    return replace(fixed, value=fixed_s), replace(token, value=token_s)


def acceptance_by_position(rounds: Iterable[tuple[int, int]]) -> tuple[Known, ...]:
    """Of (accepted, drafted): how often token i stood where those before it did, and the 95 % interval
    (Wilson 1927). Positions judged fewer than JUDGED_APART times share the last one."""
    counts = [each for each in sequences.acceptance_by_position(rounds) if each.reached]
    shares = [(each.accepted, each.reached) for each in counts if each.reached >= JUDGED_APART]
    if rest := [each for each in counts if each.reached < JUDGED_APART]:
        shares.append((sum(each.accepted for each in rest), sum(each.reached for each in rest)))
    if len(shares) > 1 and shares[-1][1] < JUDGED_APART:  # too few even together: with the position before
        last, before = shares.pop(), shares.pop()
        shares.append((last[0] + before[0], last[1] + before[1]))
    return tuple(_share(num_stood, num_tried) for num_stood, num_tried in shares)


def standing_of(rounds: Sequence[tuple[int, int]], alphas: Sequence[float]) -> Standing:
    """One text from its rounds of (accepted, drafted), in order and without a gap.

    Texts have easy and hard stretches, and rounds begin where those before them end: short ones mostly in
    easy stretches, long ones after a rejection. So acceptance by position holds for the length it was seen
    with, while a token's standing does not depend on how it was drafted (under `coupled` not at all), and
    `replayed` tells every length. Where nothing was drafted (a bonus) it is drawn with the chance of that
    position, `alphas` (the last repeats).
    """
    luck = random.Random(len(rounds))
    found: list[bool] = []
    for num_accepted, num_drafted in rounds:
        found += [True] * num_accepted
        chance = alphas[min(num_drafted, len(alphas) - 1)]
        found.append(luck.random() < chance if num_accepted == num_drafted else False)
    return tuple(found)


def standing_texts(texts: Sequence[Sequence[tuple[int, int]]]) -> tuple[Standing, ...]:
    """Of those that were drafted far enough to be known but for few tokens; of all, where none was."""
    long = [text for text in texts if max(drafted for _, drafted in text) >= LONG_ENOUGH] or texts
    alphas = [each.value for each in acceptance_by_position(each for text in long for each in text)]
    return tuple(standing_of(text, alphas) for text in long)


def replayed(texts: Iterable[Standing], num_draft_tokens: int) -> Iterator[tuple[int, int]]:
    """(accepted, drafted) of rounds of one length through the texts; one that an end cuts off counts as far
    as it goes."""
    for text in texts:
        position = 0
        while position < len(text):
            draft = text[position : position + num_draft_tokens]
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
