"""How likely a drafted token is believed to stand: a distribution over a few acceptances. Pure.

Of a draft that nothing is known of most of the belief lies near what drafts usually have, the rest is spread
evenly: so a little luck moves little, and one that is much better or worse than usual is soon seen to be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

ALPHAS = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.57, 0.63, 0.68, 0.72, 0.76, 0.795, 0.825),
    *(0.855, 0.88, 0.905, 0.925, 0.945, 0.96, 0.975, 0.99),
)
_BORDERS = (0.0, *((low + high) / 2 for low, high in pairwise(ALPHAS)), 1.0)
_LOGS = tuple((math.log(alpha), math.log(1 - alpha)) for alpha in ALPHAS)
USUAL_STOOD, USUAL_FELL = 16.0, 4.0  # a Beta distribution: as if so many tokens had been judged
USUAL_SHARE = 0.95  # of the belief; the rest is uniform


def beliefs(num_stood: float, num_fell: float, first: Sequence[float] | None = None) -> list[float]:
    """The probability of each of ALPHAS, after so many judged tokens. `first`: before them, what is usual
    where it is None; none of it is 0."""
    logs = [
        math.log(before) + num_stood * stands + num_fell * falls
        for before, (stands, falls) in zip(first or usual_belief(), _LOGS, strict=True)
    ]
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    total = sum(weights)
    return [each / total for each in weights]


@functools.cache
def usual_belief() -> tuple[float, ...]:
    """Of a draft that nothing is known of."""
    stood, fell = USUAL_STOOD, USUAL_FELL
    scale = math.lgamma(stood + fell) - math.lgamma(stood) - math.lgamma(fell)
    weights = []
    for alpha, (low, high) in zip(ALPHAS, pairwise(_BORDERS), strict=True):
        usual = math.exp(scale + (stood - 1) * math.log(alpha) + (fell - 1) * math.log(1 - alpha))
        weights.append((USUAL_SHARE * usual + 1 - USUAL_SHARE) * (high - low))
    total = sum(weights)
    return tuple(each / total for each in weights)
