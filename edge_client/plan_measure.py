"""The parts of a plan from the live link: drafting, verifying and streaming for a few seconds.

Sessions of several draft lengths, one after the other, with a cloud-only stream between them, again and again
until the time is up. The first round of a session is not counted: it finds the draft's and the verifier's
caches cold.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, pairwise

from common.errors import UsageError
from common.planning import MEASURED, Known
from common.types import ModelInfo
from edge_client.assemble import Edge
from edge_client.config import RunConfig
from edge_client.stats import RoundRecord

LENGTHS = (8, 1, 4, 0, 12, 2)  # 0: what a verification takes without any draft
FIRST_TOKENS, LATER_TOKENS = 24, 64  # of a session: the first turn is quick, later ones open less often
MIN_PATIENCE_S = 2.0  # with a link that does not answer
MIN_ROUNDS, MIN_STREAMED, MIN_JUDGED = 6, 8, 8
JUDGED_APART = 30  # times a position must have been judged to have an acceptance of its own
PROMPTS = (
    "def read_lines(path):\n",
    "import json\n\n\nclass Store:\n    def __init__(self, path):\n",
    "Once upon a time there was a",
)


@dataclass(slots=True)
class Samples:
    """`token_gaps_s`: between two tokens of a stream, the first left out."""

    rounds: list[RoundRecord] = field(default_factory=list)
    token_gaps_s: list[float] = field(default_factory=list)
    num_draft_tokens: int = 0
    model: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """As in `common.planning.PlanParts`."""

    draft_token: Known
    target_token: Known
    verify_fixed: Known
    verify_token: Known
    rtt: Known
    acceptance: tuple[Known, ...]


def measure(
    edge: Edge,
    *,
    prompts: Sequence[str] = PROMPTS,
    seconds: float,
    on_progress: Callable[[float, int], None] = lambda share, num_rounds: None,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Measures for `seconds`. Raises `LinkError` and what else a session raises."""
    samples, end_s = Samples(), clock() + seconds
    begin_s = end_s - seconds
    for config, prompt, seed in _errands(edge.config, prompts, seconds):
        session = edge.session(prompt, seed, config)
        for _ in session.generate():
            on_progress(min(1.0, (clock() - begin_s) / seconds), len(samples.rounds))
            if clock() >= end_s:
                session.cancel()
        stats = session.result.stats
        samples.model = session.result.model or samples.model
        samples.rounds += [each for each in stats.rounds[1:] if each.is_answered]
        if config.mode == "cloud-only":
            times_ns = stats.token_times_ns[1:]
            samples.token_gaps_s += [(after - before) / 1e9 for before, after in pairwise(times_ns)]
        if clock() >= end_s:
            return samples
    raise AssertionError("errands never end")


def _errands(
    config: RunConfig, prompts: Sequence[str], seconds: float
) -> Iterator[tuple[RunConfig, str, int]]:
    """Sessions to run: configuration, prompt, seed. A slow round is waited for and measured."""
    texts, seeds = cycle(prompts), count(1 if config.seed is None else config.seed)
    for turn in count():
        num_tokens = FIRST_TOKENS if turn == 0 else LATER_TOKENS
        common = replace(
            config,
            on_timeout="wait",
            recover_timeout_s=min(config.recover_timeout_s, max(seconds, MIN_PATIENCE_S)),
            ignore_eos=True,
            max_new_tokens=num_tokens,
            depth_policy="fixed",
        )
        speculative = replace(common, mode="speculative")
        prompt = next(texts)
        for number, length in enumerate(LENGTHS):
            yield replace(speculative, num_speculative_tokens=length), prompt, next(seeds)
            if number % 3 == 0:
                yield replace(common, mode="cloud-only"), prompt, next(seeds)


