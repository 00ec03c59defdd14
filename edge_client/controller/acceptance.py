"""Estimates from judged rounds how likely the target accepts a drafted token. Pure.

One estimator reads the same judged tokens in three ways, since three decisions need different things:

- by position in the draft: how long a draft should be (rates, forgotten by the round);
- by the draft's own confidence: when to end a draft early (a calibration, forgotten likewise);
- as a posterior over one rate: whether rounds are worth it at all. It carries the uncertainty that a choice of
  the mode pays for, and begins with what earlier sequences had (`acceptance_prior`).

`BranchAcceptance` estimates the same of a draft's runner-up tokens, by the gap of the two scores. It is an
estimator of its own: it is read per token while branches are chosen, and is valid for method `coupled` only.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.common.types import RunnerUp
from outrider.edge_client.controller.acceptance_posterior import AcceptancePosterior, by_position
from outrider.edge_client.controller.cost_model import Acceptance
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.core.stats import RoundRecord


@dataclass(frozen=True, slots=True)
class Calibration:
    """Holds judged tokens by the draft's confidence, in the bins of `SETTINGS.confidence_bins`."""

    rejected: tuple[float, ...]  # tokens
    doubts: tuple[float, ...]  # sums of 1 - confidence

    def times(self, share: float) -> Calibration:
        """Returns it with that share of its weight."""
        return Calibration(
            tuple(share * each for each in self.rejected), tuple(share * each for each in self.doubts)
        )


