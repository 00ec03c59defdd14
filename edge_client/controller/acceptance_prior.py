"""The prior of a new sequence's acceptance rate, from the posteriors of earlier sequences. Thread-safe.

The prior is the mean of the usual prior and of the posteriors of earlier sequences with the same draft,
target and similar temperature, each counted once however long it was; the last ones count most. So it is
narrow where sequences are alike and wide where they differ (predictive recursion, Newton 2002, with a floor
under its weights). Link and load do not enter: acceptance does not depend on them. What rounds and streams
took in the last sequences is kept beside it. It is used with method `coupled` alone: there a token that the
draft predicts of a stream is one that would have been accepted. With other methods the probe underestimates
acceptance, and a session that streamed would make the next one stream too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from outrider.edge_client.controller.acceptance import Calibration
from outrider.edge_client.controller.acceptance_posterior import usual_prior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.round_costs import EarlierCosts
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.options import ExecutionMode


@dataclass(frozen=True, slots=True)
class PriorKey:
    """Identifies what the acceptance of one draft depends on, beside the sequence itself."""

    target_fingerprint: str
    temperature_halves: int  # temperatures within a quarter share a prior: acceptance is nearly the same

    @classmethod
    def at(cls, target_fingerprint: str, temperature: float) -> Self:
        """Returns the key of a target and a sampling temperature."""
        return cls(target_fingerprint, round(2 * temperature))


@dataclass(slots=True)
class _Sequences:
    num: int
    mean: list[float]  # of their posteriors
    calibration: Calibration | None = None  # at the end of the last one
    num_judged: int = 0  # tokens of all of them


class AcceptancePrior:
    """Holds the priors of one draft by `PriorKey`, as probabilities of `acceptance_posterior.ALPHAS`."""

    def __init__(self) -> None:
        self.costs = EarlierCosts()
        """What the last sequence found of the times of rounds and of a stream."""
        self._time_ratios: dict[ExecutionMode, float] = {}
        self._lock = threading.Lock()
        self._sequences: dict[PriorKey, _Sequences] = {}

    # ------------------------------------------------------------------------- of a sequence's conditions

    def start_times(self, conditions: Conditions) -> None:
        """Lets a sequence that is about to begin start with the times of earlier ones."""
        conditions.costs.start_from(self.costs)
        conditions.start_from_time_ratios(self.time_ratios)

    def start_acceptance(self, key: PriorKey, conditions: Conditions) -> None:
        """Lets a sequence that is about to begin start with the acceptance of earlier ones."""
        posterior = conditions.acceptance.posterior
        posterior.start_from(self.probabilities(key, posterior.usual))
        if (earlier := self.calibration(key)) is not None:
            conditions.acceptance.start_from(earlier)

    def learn_from(self, key: PriorKey, conditions: Conditions) -> None:
        """Adds what a sequence that has ended found, unless nothing of its drafts was judged."""
        acceptance = conditions.acceptance
        if (posterior := acceptance.posterior).has_observed:
            self.learn(key, posterior.probabilities, acceptance.calibration, posterior.num_judged)
            self.learn_time_ratios(conditions.learned_time_ratios)
            self.costs = conditions.costs.learned()

    # ------------------------------------------------------------------------------------- its parts

    def probabilities(self, key: PriorKey, usual: Sequence[float] | None = None) -> list[float]:
        """Returns the prior of a sequence that is about to begin. `usual` is that of an unknown draft of this kind;
        None: `usual_prior()`."""
        usual = usual or usual_prior()
        with self._lock:
            known = self._sequences.get(key)
            if known is None:
                return list(usual)
            return [(u + known.num * m) / (1 + known.num) for u, m in zip(usual, known.mean, strict=True)]

    def num_judged(self, temperature: float) -> int:
        """Returns how many tokens of earlier sequences at a similar temperature were judged, by whatever target."""
        halves = PriorKey.at("", temperature).temperature_halves
        with self._lock:
            return sum(
                each.num_judged for key, each in self._sequences.items() if key.temperature_halves == halves
            )

    def calibration(self, key: PriorKey) -> Calibration | None:
        """Returns how much the draft's confidence was worth in the last sequence, with a share of its weight."""
        with self._lock:
            known = self._sequences.get(key)
        if known is None or known.calibration is None:
            return None
        return known.calibration.times(SETTINGS.carried_calibration_share)

    @property
    def time_ratios(self) -> Mapping[ExecutionMode, float]:
        """Returns the time that modes took relative to the cost model's, of those that ran in the last sequences."""
        with self._lock:
            return dict(self._time_ratios)

    def learn_time_ratios(self, ratios: Mapping[ExecutionMode, float]) -> None:
        """Adds what a sequence, which began with the ratios so far, found."""
        with self._lock:
            self._time_ratios.update(ratios)

    def learn(
        self,
        key: PriorKey,
        posterior: Sequence[float],
        calibration: Calibration | None = None,
        num_judged: int = 0,
    ) -> None:
        """Adds what a sequence ended with, `num_judged` of whose tokens were judged."""
        with self._lock:
            known = self._sequences.setdefault(key, _Sequences(0, [0.0] * len(posterior)))
            known.num_judged += num_judged
            known.num = min(known.num + 1, SETTINGS.max_remembered_sequences)
            known.mean = [m + (p - m) / known.num for m, p in zip(known.mean, posterior, strict=True)]
            if calibration is not None and any(calibration.doubts):
                known.calibration = calibration
