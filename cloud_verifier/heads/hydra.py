"""Hydra: heads that see the drafted tokens before theirs (Ankner et al. 2024, arXiv 2402.05109)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from outrider.cloud_verifier.heads.sequence import Asked, Head, HeadRun, HeadSequence, Row
from outrider.common.types import TokenIds


class HydraRun(HeadRun):
    """Drafts by a row for each path: the head of its depth sees the embeddings of the last committed token and of the
    path."""

    def __init__(self, head: Head, sequences: Sequence[HeadSequence]) -> None:
        super().__init__(head, sequences)
        self._features = torch.cat([each.features[-1:] for each in sequences])

    def roots(self) -> list[Row]:
        """See `HeadRun.roots`."""
        return [row for (row,) in self.after([(number, [()]) for number in range(len(self._sequences))])]

    def after(self, asked: Sequence[Asked]) -> list[list[Row]]:
        """See `HeadRun.after`. Paths of one depth are one batch."""
        batches: dict[int, list[tuple[int, TokenIds]]] = defaultdict(list)
        for number, paths in asked:
            for path in paths:
                batches[len(path)].append((number, path))
        logits = torch.cat([self._logits(depth, batch) for depth, batch in batches.items()])
        places = [each for batch in batches.values() for each in batch]
        rows = self._read(logits, [(row, number, len(path)) for row, (number, path) in enumerate(places)])
        found = dict(zip(places, rows, strict=True))
        return [[found[number, path] for path in paths] for number, paths in asked]

    def _logits(self, depth: int, batch: Sequence[tuple[int, TokenIds]]) -> torch.Tensor:
        """Returns [paths, vocab_size] after paths of one length."""
        device = self._features.device
        ids = [(self._sequences[number].token_ids[-1], *path) for number, path in batch]
        embedded = self._head.embed(torch.tensor(ids, dtype=torch.int64, device=device))
        hidden = self._features[torch.tensor([number for number, _ in batch], device=device)]
        states = self._head.weights.get_submodule(str(depth))(hidden, embedded.unbind(1))
        return self._head.backend.decoder.score(states)
