"""Hydra: heads that see the drafted tokens before theirs (Ankner et al. 2024, arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.cloud_verifier.heads.sequence import HeadSequence
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.rows.rows import Rows


class HydraSequence(HeadSequence):
    """Drafts by a row for each path: the head of its depth sees the embeddings of the last committed token and of the
    path."""

    def feed_root(self) -> Rows:
        """See `RowsSequence.feed_root`."""
        return self._rows(self._logits([()]))

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`. Paths of one depth are one batch."""
        if not paths:
            return
        depths = sorted({len(path) for path in paths})
        batches = [[number for number, path in enumerate(paths) if len(path) == depth] for depth in depths]
        rows = self._rows(torch.cat([self._logits([paths[number] for number in batch]) for batch in batches]))
        place = {
            number: index for index, number in enumerate(number for batch in batches for number in batch)
        }
        for number in range(len(paths)):
            yield rows.one(place[number]), int(number == 0)

    def _logits(self, paths: Sequence[TokenIds]) -> torch.Tensor:
        """Returns [paths, vocab_size] after paths of one length."""
        depth = len(paths[0])
        token_ids = [token_id for path in paths for token_id in (self._text[-1], *path)]
        embedded = self._head.embed(token_ids).view(len(paths), depth + 1, -1)
        hidden = self._features[-1:].expand(len(paths), -1)
        states = self._head.weights.get_submodule(str(depth))(hidden, embedded.unbind(1))
        return self._head.backend.decoder.score(states)
