"""The points of models and links that controllers are judged at, in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts

RTTS_MS = (1, 5, 20, 60, 200, 600)
FORWARDS_MS = (5, 30, 70)
DRAFTS_MS = (0.2, 2, 12)
VERIFY_TOKEN_SHARE = 0.015  # of a forward, each token more: what large targets on GPUs take or less


@dataclass(frozen=True, slots=True)
class Point:
    """Holds a point of models and link."""

    rtt_ms: float
    forward_ms: float
    draft_ms: float

    @property
    def models(self) -> ModelCosts:
        """Returns the models' costs."""
        forward_s = self.forward_ms / 1e3
        return ModelCosts(self.draft_ms / 1e3, forward_s, forward_s, VERIFY_TOKEN_SHARE * forward_s)

    @property
    def link(self) -> LinkCosts:
        """Returns the link's costs."""
        return LinkCosts(rtt_s=self.rtt_ms / 1e3)

    def __str__(self) -> str:
        return f"RTT {self.rtt_ms:g} forward {self.forward_ms:g} draft {self.draft_ms:g} ms"


POINTS = [Point(*parts) for parts in itertools.product(RTTS_MS, FORWARDS_MS, DRAFTS_MS)]
# Of them where the modes are compared, which takes four sessions a text: the ends of the forwards are enough.
MODE_POINTS = [point for point in POINTS if point.rtt_ms != 5 and point.forward_ms != 30]

# Acceptances that real pairs have seldom, and what the draft knows of its tokens.
SYNTHETIC = ((0.3, "none"), (0.8, "none"), (0.95, "none"), (0.8, "certain"), (0.8, "knows"))
