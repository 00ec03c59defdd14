"""Writes the choices of one request, which are generated at once, as one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.common.types import TokenLogprobs
from outrider.edge_client.core.events import EndEvent, SessionEvent, TokenEvent
from outrider.edge_client.core.live_stats import LiveStats
from outrider.edge_client.core.unverified import without_dropped
from outrider.edge_client.daemon.activity import Entry
from outrider.edge_client.daemon.http.wire import Wire
from outrider.edge_client.daemon.openai.choices import Choice, Plan
from outrider.edge_client.daemon.openai.errors import stopping
from outrider.edge_client.daemon.openai.parsed import ParsedRequest
from outrider.edge_client.daemon.openai.shapes import AnswerHead, Shaper
from outrider.edge_client.daemon.openai.usage import usage_of
from outrider.edge_client.session.generation import Generation

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon
    from outrider.edge_client.session.session import EdgeSession
    from outrider.edge_client.session.shared_edge import Prepared

_MAX_SHOWN = 8  # names of unknown fields in a header


class Answer:
    """Collects complete choices, or passes on a stream's chunks as they come; the last choice ends the answer."""

    def __init__(
        self, daemon: Daemon, parsed: ParsedRequest, plan: Plan, request_id: str, wire: Wire
    ) -> None:
        self._parsed, self._plan, self._wire = parsed, plan, wire
        self._head = AnswerHead(parsed, request_id, daemon.serve.model_name)
        self._tokenizer, self._family = daemon.edge.tokenizer, daemon.tool_family
        self._ended: dict[int, Prepared] = {}
        self._whole: dict[int, dict[str, object]] = {}
        self._is_begun, self._has_head = False, asyncio.Event()

    async def write(
        self,
        choice: Choice,
        entry: Entry,
        prepared: Prepared,
        generation: Generation,
        first: list[SessionEvent],
        prompt_logprobs: Sequence[TokenLogprobs | None],
    ) -> None:
        """Writes one choice, whose events begin with `first`. Raises what its session raises."""
        model = prepared.session.result.model
        self._head.fingerprint = f"fp_{model.target_fingerprint[:12]}" if model else None
        shaper = Shaper(self._parsed, self._tokenizer, self._head, choice, self._family, prompt_logprobs)
        if self._parsed.is_stream:
            await self._stream(shaper, entry, prepared, generation, first)
        else:
            self._whole[choice.index] = shaper.whole(await _all_events(generation, first))
            entry.num_sent_tokens = len(prepared.session.result.token_ids)
        self._ended[choice.index] = prepared
        if len(self._ended) == len(self._plan.choices):
            await self._end()

    async def _stream(
        self,
        shaper: Shaper,
        entry: Entry,
        prepared: Prepared,
        generation: Generation,
        batch: list[SessionEvent],
    ) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._wire.start_stream(None, ignored_note(self._parsed))
            self._has_head.set()
        await self._has_head.wait()  # another choice may be sending it
        if chunk := shaper.first_chunk():
            await self._wire.send_chunks([chunk])
        session = prepared.session
        live = LiveStats(session.result.stats)  # its own: it tells what is new since its last chunk
        num_dropped = 0
        while batch:
            check_end(batch)
            batch, number = without_dropped(batch, entry.num_sent_tokens)
            num_dropped += number
            told = live.snapshot() if self._parsed.has_tokens else None
            warning = _warning(session, num_dropped) if isinstance(batch[-1], EndEvent) else ""
            await self._wire.send_chunks(shaper.chunks(batch, told, warning))
            entry.num_sent_tokens += sum(isinstance(event, TokenEvent) for event in batch) - number
            batch = await generation.next_batch()
        if self._parsed.has_usage:
            await generation.ended()  # the last bytes are counted when the session is closed

    async def _end(self) -> None:
        ended = [self._ended[choice.index] for choice in self._plan.choices]
        if not self._parsed.is_stream:
            notes = [note for each in ended if (note := each.session.result.unverified_note)]
            if ignored := ignored_note(self._parsed):
                notes.append(ignored)
            choices = [self._whole[choice.index] for choice in self._plan.choices]
            whole = self._head.whole(choices, self._usage(ended))
            await self._wire.send_json(whole, "; ".join(notes[:_MAX_SHOWN]))
            return
        if self._parsed.has_usage:
            await self._wire.send_chunks([self._head.usage_chunk(self._usage(ended))])
        await self._wire.end_stream()

    def _usage(self, ended: Sequence[Prepared]) -> dict[str, object]:
        return usage_of(self._plan.choices, ended, self._parsed.is_prompt_only)


async def _all_events(generation: Generation, first: list[SessionEvent]) -> Sequence[SessionEvent]:
    events = list(first)
    while batch := await generation.next_batch():
        events += batch
    check_end(events)
    kept, _ = without_dropped(events, 0)
    return kept


def _warning(session: EdgeSession, num_dropped: int) -> str:
    """Returns what the end of a stream warns of; empty where there is nothing."""
    notes = [note] if (note := session.result.unverified_note) else []
    if num_dropped:
        notes.append(f"{num_dropped} tokens were sent that the target has not in its text")
    return "; ".join(notes)


def check_end(events: Sequence[SessionEvent]) -> None:
    """Raises `ApiError` 503 for a session that the daemon cancelled, so that its client does not take the
    text for complete."""
    for event in events:
        if isinstance(event, EndEvent) and event.finish_reason == "cancelled":
            raise stopping()


def shown(names: list[str]) -> str:
    """Returns the first of some names of a request, as a header may have them."""
    text = ", ".join(names[:_MAX_SHOWN])
    safe = "".join(each if each.isascii() and each.isprintable() else "?" for each in text)
    return safe + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")


def ignored_note(parsed: ParsedRequest) -> str:
    """Returns which fields of a request were ignored, for a header; empty where none was."""
    return f"ignored unknown fields: {shown(parsed.ignored)}" if parsed.ignored else ""
