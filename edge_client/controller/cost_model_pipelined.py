"""Expected times of pipelined rounds: the edge drafts and sends on while earlier rounds are in flight.

Rounds of n drafted tokens follow one another as if all before them were accepted. A run is what lies between
two rejections. Its first verdict comes one whole round after its first drafted token,

    L = n t_draft + RTT + t_verify(n) + bytes / rate                     seconds,

and while everything is accepted a verdict follows every T = max(n t_draft, t_verify(n), bytes / rate) + w
seconds, where w is the part of the RTT that is work of the processors which draft and verify: over loopback all
of it, between two machines nothing. A round accepted as a whole commits n tokens, not n + 1: its bonus position
is judged by the next round's first token, drafted before the bonus was known. The run ends with the round that
has a rejection; that one commits the tokens before it and the correction. With P(j) the probability that j
tokens in a row are accepted,

    tokens of a run   1 + sum over j >= 1 of P(j)                        (one alpha: 1 / (1 - alpha))
    seconds of a run  L + T sum over k >= 1 of P(k n) + R                (one alpha: the sum is
                                                                         alpha^n / (1 - alpha^n))

where R = (n t_draft / T) t_draft / 2 + w is the rest of the drafted token under way when a rejection arrives,
since a forward is not interrupted, and the work for the round that was sent in vain. Where at most W rounds may
be in flight and W T < L, the edge waits L - W T after each W accepted rounds: (L - W T) sum over k >= 1 of
P(k W n) more. With no rejection this is T / n seconds a token; with nothing accepted, L + R.

Assumptions: rounds after a rejection are answered without a forward and delay nothing; one session's rounds
are verified one after the other; the edge drafts, sends and receives at once; acceptance depends on the
number of tokens accepted since the last rejection, as it does on the position in a long draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.edge_client.controller.cost_model import Acceptance, LinkCosts, ModelCosts, round_s
from outrider.edge_client.controller.settings import SETTINGS


class PipelinedTimes(NamedTuple):
    """Holds what rounds of one length take, whatever is accepted. In seconds."""

    num_draft_tokens: int
    first_s: float  # L
    period_s: float  # T
    rest_s: float  # R
    window: int  # rounds in flight at most
    wait_s: float  # for the first answer, once the window is full
    shown_s: float  # by how much a bonus shows a rejection before its own verdict
    spared_s: float  # by a branch that came true

    @property
    def mean_period_s(self) -> float:
        """Returns the time between two verdicts where all tokens are accepted."""
        return self.period_s + self.wait_s / self.window


def pipelined_times(
    num_draft_tokens: int, models: ModelCosts, link: LinkCosts, max_in_flight: int | None = None
) -> PipelinedTimes:
    """Returns the times of rounds of n >= 1 tokens, `max_in_flight` unanswered at most; None is no limit."""
    draft_s, verify_s = models.draft_s(num_draft_tokens), models.verify_s(num_draft_tokens)
    first_s = round_s(num_draft_tokens, models, link)
    period_s = _period_s(num_draft_tokens, draft_s, verify_s, link)
    window = max_in_flight or _window(first_s, period_s)
    wait_s = max(0.0, first_s - window * period_s)
    return PipelinedTimes(
        num_draft_tokens=num_draft_tokens,
        first_s=first_s,
        period_s=period_s,
        rest_s=_rest_s(draft_s, period_s + wait_s / window, models, link),
        window=window,
        wait_s=wait_s,
        shown_s=max(num_draft_tokens * models.draft_token_s, verify_s),
        spared_s=SETTINGS.branch_spared_share * (first_s - verify_s),
    )


def pipelined_token_s(
    acceptance: Acceptance,
    num_draft_tokens: int,
    models: ModelCosts,
    link: LinkCosts,
    max_in_flight: int | None = None,
) -> float:
    """Returns seconds a token of pipelined rounds; see `pipelined_times`."""
    times = pipelined_times(num_draft_tokens, models, link, max_in_flight)
    run = _run_of(acceptance, num_draft_tokens)
    if math.isinf(run.tokens):
        return times.mean_period_s / num_draft_tokens
    run_s: float = _run_s(run, _num_waits(acceptance, times), times)
    return run_s / (1.0 + run.tokens)


def branching_token_s(acceptance: Acceptance, times: PipelinedTimes, hit_share: float = 0.0) -> float:
    """Returns seconds a token of pipelined rounds whose verdicts bring a bonus, with speculative branches.

    The bonus shows that the next round's first token is rejected a period T before that round's own verdict.
    After the share `hit_share` of all rejections the next round is in flight already, which spares
    `branch_spared_share` of the round trip.
    """
    run = _run_of(acceptance, times.num_draft_tokens)
    if math.isinf(run.tokens):
        return times.mean_period_s / times.num_draft_tokens
    seconds: float = branching_run_token_s(run, _num_waits(acceptance, times), times, hit_share)
    return seconds


def branching_run_token_s(run: Run, num_waits: Any, times: PipelinedTimes, hit_share: float) -> Any:
    """Returns the same of a run that ends, in which the edge waits `num_waits` times for a place in the window. All of
    it may be arrays, of several rates and lengths."""
    spared_s = run.first_wrong * times.shown_s + hit_share * times.spared_s
    return (_run_s(run, num_waits, times) - spared_s) / (1.0 + run.tokens)


def _run_s(run: Run, num_waits: Any, times: PipelinedTimes) -> Any:
    return times.first_s + times.period_s * run.rounds + times.rest_s + times.wait_s * num_waits


def _num_waits(acceptance: Acceptance, times: PipelinedTimes) -> float:
    return _run_of(acceptance, times.window * times.num_draft_tokens).rounds if times.wait_s else 0.0


def pipelined_start_s(alpha: float, times: PipelinedTimes) -> float:
    """Returns what N tokens of pipelined rounds take beyond N times `pipelined_token_s`, about alpha (L - T / 2).

    As many runs begin as there are rejections before the last token, and one: 1 + (N - 1) (1 - alpha) of them wait
    for a first verdict, while N tokens at that pace pay for N (1 - alpha). And of the last round some tokens are not
    wanted, as of single rounds (`cost_model.rounds_start_s`), for which T is L.
    """
    return alpha * (times.first_s - times.period_s / 2)


def fastest_pipelined(
    acceptance: Acceptance, models: ModelCosts, link: LinkCosts, max_num_draft_tokens: int
) -> tuple[int, float]:
    """Returns the length of rounds, 1 to the maximum, of the fewest seconds a token, and those seconds."""
    lengths = range(1, max_num_draft_tokens + 1)
    seconds, best = min((pipelined_token_s(acceptance, n, models, link), n) for n in lengths)
    return best, seconds


def pipelined_rounds_per_token(acceptance: Acceptance, num_draft_tokens: int) -> float:
    """Returns how many rounds of n are verified for one token; those after a rejection are not."""
    run = _run_of(acceptance, num_draft_tokens)
    return 1.0 / num_draft_tokens if math.isinf(run.tokens) else (1.0 + run.rounds) / (1.0 + run.tokens)


def pipelined_break_even_rtt_s(
    acceptance: Acceptance, num_draft_tokens: int, models: ModelCosts, link: LinkCosts, rival_s: float
) -> float:
    """Returns the RTT below which pipelined rounds of n beat `rival_s` seconds a token; negative where none
    does, infinite where all do. `link.rtt_s` itself is not used; the number in flight is not limited."""
    draft_s, verify_s = models.draft_s(num_draft_tokens), models.verify_s(num_draft_tokens)
    period_s = _period_s(num_draft_tokens, draft_s, verify_s, link)
    run = _run_of(acceptance, num_draft_tokens)
    if math.isinf(run.tokens):
        return math.inf if period_s / num_draft_tokens < rival_s else -math.inf
    first_s = (1.0 + run.tokens) * rival_s - period_s * run.rounds - _rest_s(draft_s, period_s, models, link)
    return first_s - (round_s(num_draft_tokens, models, link) - link.rtt_s)


def num_in_flight(num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> int:
    """Returns how many rounds are in flight while everything is accepted, without a limit."""
    draft_s, verify_s = models.draft_s(num_draft_tokens), models.verify_s(num_draft_tokens)
    period_s = _period_s(num_draft_tokens, draft_s, verify_s, link)
    return _window(round_s(num_draft_tokens, models, link), period_s)


def _window(first_s: float, period_s: float) -> int:
    return math.ceil(first_s / period_s) if period_s else 1


def _period_s(num_draft_tokens: int, draft_s: float, verify_s: float, link: LinkCosts) -> float:
    up_s = (link.round_bytes_up + num_draft_tokens * link.draft_token_bytes_up) / link.rate_up
    down_s = link.round_bytes_down / link.rate_down
    return max(draft_s, verify_s, up_s, down_s) + link.work_s


def _rest_s(draft_s: float, period_s: float, models: ModelCosts, link: LinkCosts) -> float:
    share = draft_s / period_s if period_s else 0.0
    return share * models.draft_token_s / 2 + link.work_s


class Run(NamedTuple):
    """Holds the expected parts of a run; `tokens` and `rounds` are infinite where it never ends."""

    tokens: float  # before its rejection: sum over j >= 1 of P(j)
    rounds: float  # accepted as a whole: sum over k >= 1 of P(k n)
    first_wrong: float  # P(the first token of a later round is rejected): sum of P(k n) (1 - the next alpha)


def _run_of(acceptance: Acceptance, num_draft_tokens: int) -> Run:
    alphas = acceptance if isinstance(acceptance, Sequence) else [acceptance]
    return _run_of_positions(alphas, num_draft_tokens)


def _run_of_positions(alphas: Sequence[float], num_draft_tokens: int) -> Run:
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise ValueError(f"an acceptance of {alphas} is not in [0, 1]")
    tokens, rounds, first_wrong, reached, position = 0.0, 0.0, 0.0, 1.0, 0
    end = len(alphas) - 1
    # From the last alpha and a round's end on, the sums are geometric.
    while position < end or position % num_draft_tokens:
        reached *= alphas[min(position, end)]
        position += 1
        tokens += reached
        if position % num_draft_tokens == 0:
            rounds += reached
            first_wrong += reached * (1 - alphas[min(position, end)])
    last = alphas[-1]
    if last == 1.0:
        return Run(math.inf, math.inf, first_wrong) if reached else Run(tokens, rounds, first_wrong)
    whole = last**num_draft_tokens
    more = reached * whole / (1 - whole)
    return Run(tokens + reached * last / (1 - last), rounds + more, first_wrong + (1 - last) * more)
