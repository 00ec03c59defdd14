"""The acceptance rate of a draft as a probability distribution over a grid of rates (grid Bayes)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul

from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS

ALPHAS = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.57, 0.63, 0.68, 0.72, 0.76, 0.795, 0.825),
    *(0.855, 0.88, 0.905, 0.925, 0.945, 0.96, 0.975, 0.99),
)
_LOGS = tuple((math.log(alpha), math.log(1 - alpha)) for alpha in ALPHAS)
# [tokens in a row][rate]: P(all accepted)
_IN_A_ROW = tuple(tuple(alpha**length for alpha in ALPHAS) for length in range(MAX_DEPTH + 1))
_BORDERS = (0.0, *((low + high) / 2 for low, high in pairwise(ALPHAS)), 1.0)


def posterior_of(
    num_accepted: float, num_rejected: float, prior: Sequence[float] | None = None
) -> list[float]:
    """Returns the probability of each of `ALPHAS` after so many judged tokens.

    `prior` [len(ALPHAS)] is positive everywhere; None is `usual_prior()`.
    """
    logs = [num_accepted * accept + num_rejected * reject for accept, reject in _LOGS]
    top = max(logs)
    weights = [
        before * math.exp(each - top) for before, each in zip(prior or usual_prior(), logs, strict=True)
    ]
    total = sum(weights)
    return [each / total for each in weights]


@functools.lru_cache(16)  # a prior's are asked for at every plan
def by_position(probabilities: tuple[float, ...]) -> tuple[float, ...]:
    """Returns [MAX_DEPTH] acceptance rates, each given that all tokens before were accepted, of a draft whose rate is
    another one in each round, with these probabilities of `ALPHAS`: they rise, as a draft that was right so far is
    more likely one of those that are right for long."""
    reached = [sum(map(mul, probabilities, each)) for each in _IN_A_ROW]
    return tuple(longer / shorter for shorter, longer in pairwise(reached))


@functools.cache
def usual_prior(is_copied: bool = False) -> tuple[float, ...]:
    """Returns the prior of an unknown draft: mostly a Beta distribution around the usual rate, the rest uniform, so
    that an unusual draft is recognised soon. With `is_copied`, of one that copies and has no model, all of it is
    uniform: such a draft is right for long or not at all."""
    accepted, rejected = SETTINGS.usual_accepted_tokens, SETTINGS.usual_rejected_tokens
    share = 0.0 if is_copied else SETTINGS.usual_share
    scale = math.lgamma(accepted + rejected) - math.lgamma(accepted) - math.lgamma(rejected)
    weights = []
    for alpha, (low, high) in zip(ALPHAS, pairwise(_BORDERS), strict=True):
        usual = math.exp(scale + (accepted - 1) * math.log(alpha) + (rejected - 1) * math.log(1 - alpha))
        weights.append((share * usual + 1 - share) * (high - low))
    total = sum(weights)
    return tuple(each / total for each in weights)


class AcceptancePosterior:
    """Holds the posterior of one sequence's acceptance rate, which may change on the way.

    Before each judged token the rate is drawn anew from the prior with a small probability (fixed share,
    Herbster and Warmuth 1998): where a text begins to repeat itself, some twenty accepted tokens say so,
    whatever came before them.
    """

    def __init__(self, is_copied: bool = False) -> None:
        """`is_copied`: the draft has no model, see `usual_prior`."""
        self.usual = usual_prior(is_copied)
        self._prior = self.usual
        # The prior, with what is known of this sequence before any token was judged.
        self._start: tuple[float, ...] = self.usual
        self._weights: list[float] | None = None  # None: nothing was judged
        self.num_judged = 0  # tokens

    @property
    def has_observed(self) -> bool:
        """Returns whether any token was judged."""
        return self._weights is not None

    @property
    def probabilities(self) -> Sequence[float]:
        """Returns the probability of each of `ALPHAS`."""
        return self._start if self._weights is None else self._weights

    @property
    def start(self) -> tuple[float, ...]:
        """Returns the probability of each of `ALPHAS` before any token of this sequence was judged."""
        return self._start

    @property
    def prior_mean(self) -> float:
        """Returns the mean of the rate before any token of this sequence was judged."""
        return sum(alpha * weight for alpha, weight in zip(ALPHAS, self._start, strict=True))

    def start_from(self, prior: Sequence[float]) -> None:
        """Replaces the usual prior, before any token of this sequence was judged."""
        self._prior = self._start = tuple(prior)

    def expect(self, num_accepted: float, num_rejected: float) -> None:
        """Begins as if so many tokens had been judged. A rate that changes is drawn from the prior as ever."""
        self._start = tuple(posterior_of(num_accepted, num_rejected, self._start))

    def observe(self, num_accepted: int, num_rejected: int) -> None:
        """Adds judged tokens."""
        self.num_judged += num_accepted + num_rejected
        kept = (1.0 - SETTINGS.change_probability) ** (num_accepted + num_rejected)
        before = [
            kept * each + (1 - kept) * anew
            for each, anew in zip(self.probabilities, self._prior, strict=True)
        ]
        self._weights = posterior_of(num_accepted, num_rejected, before)
