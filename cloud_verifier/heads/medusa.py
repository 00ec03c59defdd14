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
        heads = list(cast("Iterator[MedusaHead]", self._head.weights.children()))
        states = [head(self._features[-1:]) for head in heads]
        outputs = [head.output for head in heads]
        score = self._head.backend.decoder.score
        if not any(outputs):  # all share the target's: one product
            logits = score(torch.cat(states))
        else:
            logits = torch.cat([(own or score)(state) for own, state in zip(outputs, states, strict=True)])
        self._of_depth = self._rows(logits)
        return self._of_depth.one(0)

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`."""
        for path in paths:
            yield self._of_depth.one(len(path)), 0
