"""The tokens that a forward feeds of each sequence, and their parts where one pass cannot take all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.cloud_verifier.backends.attention.packing import row_positions
from outrider.cloud_verifier.kv.blocks import BlockTable
from outrider.common.tree import Tree


@dataclass(slots=True)
class Feed:
    """Holds tokens of one sequence that a pass feeds, after `past` tokens of it."""

    table: BlockTable
    past: int
    token_ids: Sequence[int]
    num_logit_rows: int
    tree: Tree | None = None  # the last tokens, where they are one
    states: torch.Tensor | None = None  # of the first tokens, where they enter above the first layers

    @property
    def below(self) -> Feed:
        """Returns those of its tokens that run through the first layers too."""
        num_known = 0 if self.states is None else len(self.states)
        return Feed(self.table, self.past + num_known, self.token_ids[num_known:], 0, self.tree)

    @property
    def positions(self) -> Sequence[int]:
        """Returns the position of each token: of a node that on its path."""
        return row_positions(self.past, len(self.token_ids), self.tree)


def split_feeds(feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
    """Yields passes of at most `most` tokens, in packed order: earlier tokens of a sequence come first. A tree, of
    at most so many nodes, stays whole."""
    passed: list[Feed] = []
    room = most
    for feed in feeds:
        start, num_nodes = 0, len(feed.tree or ())
        while (num_left := len(feed.token_ids) - start) > 0:
            count = min(room, num_left)
            if num_left - count < num_nodes and count < num_left:
                count = min(room, num_left - num_nodes)
            part = feed.token_ids[start : start + count]
            num_left -= count
            if part:
                num_logit_rows = min(count, max(0, feed.num_logit_rows - num_left))
                tree = None if num_left else feed.tree
                states = None if feed.states is None else feed.states[start : start + count]
                passed.append(Feed(feed.table, feed.past + start, part, num_logit_rows, tree, states))
            start += count
            room -= count
            if room == 0 or not part:
                yield passed
                passed, room = [], most
    if passed:
        yield passed
