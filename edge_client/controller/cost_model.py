"""Expected times and tokens of rounds: one cost model for plans, depth policies, the mode and simulations.

Times are in seconds, sizes in bytes, rates in bytes a second. alpha is P(a drafted token is accepted | all
before it in its draft are). For synchronous rounds of n drafted tokens:

    E[n]           = 1 + alpha + ... + alpha^n = (1 - alpha^(n+1)) / (1 - alpha)    tokens a round
    round_s        = n t_draft + RTT + t_verify(n) + bytes / rate
    seconds/token  = round_s / E[n]
    break-even RTT = E[n] t_rival - n t_draft - t_verify(n) - bytes / rate

E[n] is that of Leviathan et al. 2023, §3.1. One session alone is modelled, without waiting for others in a
queue. Pipelined rounds are in `cost_model_pipelined`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Acceptance = float | Sequence[float]  # one alpha for all positions, or one for each


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Holds compute times.

    Drafting n tokens takes `draft_fixed_s + n * draft_token_s` (a round's first draft also reads the
    correction), verifying them `verify_fixed_s + n * verify_token_s`, or (n + 1) `verify_row_s` where that is
    longer.
    """

    draft_token_s: float
    target_token_s: float  # one cloud-only step
    verify_fixed_s: float
    verify_token_s: float = 0.0
    colocated_draft_token_s: float | None = None  # beside the target; None: as long as at the edge
    draft_fixed_s: float = 0.0  # with what else an edge does between an answer and its next round
    verify_row_s: float = 0.0  # compute of one row, where it may bound the forward of n + 1 rows (roofline)

    def draft_s(self, num_draft_tokens: int) -> float:
        """Returns the time of drafting; none for an empty draft."""
        return self.draft_fixed_s + num_draft_tokens * self.draft_token_s if num_draft_tokens else 0.0

    def verify_s(self, num_draft_tokens: int) -> float:
        """Returns the time of verifying."""
        linear_s = self.verify_fixed_s + num_draft_tokens * self.verify_token_s
        return max(linear_s, (num_draft_tokens + 1) * self.verify_row_s) if self.verify_row_s else linear_s


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Holds the link's round trip time, its rates and the sizes of messages."""

    rtt_s: float
    rate_up: float = math.inf
    rate_down: float = math.inf
    round_bytes_up: float = 40.0  # a request without its draft tokens
    draft_token_bytes_up: float = 8.0
    round_bytes_down: float = 80.0
    stream_token_bytes_down: float = 60.0  # one cloud-only token
    work_s: float = 0.0  # of `rtt_s`: what keeps processors busy that draft and verify too, as over loopback

    def transfer_s(self, num_draft_tokens: int) -> float:
        """Returns the time that a round's messages add to its round trip."""
        bytes_up = self.round_bytes_up + num_draft_tokens * self.draft_token_bytes_up
        return bytes_up / self.rate_up + self.round_bytes_down / self.rate_down


def expected_tokens(acceptance: Acceptance, num_draft_tokens: int) -> float:
    """Returns E[n], the tokens a round of n drafted tokens commits, correction or bonus included.

    One alpha: (1 - alpha^(n+1)) / (1 - alpha). One alpha a position (the last repeats):
    1 + a_1 + a_1 a_2 + ... + a_1 ... a_n. Raises ValueError outside [0, 1].
    """
    if isinstance(acceptance, float) and 0 <= acceptance < 1:
        return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)
    alphas = _per_position(acceptance, num_draft_tokens)
    total, reached = 1.0, 1.0
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise ValueError(f"an acceptance of {alpha} is not in [0, 1]")
        reached *= alpha
        total += reached
    return total


def _per_position(acceptance: Acceptance, num_draft_tokens: int) -> list[float]:
    if isinstance(acceptance, Sequence):
        if not acceptance and num_draft_tokens:
            raise ValueError("no acceptance for any position")
        last = len(acceptance) - 1
        return [acceptance[min(index, last)] for index in range(num_draft_tokens)]
    return [acceptance] * num_draft_tokens


