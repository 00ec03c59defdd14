"""Estimates the chance that a node of a tree is accepted, and learns it from every verdict.

The target's token is among the continuations that a source told with the chance c, and is one that scores g nats
less than the first with a chance proportional to exp(−g / τ). A draft that is sampled with the target's noise
needs a τ below 1: most of what makes its score uncertain is in both. c and τ are learned for each source; a
node's value is the product of the chances along its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.common.types import DRAFT_SOURCE
from outrider.edge_client.drafting.draw_chances import DrawChances
from outrider.edge_client.drafting.trees import Continuations, TreeDraft

_TAUS = np.geomspace(0.1, 2.0, 25)
_MEMORY = 500.0  # observations after which an old one counts for 1/e of a new one


@dataclass(frozen=True, slots=True)
class Prior:
    """Holds what is assumed of a source before anything was observed."""

    tau: float
    covered: float  # the chance that the target's token is among the continuations
    weight: float = 8.0  # observations that it counts for


DRAFT_PRIOR = Prior(tau=0.45, covered=0.98)  # a draft model's own pairs: .3 to .5 (`make bench-trees`)
CHAIN_SOURCE = "chain"  # a draft model's chain in a union: its sampled tokens, one a place
CHAIN_PRIOR = Prior(tau=1.0, covered=0.75)
COPY_PRIOR = Prior(tau=1.0, covered=0.5)  # gaps are logarithms of counts
# Of a copy, by the length of its run, whose range ends its source's name: before a draft model was asked, where it
# expects the same token (`AGREED`), and where it expects another (`DIFFERED`). By hand, between what fresh texts of the
# embedded pair showed and what texts did that had been written before (docs/sources.md).
AGREED, DIFFERED = "=", "!"
_COPIED = {
    "1": (0.3, 0.93, 0.12),
    "2": (0.3, 0.93, 0.12),
    "3-4": (0.35, 0.95, 0.08),
    "5-8": (0.5, 0.93, 0.2),
    "9-16": (0.65, 0.93, 0.3),
    "17+": (0.85, 0.97, 0.5),
}


def _prior_of(source: str) -> Prior:
    """Returns what is assumed of a source that copies."""
    shares = _COPIED.get(source.rstrip(AGREED + DIFFERED).partition("-")[2])
    if shares is None:
        return COPY_PRIOR
    return Prior(
        COPY_PRIOR.tau, weight=4.0, covered=shares[source.endswith(AGREED) + 2 * source.endswith(DIFFERED)]
    )


class NodeValues:
    """Learns one τ and one c a source. Pure: depends on nothing but what it was told."""

    def __init__(self, draft: Prior = DRAFT_PRIOR) -> None:
        self._priors = {DRAFT_SOURCE: draft, CHAIN_SOURCE: CHAIN_PRIOR}
        self._sources: dict[str, _Source] = {}
        self.draws = DrawChances()  # of trees whose children are drawn from supports

    def chances(self, continuations: Continuations) -> list[float]:
        """Returns the chance of each continuation to be the target's token; falling, and at most 1 in sum."""
        return self._source(continuations.source).chances(continuations.gaps)

    def observe(self, draft: TreeDraft, accepted_nodes: Sequence[int], next_token: int | None) -> None:
        """Learns from a verdict: the nodes that were accepted, from the root on, and the target's token after
        them; None where the text ended before one."""
        if not draft.continuations:
            if draft.supports:  # its children were drawn
                self.draws.observe(draft, accepted_nodes, next_token)
            return
        following = [*(draft.token_ids[node] for node in accepted_nodes), next_token]
        for node, token_id in zip((-1, *accepted_nodes), following, strict=True):
            if token_id is None:
                continue
            for told in draft.continuations[node + 1]:
                if told.token_ids:
                    found = told.token_ids.index(token_id) if token_id in told.token_ids else None
                    self._source(told.source).observe(told.gaps, found)

    def tau(self, source: str) -> float:
        """Returns the τ of a source."""
        return self._source(source).tau

    def _source(self, name: str) -> _Source:
        found = self._sources.get(name)
        if found is None:
            found = self._sources[name] = _Source(self._priors.get(name) or _prior_of(name))
        return found


class _Source:
    """Holds the likelihood of each τ, and counts for c. Old observations fade."""

    def __init__(self, prior: Prior) -> None:
        self.tau = prior.tau
        self._prior = -prior.weight * np.log(_TAUS / prior.tau) ** 2
        self._log_likelihoods: NDArray[np.float64] = np.zeros(len(_TAUS))
        self._num_covered = prior.weight * prior.covered
        self._num_observed = prior.weight

    def chances(self, gaps: Sequence[float]) -> list[float]:
        weights = [math.exp(-gap / self.tau) for gap in gaps]
        share = self._num_covered / self._num_observed / sum(weights) if weights else 0.0
        return [share * weight for weight in weights]

    def observe(self, gaps: Sequence[float], found: int | None) -> None:
        kept = 1 - 1 / _MEMORY
        self._num_covered = self._num_covered * kept + (found is not None)
        self._num_observed = self._num_observed * kept + 1
        if found is None or len(gaps) == 1:
            return
        scores = -np.array(gaps) / _TAUS[:, None]  # [taus, continuations]
        self._log_likelihoods *= kept
        self._log_likelihoods += scores[:, found] - np.log(np.exp(scores).sum(axis=1))
        self.tau = float(_TAUS[(self._log_likelihoods + self._prior).argmax()])
