"""Drafts for several co-located generations at once, where their source can."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud_verifier.engine.colocated.reader import Reader
from outrider.cloud_verifier.heads.source import WantedDraft
from outrider.common.types import Draft


def propose_together(group: Sequence[tuple[Reader, int]], max_context: int) -> int:
    """Has the readers of one source draft in the same runs; returns how long all took, in ns."""
    start_ns, source = group[0][0].now_ns(), group[0][0].together
    assert source is not None, "a group has a source"
    asked: list[tuple[Reader, WantedDraft]] = []
    for reader, room in group:
        try:
            if wanted := reader.want(max_context, room):
                asked.append((reader, wanted))
        except Exception as error:
            reader.take(error)
    drafts: Sequence[Draft | Exception]
    try:
        drafts = source.propose_together(
            [reader.sequence for reader, _ in asked], [wanted for _, wanted in asked]
        )
    except Exception as error:
        drafts = [error] * len(asked)
    for (reader, _), draft in zip(asked, drafts, strict=True):
        reader.take(draft)
    return group[0][0].now_ns() - start_ns
