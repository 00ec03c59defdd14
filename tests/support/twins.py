"""Two sequences that share their blocks, a partly filled one too."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.paged_backend import PagedBackend, PagedSequence


def twin_of(backend: PagedBackend, sequence: PagedSequence, token_ids: Sequence[int]) -> PagedSequence:
    """Returns a second sequence of the KV of `token_ids`, all that `sequence` holds: its last block is filled, found in
    the prefix cache, and cut again by both."""
    fill = [1] * (-len(token_ids) % backend.blocks.block_size)
    if fill:
        backend.forward([ForwardItem(sequence, fill, 0)])
    text = [*token_ids, *fill]
    backend.publish(sequence, text)
    twin = backend.new_sequence(sequence.table.tenant, [*text, 0])
    for each in (sequence, twin):
        backend.truncate(each, len(token_ids))
    assert twin.table.block_ids == sequence.table.block_ids
    return twin