class AcceptanceEstimator:
    """Estimates P(a drafted token is accepted | all before it are) from the rounds it observes."""

    def __init__(self, is_copied: bool = False) -> None:
        """`is_copied`: the draft has no model."""
        num_bins = len(SETTINGS.confidence_bins) + 1
        self.posterior = AcceptancePosterior(is_copied)
        self.is_copied = is_copied
        self._judged = [0.0] * MAX_DEPTH  # by position
        self._accepted = [0.0] * MAX_DEPTH
        self._num_in_a_row = 0  # accepted since the last rejection, where the draft copies
        self._rejected = [0.0] * num_bins  # by confidence
        self._doubts = [0.0] * num_bins  # sums over judged tokens

    def observe(self, record: RoundRecord) -> None:
        """Adds the judged tokens of a round. Of an unanswered one only a first token that another round's
        bonus rejected is known."""
        if record.is_first_wrong:
            self.observe_tokens(0, 1)
        if record.is_answered and record.num_draft_tokens:
            num_accepted, num_drafted = record.as_chain
            self.observe_tokens(num_accepted, num_drafted)
            self.observe_confidences(record.confidences, num_accepted)
        elif record.has_no_proposal:
            self._num_in_a_row = 0
            self.posterior.observe(0, 1)  # it brings as little as a draft whose first token is rejected

    def observe_tokens(self, num_accepted: int, num_drafted: int) -> None:
        """Adds a draft whose first `num_accepted` tokens were accepted and whose next one was rejected."""
        memory = SETTINGS.acceptance_memory_per_round
        self._judged = [memory * judged for judged in self._judged]
        self._accepted = [memory * accepted for accepted in self._accepted]
        first = self._num_in_a_row
        for number in range(min(num_accepted + 1, num_drafted)):
            position = min(first + number, MAX_DEPTH - 1)
            self._judged[position] += 1.0
            self._accepted[position] += number < num_accepted
        goes_on = self.is_copied and num_accepted == num_drafted
        self._num_in_a_row = first + num_accepted if goes_on else 0
        self.posterior.observe(num_accepted, int(num_accepted < num_drafted))

    def observe_confidences(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Adds the confidences of a round's draft. Tokens after the first rejected one were not judged."""
        memory = SETTINGS.acceptance_memory_per_round
        self._rejected = [memory * rejected for rejected in self._rejected]
        self._doubts = [memory * doubts for doubts in self._doubts]
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            number = bisect(SETTINGS.confidence_bins, confidence)
            self._rejected[number] += position == num_accepted
            self._doubts[number] += _doubt(confidence)

    def overall(self) -> float:
        """Returns one acceptance rate for every position."""
        weight = SETTINGS.prior_weight_tokens
        prior = weight * self.posterior.prior_mean
        return (sum(self._accepted) + prior) / (sum(self._judged) + weight)

    def by_position(self, num_assumed: int = 0) -> list[float]:
        """Returns [MAX_DEPTH] acceptance rates of the next draft, each given that all tokens before were accepted: also
        the `num_assumed` ones that are in flight.

        A position without observations continues the positions before it, and the overall rate; where the draft
        copies, what the prior says of that position, as copies are right for long or not at all. Their positions count
        from the last rejection on, as a copy goes on in the next round.
        """
        weight = SETTINGS.overall_weight_tokens
        usual = by_position(self.posterior.start) if self.is_copied else [self.overall()] * MAX_DEPTH
        num_near, near_alpha = 0.0, 0.0  # what the positions before contribute, in tokens
        alphas = []
        for judged, accepted, expected in zip(self._judged, self._accepted, usual, strict=True):
            all_judged, all_accepted = judged + num_near, accepted + num_near * near_alpha
            alphas.append((all_accepted + weight * expected) / (all_judged + weight))
            if all_judged:
                near_alpha = all_accepted / all_judged
            num_near = min(SETTINGS.neighbour_share * all_judged, SETTINGS.max_neighbour_tokens)
        start = min(self._num_in_a_row + num_assumed, MAX_DEPTH - 1) if self.is_copied else 0
        return alphas[start:] + alphas[-1:] * start

    def of_runs(self, num_assumed: int = 0) -> Acceptance:
        """Returns the acceptance of pipelined rounds after `num_assumed` tokens in flight: one rate, as their tokens
        count from the last rejection on, or of a draft that copies [MAX_DEPTH] rates by position."""
        return self.by_position(num_assumed) if self.is_copied else self.overall()

    @property
    def calibration(self) -> Calibration:
        """Returns what `by_confidence` is made of."""
        return Calibration(tuple(self._rejected), tuple(self._doubts))

    def start_from(self, earlier: Calibration) -> None:
        """Begins with the calibration of earlier sequences, before any token of this one was judged."""
        self._rejected, self._doubts = list(earlier.rejected), list(earlier.doubts)

    @property
    def has_confidences(self) -> bool:
        """Returns whether the draft reports confidences, some of whose tokens were judged."""
        return any(self._doubts)

    def by_confidence(self) -> Callable[[float], float]:
        """Returns the acceptance rate as a function of the draft's confidence, as of now.

        P(reject) = slope (1 - confidence). The slope is estimated from all tokens, then corrected in each bin
        by its rejected tokens against the expected ones.
        """
        slope = _gamma_mean(SETTINGS.prior_reject_slope, sum(self._rejected), sum(self._doubts))
        slopes = [_gamma_mean(slope, r, d) for r, d in zip(self._rejected, self._doubts, strict=True)]

        def acceptance(confidence: float) -> float:
            return max(0.0, 1.0 - slopes[bisect(SETTINGS.confidence_bins, confidence)] * _doubt(confidence))

        return acceptance


def _gamma_mean(slope: float, num_rejected: float, doubts: float) -> float:
    """Returns the mean of a gamma posterior whose prior has the mean `slope`."""
    weight = SETTINGS.reject_slope_weight_tokens
    return slope * (num_rejected + weight) / (slope * doubts + weight)


def _doubt(confidence: float) -> float:
    return max(1.0 - confidence, SETTINGS.min_doubt)


class BranchAcceptance:
    """Estimates by the gap between a drafted token and its runner-up how often a judged token is rejected,
    and how often the runner-up is then the correction."""

    def __init__(self) -> None:
        weight = SETTINGS.gap_prior_weight_tokens
        self._judged = [weight] * (len(SETTINGS.gap_bins_nats) + 1)
        self._rejected = [weight * rate for rate in SETTINGS.prior_reject_by_gap]
        self._corrected = [weight * rate for rate in SETTINGS.prior_runner_up_by_gap]

    def observe(self, runner_ups: Sequence[RunnerUp], num_accepted: int, correction: int) -> None:
        """Adds a round with `num_accepted` accepted tokens, followed by the token `correction`."""
        memory = SETTINGS.gap_memory_per_token
        for number, each in enumerate(runner_ups[: num_accepted + 1]):
            is_rejected = number == num_accepted
            index = bisect(SETTINGS.gap_bins_nats, each.gap)
            self._judged[index] = memory * self._judged[index] + 1
            self._rejected[index] = memory * self._rejected[index] + is_rejected
            is_right = is_rejected and each.token_id == correction
            self._corrected[index] = memory * self._corrected[index] + is_right

    def accept_rate(self, gap_nats: float) -> float:
        """Returns the probability that the drafted token is accepted."""
        index = bisect(SETTINGS.gap_bins_nats, gap_nats)
        return 1 - self._rejected[index] / self._judged[index]

    def runner_up_rate(self, gap_nats: float) -> float:
        """Returns the probability that the token is rejected and its runner-up is the correction."""
        index = bisect(SETTINGS.gap_bins_nats, gap_nats)
        return self._corrected[index] / self._judged[index]
