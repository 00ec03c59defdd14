"""Every outcome of code that decides by chance, with its probability.

The code under test runs again and again; each time a `Chance` answers its questions (is a coin below this
probability, which id wins this race of noise) by a script, and all scripts are tried, depth first.

Chance is keyed, as in the product: a question with a key that was asked before in the same history is
answered under what that key's number is known to be already. So code that uses a key twice is enumerated with
the dependence it really has, not with the independence it hopes for. What is known of a key:

- a uniform number: the interval it lies in;
- a row of noise: who won which races. With E the exponentials behind the Gumbel noise, argmax(log w + noise)
  is argmin(E / w).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

Key = tuple[Any, float, float]  # purpose, position, index
Weights = tuple[float, ...]
Races = tuple[tuple[Weights, int], ...]  # weights, and the id that won with them
Interval = tuple[float, float]
Known = dict[Key, "Interval | Races"]
T = TypeVar("T")


class Chance:
    """One history: what the script says, and what its keys are known to be."""

    def __init__(self, script: list[int], known: Known) -> None:
        self.probability = 1.0
        self.known = known  # grows
        self.asked: set[Key] = set()
        self.options: list[list[int]] = []  # of positive probability, per decision
        self._script = script

    def is_below(self, key: Key, probability: float) -> bool:
        """Whether the uniform number of `key` is below `probability`."""
        low, high = self._interval(key)
        cut = min(max(probability, low), high)
        if self._decide(((cut - low) / (high - low), (high - cut) / (high - low))) == 0:
            self.known[key] = (low, cut)
            return True
        self.known[key] = (cut, high)
        return False

    def pick(self, key: Key, weights: Sequence[float]) -> int:
        """The index whose share of [0, 1) the uniform number of `key` falls into: an inverse CDF."""
        low, high = self._interval(key)
        total, below = sum(weights), 0.0
        shares = []
        for weight in weights:
            start, below = below / total, below + weight
            shares.append((max(low, start), min(high, below / total)))
        index = self._decide([max(0.0, stop - start) / (high - low) for start, stop in shares])
        self.known[key] = shares[index]
        return index

    def race(self, key: Key, weights: Weights) -> int:
        """argmax(log weight + noise of `key`)."""
        races = self.known.get(key, ())
        self.asked.add(key)
        run_before = dict(races).get(weights)
        if run_before is not None:  # the same noise over the same weights
            return run_before
        if races:
            before = race_probability(races)
            probs = [race_probability((*races, (weights, i))) / before for i in range(len(weights))]
        else:
            total = sum(weights)
            probs = [weight / total for weight in weights]
        winner = self._decide(probs)
        self.known[key] = (*races, (weights, winner))
        return winner

    def _interval(self, key: Key) -> Interval:
        self.asked.add(key)
        return self.known.get(key, (0.0, 1.0))  # type: ignore[return-value]

    def _decide(self, probs: Sequence[float]) -> int:
        depth = len(self.options)
        options = [index for index, prob in enumerate(probs) if prob > 0]
        self.options.append(options)
        if depth == len(self._script):
            self._script.append(0)
        choice = options[self._script[depth]]
        self.probability *= probs[choice]
        return choice


def all_outcomes(run: Callable[[Chance], T], known: Known) -> Iterator[tuple[T, Chance]]:
    """Yield what `run(chance)` returns in every history that begins with `known`; probabilities sum to 1."""
    script: list[int] = []
    while True:
        chance = Chance(script, dict(known))
        result = run(chance)
        assert len(chance.options) == len(script), "the code under test is not a function of its input"
        yield result, chance
        while script and script[-1] == len(chance.options[len(script) - 1]) - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


@lru_cache(maxsize=1 << 18)
def race_probability(races: Races) -> float:
    """P(argmin_i E_i / w_i = winner, for every (w, winner) of `races`), E one row of exponentials.

    With one winner a, the others need E_j ≥ E_a max(w_j / w_a): 1 / (1 + Σ of those ratios). With two, a and
    b, and t = E_b / E_a: the integral of dt / S(t)², S(t) = 1 + t + Σ_j max(r_j, s_j t), over the t for which
    a and b do not beat each other. S is linear by pieces, so each piece is (t₂ − t₁) / (S(t₁) S(t₂)).
    """
    if any(weights[winner] <= 0 for weights, winner in races):
        return 0.0
    winners = sorted({winner for _, winner in races})
    assert len(winners) <= 2, "three races of one row with three winners: not needed so far"
    ratios = [_most_over_winner(races, winner) for winner in winners]
    if len(winners) == 1:
        return 1.0 / sum(ratios[0])
    (a, b), (r, s) = winners, ratios
    others = [j for j in range(len(r)) if j not in (a, b)]
    start, stop = r[b], 1.0 / s[a] if s[a] > 0 else float("inf")
    if start >= stop:
        return 0.0

    def total(t: float) -> float:
        return 1.0 + t + sum(max(r[j], s[j] * t) for j in others)

    kinks = {r[j] / s[j] for j in others if s[j] > 0}
    edges = [start, *sorted(t for t in kinks if start < t < stop)]
    area = sum((v - u) / (total(u) * total(v)) for u, v in itertools.pairwise(edges))
    last = edges[-1]
    if stop < float("inf"):
        return area + (stop - last) / (total(last) * total(stop))
    slope = 1.0 + sum(s[j] for j in others)
    return area + 1.0 / (slope * total(last))


def _most_over_winner(races: Races, winner: int) -> list[float]:
    own = [weights for weights, won in races if won == winner]
    return [max(weights[j] / weights[winner] for weights in own) for j in range(len(own[0]))]
