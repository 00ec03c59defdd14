"""Medusa: heads that guess each of the next tokens from the target's last state alone (Cai et al. 2024,
arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from outrider.cloud_verifier.heads.modules import MedusaHead
from outrider.cloud_verifier.heads.sequence import HeadSequence
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.rows.rows import Rows


class MedusaSequence(HeadSequence):
    """Drafts by one row for each depth, whatever the path."""

    _of_depth: Rows

    def feed_root(self) -> Rows:
        """See `RowsSequence.feed_root`. All depths are computed at once."""
        backend, logits = self._head.backend, []
        for head in cast("Sequence[MedusaHead]", self._head.weights.children()):
            state = head(self._features[-1:])
            logits.append(head.output(state) if head.output is not None else backend.decoder.score(state))
        self._of_depth = self._rows(torch.cat(logits))
        return self._of_depth.one(0)

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`."""
        for path in paths:
            yield self._of_depth.one(len(path)), 0
