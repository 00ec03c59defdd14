"""What is measured of the draft while the target streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.common.types import Draft, GeneratedTokens, Origin
from outrider.edge_client.decode.stream_watch import StreamWatch

DRAFT_MS = 4.0


class Choice:
    """A mode policy that asks for the draft's word after every n-th token, and notes the answers."""

    def __init__(self, every: int) -> None:
        self.every, self.probes = every, list[tuple[bool, float | None]]()

    def should_probe_draft(self, num_streamed: int) -> bool:
        return num_streamed % self.every == 0

    def observe_probe(self, is_accepted: bool, draft_s: float | None) -> None:
        self.probes.append((is_accepted, draft_s))

    def observe_stream(self, token_s: float, *metrics: float) -> None:
        pass


@pytest.mark.parametrize(("every", "draft_s"), [(1, DRAFT_MS / 1e3), (4, None)])
def test_a_draft_that_reads_many_tokens_is_not_timed_as_one_of_a_round(
    every: int, draft_s: float | None
) -> None:
    choice: Any = Choice(every)
    state: Any = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: 0.0),
        proposer=SimpleNamespace(propose=lambda _: (Draft((7,), ()), DRAFT_MS)),
        remote=SimpleNamespace(take_rtt=lambda: None),
        window=SimpleNamespace(choose=lambda _: None),
        tokens=SimpleNamespace(num_remaining=100),
        is_to_stream=True,
    )
    watch = StreamWatch(state, choice)
    for position in range(12):
        watch.should_leave(GeneratedTokens(1, (7,), (Origin.TARGET,), position, 0))
    assert choice.probes and set(choice.probes) == {(True, draft_s)}
