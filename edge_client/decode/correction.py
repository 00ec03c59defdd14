"""The one decision of the verifier that an edge makes: the correction, where `candidates` is the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.sampling.support import choose_candidate
from outrider.common.types import Candidate, Support


@dataclass(slots=True)
class PendingCorrection:
    """A rejected draft token whose correction is still to be chosen. It stands until the text grows, whatever
    happens to the link meanwhile: another token of the target's in its place would be a sample of p, not of
    the residual.
    """

    position: int  # the index of the token to choose: the length of the text
    support: Support  # what the rejected token was sampled from
    num_seen: int = 0

    def choose(self, candidates: Sequence[Candidate], seed: int) -> int | None:
        """The first of the next candidates that passes; None: ask for more."""
        token_id = choose_candidate(self.support, candidates, seed, self.position, self.num_seen)
        self.num_seen += len(candidates)
        return token_id
