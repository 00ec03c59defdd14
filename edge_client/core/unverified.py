"""Events for readers who cannot take tokens back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.common.errors import OutriderError
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)


def buffer_unverified(events: Iterator[SessionEvent]) -> Iterator[SessionEvent]:
    """Yields the same events without tokens that may yet be rolled back. Tokens that are never judged come at
    the end, marked, before an error too."""
    held: deque[TokenEvent] = deque()
    try:
        for event in events:
            match event:
                case TokenEvent():
                    held.append(event)
                case MarkClearedEvent():
                    number = event.index - held[0].index
                    held[number] = replace(held[number], is_verified=True, logprobs=event.logprobs)
                case RolledBackEvent():
                    while held and held[-1].index >= event.num_tokens:
                        held.pop()
                case EndEvent():
                    yield from held
                    yield event
                    return
            while held and held[0].is_verified:
                yield held.popleft()
    except OutriderError:
        yield from held
        raise


def without_dropped(events: Sequence[SessionEvent], num_sent: int) -> tuple[list[SessionEvent], int]:
    """Returns `events` without tokens that later ones of them roll back, and how many of the `num_sent` that came in
    earlier events they do."""
    kept: list[SessionEvent] = []
    num_dropped = 0
    for event in events:
        if isinstance(event, RolledBackEvent):
            kept = [each for each in kept if not _is_from(each, event.num_tokens)]
            num_dropped += max(0, num_sent - event.num_tokens)
            num_sent = min(num_sent, event.num_tokens)
        kept.append(event)
    return kept, num_dropped


def _is_from(event: SessionEvent, num_tokens: int) -> bool:
    return isinstance(event, TokenEvent) and event.index >= num_tokens
