"""What pipelined rounds take, beside `costmodel`: the edge drafts on, and sends, while rounds are in flight.

Derivation. Rounds of n drafted tokens follow one another as if all before them were accepted. Call a run
what lies between two rejections. Its first verdict comes one whole round after its first draft token,

    L = n t_draft + RTT + t_verify(n) + bytes / rate,

and while everything stands a verdict follows every T = max(n t_draft, t_verify(n), bytes / rate), the slowest
of drafting, verifying and sending. A round that stands whole commits n tokens, not n + 1: what the verifier
says after them is what the next round's first token, drafted before it was known, is judged by. The run ends
with the round in which a token falls; that commits the tokens before it and the correction. With P(j) the
chance that j tokens in a row stand,

    tokens of a run   1 + sum over j >= 1 of P(j)                (one alpha: 1 / (1 - alpha))
    time of a run     L + T sum over k >= 1 of P(k n) + R        (one alpha: alpha^n / (1 - alpha^n))

where R = (n t_draft / T) t_draft / 2 is the rest of the draft token under way when a rejection arrives, for a
forward is not interrupted. Where at most W rounds may be in flight and W T < L, the edge waits L - W T after
each W rounds that stand: (L - W T) sum over k >= 1 of P(k W n) more. With nothing ever rejected this is T / n
a token: draft, trip and verification overlap. With everything rejected it is L + R: each costs the trip.

Assumed: rounds behind a rejection are answered without a forward and delay nobody; one session's rounds are
verified one after the other; the edge drafts, sends and listens at once; a token's chance to stand depends on
how many have stood since the last rejection, and is what it is for that position of a long draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.edge_client.controller.cost_model import Acceptance, LinkCosts, ModelCosts, round_s


def pipelined_token_s(
    acceptance: Acceptance,
    num_draft_tokens: int,
    models: ModelCosts,
    link: LinkCosts,
    max_in_flight: int | None = None,
) -> float:
    """Return seconds a token of pipelined rounds of n >= 1 tokens, `max_in_flight` unanswered at most.

    None: as many as need be.
    """
    first_s = round_s(num_draft_tokens, models, link)
    period_s = _period_s(num_draft_tokens, models, link)
    tokens, rounds = _run_sums(acceptance, num_draft_tokens)
    window = max_in_flight or num_in_flight(num_draft_tokens, models, link)
    wait_s = max(0.0, first_s - window * period_s)
    mean_period_s = period_s + wait_s / window
    if math.isinf(tokens):
        return mean_period_s / num_draft_tokens
    waits = _run_sums(acceptance, window * num_draft_tokens)[1]
    rest_s = _rest_s(num_draft_tokens, models, mean_period_s)
    return (first_s + period_s * rounds + wait_s * waits + rest_s) / (1.0 + tokens)


def fastest_pipelined(
    acceptance: Acceptance, models: ModelCosts, link: LinkCosts, max_num_draft_tokens: int
) -> tuple[int, float]:
    """Return the length of rounds, 1 to the maximum, of the fewest seconds a token, and those seconds."""
    lengths = range(1, max_num_draft_tokens + 1)
    seconds, best = min((pipelined_token_s(acceptance, n, models, link), n) for n in lengths)
    return best, seconds


def pipelined_rounds_per_token(acceptance: Acceptance, num_draft_tokens: int) -> float:
    """Return how many rounds of n are verified for one token; those behind a rejection are not."""
    tokens, rounds = _run_sums(acceptance, num_draft_tokens)
    return 1.0 / num_draft_tokens if math.isinf(tokens) else (1.0 + rounds) / (1.0 + tokens)


def pipelined_break_even_rtt_s(
    acceptance: Acceptance, num_draft_tokens: int, models: ModelCosts, link: LinkCosts, rival_s: float
) -> float:
    """Return the RTT below which pipelined rounds of n beat `rival_s` seconds a token; negative where none
    does, infinite where all do. `link.rtt_s` itself is not used; as many rounds as need be are in flight."""
    period_s = _period_s(num_draft_tokens, models, link)
    tokens, rounds = _run_sums(acceptance, num_draft_tokens)
    if math.isinf(tokens):
        return math.inf if period_s / num_draft_tokens < rival_s else -math.inf
    first_s = (1.0 + tokens) * rival_s - period_s * rounds - _rest_s(num_draft_tokens, models, period_s)
    return first_s - (round_s(num_draft_tokens, models, link) - link.rtt_s)


def num_in_flight(num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> int:
    """Return how many rounds are in flight while everything stands and nothing holds the edge back."""
    period_s = _period_s(num_draft_tokens, models, link)
    return math.ceil(round_s(num_draft_tokens, models, link) / period_s) if period_s else 1


def _period_s(num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> float:
    up_s = (link.round_bytes_up + num_draft_tokens * link.draft_token_bytes_up) / link.rate_up
    down_s = link.round_bytes_down / link.rate_down
    return max(models.draft_s(num_draft_tokens), models.verify_s(num_draft_tokens), up_s, down_s)


def _rest_s(num_draft_tokens: int, models: ModelCosts, period_s: float) -> float:
    share = models.draft_s(num_draft_tokens) / period_s if period_s else 0.0
    return share * models.draft_token_s / 2


def _run_sums(acceptance: Acceptance, num_draft_tokens: int) -> tuple[float, float]:
    """Return (sum over j >= 1 of P(j), sum over k >= 1 of P(k n)); both infinite where the run never ends."""
    alphas = list(acceptance) if isinstance(acceptance, Sequence) else [acceptance]
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise ValueError(f"an acceptance of {acceptance} is not in [0, 1]")
    tokens, rounds, reached, position = 0.0, 0.0, 1.0, 0
    # Until the last alpha holds and a round ends: from there on both sums are geometric.
    while position < len(alphas) - 1 or position % num_draft_tokens:
        reached *= alphas[min(position, len(alphas) - 1)]
        position += 1
        tokens += reached
        rounds += reached if position % num_draft_tokens == 0 else 0.0
    last = alphas[-1]
    if last == 1.0:
        return (math.inf, math.inf) if reached else (tokens, rounds)
    whole = last**num_draft_tokens
    return tokens + reached * last / (1 - last), rounds + reached * whole / (1 - whole)
