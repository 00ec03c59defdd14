"""How likely a drafted token stands: by its place in the draft, and by how sure the draft is of it. Pure.

Both are rates of one event, "this token stands, given that all before it do", with older rounds forgotten.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence

MAX_DEPTH = 64
PRIOR_ACCEPTANCE = 0.85
_MEMORY = 0.98  # weight a round keeps with every later one
_PRIOR_WEIGHT = 10.0  # of the prior, in tokens
_OVERALL_WEIGHT = 8.0  # of the mean over all positions, in each of them
_KINSHIP = 0.8  # weight that a position's tokens have for the next position ...
_MOST_KIN = 30.0  # ... in tokens, at most
_SLOPE_WEIGHT = 1.0  # of a prior slope, as that many fallen tokens
_BIN_EDGES = (0.05, 0.15, 0.3, 0.6, 0.9)  # of confidences
_PRIOR_SLOPE = 0.3
_MIN_DOUBT = 0.05  # of a draft that is certain: the target may still think otherwise


class PositionAcceptance:
    """Per position of a draft. A token tells of its position, ever less of those behind it, and a little of
    all: a draft longer than all before goes on as its last positions did, then as the mean does."""

    def __init__(self) -> None:
        self._tried = [0.0] * MAX_DEPTH
        self._stood = [0.0] * MAX_DEPTH

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """The first `num_accepted` of `num_drafted` tokens stand; the one behind them, if any, fell."""
        self._tried = [_MEMORY * tried for tried in self._tried]
        self._stood = [_MEMORY * stood for stood in self._stood]
        for position in range(min(num_accepted + 1, num_drafted, MAX_DEPTH)):
            self._tried[position] += 1.0
            self._stood[position] += position < num_accepted

    def overall(self) -> float:
        """One acceptance for every position."""
        prior = _PRIOR_WEIGHT * PRIOR_ACCEPTANCE
        return (sum(self._stood) + prior) / (sum(self._tried) + _PRIOR_WEIGHT)

    def estimate(self) -> list[float]:
        """[MAX_DEPTH] acceptances, each given that all tokens before stand."""
        overall = self.overall()
        num_kin, kin_alpha = 0.0, overall  # tokens' worth of what the positions before say
        alphas = []
        for tried, stood in zip(self._tried, self._stood, strict=True):
            all_tried, all_stood = tried + num_kin, stood + num_kin * kin_alpha
            alphas.append((all_stood + _OVERALL_WEIGHT * overall) / (all_tried + _OVERALL_WEIGHT))
            if all_tried:
                kin_alpha = all_stood / all_tried
            num_kin = min(_KINSHIP * all_tried, _MOST_KIN)
        return alphas


class ConfidenceCalibration:
    """From the draft's own probability of a token to the probability that it stands.

    A token falls with probability slope * doubt, doubt = 1 - confidence: a draft and a target seldom differ
    where the draft is sure. The slope is learnt from all tokens, then corrected in each of a few bins by how
    many of its tokens fell against how many should have; few tokens correct little.
    """

    def __init__(self) -> None:
        self._fallen = [0.0] * (len(_BIN_EDGES) + 1)
        self._doubts = [0.0] * (len(_BIN_EDGES) + 1)  # sums over judged tokens

    @property
    def is_known(self) -> bool:
        return any(self._doubts)

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Those of a round's draft. Tokens behind the first that fell were not judged."""
        self._fallen = [_MEMORY * fallen for fallen in self._fallen]
        self._doubts = [_MEMORY * doubt for doubt in self._doubts]
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            number = bisect(_BIN_EDGES, confidence)
            self._fallen[number] += position == num_accepted
            self._doubts[number] += _doubt(confidence)

    def curve(self) -> Callable[[float], float]:
        """The acceptance by confidence, as known now."""
        slope = _correct(_PRIOR_SLOPE, sum(self._fallen), sum(self._doubts))
        slopes = [_correct(slope, f, d) for f, d in zip(self._fallen, self._doubts, strict=True)]

        def acceptance(confidence: float) -> float:
            return max(0.0, 1.0 - slopes[bisect(_BIN_EDGES, confidence)] * _doubt(confidence))

        return acceptance


def _correct(slope: float, num_fallen: float, doubts: float) -> float:
    """The mean of a gamma posterior whose prior has the mean `slope`."""
    return slope * (num_fallen + _SLOPE_WEIGHT) / (slope * doubts + _SLOPE_WEIGHT)


def _doubt(confidence: float) -> float:
    return max(1.0 - confidence, _MIN_DOUBT)
