"""The choice of the correction by the edge, where `candidates` is the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.sampling.support import choose_candidate
from outrider.common.types import Candidate, Support


@dataclass(slots=True)
class PendingCorrection:
    """A rejected draft token whose correction is still to be chosen. It stays pending until the sequence
    grows, whatever happens to the link meanwhile: another token of the target's in its place would be a
    sample of p, not of the residual.
    """

    position: int  # of the token to choose: the length of the sequence
    support: Support  # what the rejected token was sampled from
    num_seen: int = 0

    def choose(self, candidates: Sequence[Candidate], seed: int) -> int | None:
        """Returns the first of the next candidates that passes; None: more must be asked for."""
        token_id = choose_candidate(self.support, candidates, seed, self.position, self.num_seen)
        self.num_seen += len(candidates)
        return token_id
