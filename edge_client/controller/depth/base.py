"""What a depth policy is: it decides from the rounds it was shown, and from nothing else."""

from __future__ import annotations

from typing import Protocol

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop


class DepthPolicy(Protocol):
    """Pure. The session clips the answer to the text, the context and what the verifier takes."""

    def next_depth(self) -> int:
        """The most tokens to draft in the next round."""
        ...

    def stop_rule(self) -> ShouldStop | None:
        """What may end the next round's draft before `next_depth` tokens; None: nothing does."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """A round that was answered, or was not (`is_answered`)."""
        ...
