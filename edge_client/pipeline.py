"""How many rounds may be under way at once. Pure."""

from __future__ import annotations

from edge_client.stats import RoundRecord


class RoundWindow:
    """`size` rounds; 1 is a synchronous edge, which waits for each verdict before it drafts on."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def observe(self, record: RoundRecord) -> None:
        """Learns nothing."""
