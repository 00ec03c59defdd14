"""Runs tokens through some layers of the target ahead of a forward, which goes on from where they are.

A target that drafts by its own layers feeds one drafted token after another through them, at the places that the next
forward feeds them at:

    slots    [ KV of the sequence | reserved ... ]
    tokens     x[0] … x[n - 2]      x[n - 1]  d[0]  d[1]  d[2]
                                    run through some layers    run by the forward alone

Keys and values of the first layers, as many as are among those layers without a gap, are the forward's own: it takes
their states and does not compute them again. Those of other layers are overwritten by it. Nothing of this shows in
the sequence's length, so that to give a draft up is to truncate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from outrider.cloud_verifier.backends.attention.plan import Entry, PackedRows
from outrider.cloud_verifier.backends.base import KVSequence


@dataclass(frozen=True, slots=True)
class AheadToken:
    """Names one token that is run ahead: at the place `offset` after its sequence's KV."""

    sequence: KVSequence
    offset: int
    token_id: int


@runtime_checkable
class SkipsLayers(Protocol):
    """Is a decoder that runs rows through some of its layers, and forwards whose rows enter above the first ones."""

    def run_some(
        self, rows: PackedRows, layers: Sequence[int], num_first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the states [rows, hidden_size] after the first `num_first` of `layers`, and the logits
        [rows, vocab_size] of those after all of them."""


def entry_of(
    num_fed: Sequence[int], states: Sequence[torch.Tensor | None], num_layers: int, below: PackedRows | None
) -> Entry:
    """Returns how the rows of a forward enter: of each item, `num_fed` rows, those first whose `states` are known."""
    known: list[int] = []
    others: list[int] = []
    start = 0
    for count, its in zip(num_fed, states, strict=True):
        num_known = 0 if its is None else len(its)
        known += range(start, start + num_known)
        others += range(start + num_known, start + count)
        start += count
    found = torch.cat([its for its in states if its is not None])
    places = (torch.tensor(each, dtype=torch.int64, device=found.device) for each in (known, others))
    return Entry(num_layers, next(places), found, next(places), below)
