"""How likely a drafted token is believed to stand: a distribution over a few acceptances. Pure.

Before any token was judged most of the belief lies near what drafts usually have, the rest is spread evenly:
so a little luck moves little, and a draft that is much better or worse than usual is soon seen to be.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise

ALPHAS = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.57, 0.63, 0.68, 0.72, 0.76, 0.795, 0.825),
    *(0.855, 0.88, 0.905, 0.925, 0.945, 0.96, 0.975, 0.99),
)
_BORDERS = (0.0, *((low + high) / 2 for low, high in pairwise(ALPHAS)), 1.0)
_LOGS = tuple((math.log(alpha), math.log(1 - alpha)) for alpha in ALPHAS)
USUAL_STOOD, USUAL_FELL = 16.0, 4.0  # a Beta distribution: as if so many tokens had been judged
USUAL_SHARE = 0.95  # of the belief; the rest is uniform


def beliefs(num_stood: float, num_fell: float) -> list[float]:
    """The probability of each of ALPHAS, after so many judged tokens."""
    priors = _log_priors(USUAL_STOOD, USUAL_FELL, USUAL_SHARE)
    logs = [
        prior + num_stood * stands + num_fell * falls
        for prior, (stands, falls) in zip(priors, _LOGS, strict=True)
    ]
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    total = sum(weights)
    return [each / total for each in weights]


@functools.cache
def _log_priors(stood: float, fell: float, share: float) -> list[float]:
    scale = math.lgamma(stood + fell) - math.lgamma(stood) - math.lgamma(fell)
    logs = []
    for alpha, (low, high) in zip(ALPHAS, pairwise(_BORDERS), strict=True):
        usual = math.exp(scale + (stood - 1) * math.log(alpha) + (fell - 1) * math.log(1 - alpha))
        logs.append(math.log((share * usual + 1 - share) * (high - low)))
    return logs