def parts_from(samples: Samples, flag: str = "--measure-s") -> MeasuredParts:
    """Raises `UsageError` naming `flag` where the time was too short to tell."""
    rounds = samples.rounds
    drafted = [each for each in rounds if each.num_draft_tokens]
    judged = sum(min(each.num_accepted_tokens + 1, each.num_draft_tokens) for each in drafted)
    found = f"{len(rounds)} rounds, {judged} judged tokens, {len(samples.token_gaps_s)} streamed ones"
    if len(rounds) < MIN_ROUNDS or judged < MIN_JUDGED or len(samples.token_gaps_s) < MIN_STREAMED:
        raise UsageError(f"too little was measured ({found}): give {flag} more")
    verify_fixed, verify_token = verify_line([(r.num_draft_tokens, _verifier_s(r)) for r in rounds])
    per_token_s = [each.draft_ms / 1e3 / each.num_draft_tokens for each in drafted]
    mean_draft_s = sum(r.draft_ms for r in drafted) / 1e3 / sum(r.num_draft_tokens for r in drafted)
    return MeasuredParts(
        draft_token=replace(known(per_token_s), value=mean_draft_s),
        target_token=known(samples.token_gaps_s),
        verify_fixed=verify_fixed,
        verify_token=verify_token,
        rtt=known([each.net_ms / 1e3 for each in rounds]),
        acceptance=acceptance_by_position((r.num_accepted_tokens, r.num_draft_tokens) for r in drafted),
    )


def known(samples: Sequence[float]) -> Known:
    """Their mean without the highest and the lowest tenth, and those bounds: what is usual counts, one stall
    does not."""
    ordered = sorted(samples)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Known(_trimmed_mean(ordered), MEASURED, low, high, len(ordered))


def _trimmed_mean(samples: Sequence[float]) -> float:
    num_cut = len(samples) // 10
    return statistics.fmean(sorted(samples)[num_cut : len(samples) - num_cut])


def verify_line(times: Sequence[tuple[int, float]]) -> tuple[Known, Known]:
    """(drafted tokens, seconds) as fixed + per token: least squares through each length's mean, so that no
    length counts more than another."""
    by_length: dict[int, list[float]] = defaultdict(list)
    for length, seconds in times:
        by_length[length].append(seconds)
    token_s = 0.0
    if len(by_length) > 1:
        means = [_trimmed_mean(each) for each in by_length.values()]
        token_s = max(0.0, statistics.linear_regression(list(by_length), means).slope)
    fixed = known([seconds - token_s * length for length, seconds in times])
    return fixed, Known(token_s, MEASURED)


def acceptance_by_position(rounds: Iterable[tuple[int, int]]) -> tuple[Known, ...]:
    """Of (accepted, drafted): how often token i stood where those before it did, and the 95 % interval
    (Wilson 1927). Positions judged fewer than JUDGED_APART times share the last one."""
    tried: dict[int, int] = defaultdict(int)
    stood: dict[int, int] = defaultdict(int)
    for num_accepted, num_drafted in rounds:
        for position in range(min(num_accepted + 1, num_drafted)):
            tried[position] += 1
            stood[position] += position < num_accepted
    apart = [i for i in sorted(tried) if tried[i] >= JUDGED_APART]
    rest = [i for i in sorted(tried) if tried[i] < JUDGED_APART]
    shares = [(stood[i], tried[i]) for i in apart]
    if rest:
        shares.append((sum(stood[i] for i in rest), sum(tried[i] for i in rest)))
    if len(shares) > 1 and shares[-1][1] < JUDGED_APART:  # too few even together: with the position before
        last, before = shares.pop(), shares.pop()
        shares.append((last[0] + before[0], last[1] + before[1]))
    return tuple(_share(num_stood, num_tried) for num_stood, num_tried in shares)


def _share(num: int, total: int) -> Known:
    z2, share = 1.96**2, num / total
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = (z2 * (share * (1 - share) / total + z2 / (4 * total**2))) ** 0.5 / (1 + z2 / total)
    return Known(share, MEASURED, max(0.0, middle - half), min(1.0, middle + half), total)


def _verifier_s(record: RoundRecord) -> float:
    return record.verifier_ms / 1e3
