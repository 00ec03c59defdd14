"""Answers one POST, from its body to the last byte of its answer.

The client may leave at any moment, or stop reading: its session is then closed here and at the verifier, and
its turn goes to the next request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from outrider.edge_client.config.methods import judging_method
from outrider.edge_client.core.events import EndEvent, SessionEvent, TokenEvent
from outrider.edge_client.core.live_stats import LiveStats
from outrider.edge_client.daemon.activity import Entry
from outrider.edge_client.daemon.http.access import shown_key
from outrider.edge_client.daemon.http.wire import ClientGone, Wire
from outrider.edge_client.daemon.openai.errors import from_failure, stopping
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.requests import parse_request
from outrider.edge_client.daemon.openai.shapes import Shaper
from outrider.edge_client.session.generation import Generation

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon
    from outrider.edge_client.session.shared_edge import Prepared

log = logging.getLogger(__name__)

_PREFIX = {Kind.COMPLETION: "cmpl-", Kind.CHAT: "chatcmpl-"}
_SUBJECT = {Kind.COMPLETION: "prompt", Kind.CHAT: "messages"}
_MAX_SHOWN = 8  # names of unknown fields in a header
_GONE = 499  # in logs and metrics: the client left before its answer (nginx's number)


class GenerationEndpoint:
    """Serves one kind of request as an ASGI endpoint."""

    def __init__(self, daemon: Daemon, kind: Kind) -> None:
        self._daemon = daemon
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _PREFIX[self._kind] + secrets.token_hex(12)
        start_s = time.perf_counter()
        facts: dict[str, object] = {"request": request_id, "route": scope["path"], "status": 200}
        entry: Entry | None = None
        wire = Wire(scope, receive, send, request_id, self._daemon.serve)
        try:
            body = await wire.read_json(int(self._daemon.serve.max_body_mb * 2**20))
            is_strict = self._daemon.serve.strict_requests
            parsed = parse_request(self._kind, body, self._daemon.edge.tokenizer.num_tokens, is_strict)
            if parsed.ignored:
                facts["ignored"] = _shown(parsed.ignored)
            self._daemon.check_model(parsed.model)
            entry = Entry(request_id, parsed, wire.client)
            await _unless_gone(self._answer(entry, wire, shown_key(Headers(scope=scope))), wire)
        except ClientGone:
            facts |= {"status": _GONE, "reason": "the client left"}
        except Exception as error:
            failure = from_failure(error, _SUBJECT[self._kind])
            facts |= failure.facts()
            if failure.code == "internal_error":
                log.exception("a request failed", extra={"request": request_id})
            with suppress(ClientGone):
                await wire.fail(failure)
        facts["num_tokens"] = entry.num_sent_tokens if entry else 0
        if entry and entry.session and (note := entry.session.result.unverified_note):
            facts["warning"] = note
        facts["ms"] = round((time.perf_counter() - start_s) * 1e3, 1)
        log.info("answered", extra=facts)
        self._daemon.metrics.requests.labels(scope["path"], str(facts["status"])).inc()

    async def _answer(self, entry: Entry, wire: Wire, key: str) -> None:
        daemon, parsed = self._daemon, entry.parsed
        daemon.activity.add(entry)
        try:
            async with daemon.admission.turn():
                prepared = await asyncio.to_thread(daemon.prepare, parsed, key)
                method = judging_method(prepared.config)
                entry.begin(
                    prepared.session, prepared.config.mode, method and str(method), prepared.num_prompt_tokens
                )
                generation = Generation(prepared.session, prepared.config.outage.reverify)
                try:
                    await self._write(entry, prepared, generation, wire)
                finally:
                    generation.cancel()
                    await _to_the_end(generation)
                    self._observe(entry, prepared)
        finally:
            daemon.activity.remove(entry)
        await wire.flush()

    def _observe(self, entry: Entry, prepared: Prepared) -> None:
        result, mode = prepared.session.result, prepared.config.mode
        self._daemon.note_slow_draft(mode, result.stats)
        self._daemon.metrics.observe(
            result,
            mode,
            entry.method,
            prepared.num_prompt_tokens,
            prepared.num_reused_tokens,
        )

    async def _write(self, entry: Entry, prepared: Prepared, generation: Generation, wire: Wire) -> None:
        parsed = entry.parsed
        shaper = Shaper(parsed, self._daemon.edge.tokenizer, entry.request_id, self._daemon.serve.model_name)
        batch = await generation.next_batch()  # what fails before it has a status of its own
        model = prepared.session.result.model
        shaper.fingerprint = f"fp_{model.target_fingerprint[:12]}" if model else None
        if parsed.is_stream:
            await self._write_stream(entry, prepared, generation, wire, shaper, batch)
            return
        events = list(batch)
        while batch := await generation.next_batch():
            events += batch
        _check_end(events)
        result = prepared.session.result
        notes = filter(None, (result.unverified_note, _ignored_note(parsed)))
        await wire.send_json(shaper.whole(events, prepared.usage), "; ".join(notes))
        entry.num_sent_tokens = len(result.token_ids)

    async def _write_stream(
        self,
        entry: Entry,
        prepared: Prepared,
        generation: Generation,
        wire: Wire,
        shaper: Shaper,
        batch: list[SessionEvent],
    ) -> None:
        _check_end(batch)
        await wire.start_stream(shaper.first_chunk(), _ignored_note(entry.parsed))
        session = prepared.session
        live = LiveStats(session.result.stats)  # its own: it tells what is new since its last chunk
        while batch:
            _check_end(batch)
            told = live.snapshot() if entry.parsed.has_tokens else None
            warning = session.result.unverified_note if isinstance(batch[-1], EndEvent) else ""
            await wire.send_chunks(shaper.chunks(batch, told, warning))
            entry.num_sent_tokens += sum(isinstance(event, TokenEvent) for event in batch)
            batch = await generation.next_batch()
        if entry.parsed.has_usage:
            await generation.ended()  # the last bytes are counted when the session is closed
            await wire.send_chunks([shaper.usage_chunk(prepared.usage)])
        await wire.end_stream()


def _shown(names: list[str]) -> str:
    """Returns the first of some names of a request, as a header may have them."""
    shown = ", ".join(names[:_MAX_SHOWN])
    safe = "".join(each if each.isascii() and each.isprintable() else "?" for each in shown)
    return safe + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")


def _ignored_note(parsed: ParsedRequest) -> str:
    return f"ignored unknown fields: {_shown(parsed.ignored)}" if parsed.ignored else ""


def _check_end(events: list[SessionEvent]) -> None:
    """Raises `ApiError` 503 for a session that the daemon cancelled, so that its client does not take the
    text for complete."""
    for event in events:
        if isinstance(event, EndEvent) and event.finish_reason == "cancelled":
            raise stopping()


async def _to_the_end(generation: Generation) -> None:
    """Waits until the generation's thread has ended, even where this task is cancelled: the turn may not be
    given away before."""
    ending = asyncio.ensure_future(generation.ended())
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _unless_gone(work: Any, wire: Wire) -> None:
    """Awaits `work`, which is cancelled when the client leaves before its answer is complete. Raises
    `ClientGone` then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wire.until_gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not wire.is_complete:
            working.cancel()
            await asyncio.wait((working,))
            raise ClientGone
        await working
    finally:
        leaving.cancel()
        working.cancel()