def round_s(num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> float:
    """Returns how long a synchronous round takes: n t_draft + RTT + t_verify(n) + bytes / rate."""
    compute_s = models.draft_s(num_draft_tokens) + models.verify_s(num_draft_tokens)
    return compute_s + link.rtt_s + link.transfer_s(num_draft_tokens)


def round_token_s(models: ModelCosts, link: LinkCosts) -> float:
    """Returns what one more drafted token adds to a round: its draft, its verification, its bytes."""
    return models.draft_token_s + models.verify_token_s + link.draft_token_bytes_up / link.rate_up


def cloud_only_s(models: ModelCosts, link: LinkCosts) -> float:
    """Returns seconds a token streamed cloud-only: the slower of the target and the link; RTT is hidden."""
    return max(models.target_token_s, link.stream_token_bytes_down / link.rate_down)


def edge_only_s(models: ModelCosts) -> float:
    """Returns seconds a token of the draft alone."""
    return models.draft_token_s


def colocated_s(acceptance: Acceptance, num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> float:
    """Returns seconds a token where draft and target work side by side and each round is one streamed
    message.

    The slower of n t_draft + t_verify(n) and the link's rate, over E[n]; RTT is hidden as in cloud-only.
    """
    round_there_s = round_s(num_draft_tokens, colocated_models(models), LinkCosts(rtt_s=0.0))
    message_s = link.stream_token_bytes_down / link.rate_down
    return max(round_there_s, message_s) / expected_tokens(acceptance, num_draft_tokens)


def colocated_models(models: ModelCosts) -> ModelCosts:
    """Returns the costs with the draft that runs beside the target."""
    there_s = models.colocated_draft_token_s
    return models if there_s is None else replace(models, draft_token_s=there_s, draft_fixed_s=0.0)


def tokens_per_s(acceptance: Acceptance, num_draft_tokens: int, models: ModelCosts, link: LinkCosts) -> float:
    """Returns committed tokens a second of synchronous rounds of one draft length."""
    return expected_tokens(acceptance, num_draft_tokens) / round_s(num_draft_tokens, models, link)


def rounds_s(
    acceptance: Acceptance, num_draft_tokens: int, num_tokens: int, models: ModelCosts, link: LinkCosts
) -> float:
    """Returns how long synchronous rounds of n take for the next `num_tokens` tokens.

    The last rounds draft no more than is left, so short sequences commit less than E[n] a round.
    """
    alphas = _per_position(acceptance, num_draft_tokens)
    reached = [1.0]  # P(the first i drafted tokens are accepted)
    for alpha in alphas:
        reached.append(reached[-1] * alpha)
    left_s = [0.0]  # by tokens left to commit
    for left in range(1, num_tokens + 1):
        n = min(num_draft_tokens, left - 1)
        stops = (reached[i] * (1 - alphas[i]) * left_s[left - i - 1] for i in range(n))
        left_s.append(round_s(n, models, link) + sum(stops) + reached[n] * left_s[left - n - 1])
    return left_s[num_tokens]


def rounds_start_s(alpha: float, whole_s: float) -> float:
    """Returns what N tokens take (`rounds_s`) beyond N times the time of one, about alpha L / 2 with a round's time L,
    `whole_s`: of the last round some tokens are not wanted. It is less where a drafted token's time counts, as the
    last draft is shorter."""
    return alpha * whole_s / 2


def break_even_rtt_s(
    acceptance: Acceptance,
    num_draft_tokens: int,
    models: ModelCosts,
    link: LinkCosts,
    rival_s: float | None = None,
) -> float:
    """Returns the RTT below which rounds of n beat `rival_s` seconds a token (None: cloud-only); negative
    where none does. `link.rtt_s` itself is not used."""
    rival_s = cloud_only_s(models, link) if rival_s is None else rival_s
    gain_s = expected_tokens(acceptance, num_draft_tokens) * rival_s
    return gain_s - (round_s(num_draft_tokens, models, link) - link.rtt_s)


def fastest_round(
    acceptance: Acceptance, models: ModelCosts, link: LinkCosts, max_num_draft_tokens: int
) -> tuple[int, float]:
    """Returns the draft length, 1 to the maximum, of most tokens a second, and how many that are.

    A further token's gain only decreases while its cost is constant, so the search ends at the first length
    that is slower than the one before.
    """
    best, best_rate = 0, 0.0
    total, reached = 1.0, 1.0
    for n, alpha in enumerate(_per_position(acceptance, max_num_draft_tokens), start=1):
        reached *= alpha
        total += reached
        rate = total / round_s(n, models, link)
        if rate < best_rate:
            break
        if rate > best_rate:
            best, best_rate = n, rate
    return best, best_rate
