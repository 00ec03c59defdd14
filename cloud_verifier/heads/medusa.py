"""Medusa: heads that guess each of the next tokens from the target's last state alone (Cai et al. 2024,
arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from outrider.cloud_verifier.heads.modules import MedusaHead
from outrider.cloud_verifier.heads.sequence import Asked, Head, HeadRun, HeadSequence, Row


class MedusaRun(HeadRun):
    """Drafts by one row for each depth, whatever the path: all are computed at once."""

    def __init__(self, head: Head, sequences: Sequence[HeadSequence]) -> None:
        super().__init__(head, sequences)
        heads = list(cast("Iterator[MedusaHead]", head.weights.children()))
        features = torch.cat([each.features[-1:] for each in sequences])
        states, outputs = [each(features) for each in heads], [each.output for each in heads]
        score = head.backend.decoder.score
        if not any(outputs):  # all share the target's: one product
            logits = score(torch.cat(states))
        else:
            logits = torch.cat([(own or score)(state) for own, state in zip(outputs, states, strict=True)])
        places = [(number, depth) for depth in range(len(heads)) for number in range(len(sequences))]
        rows = self._read(logits, [(row, *place) for row, place in enumerate(places)])
        self._rows = dict(zip(places, rows, strict=True))

    def roots(self) -> list[Row]:
        """See `HeadRun.roots`."""
        return [self._rows[number, 0] for number in range(len(self._sequences))]

    def after(self, asked: Sequence[Asked]) -> list[list[Row]]:
        """See `HeadRun.after`."""
        return [[self._rows[number, len(path)] for path in paths] for number, paths in asked]
