"""Answers one POST, from its body to the last byte of its answer; its choices are generated at once, each in a turn.

The client may leave at any moment, or stop reading: its session is then closed here and at the verifier, and
its turn goes to the next request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from outrider.common.types import TokenLogprobs
from outrider.edge_client.config.methods import judging_method
from outrider.edge_client.daemon.activity import Entry
from outrider.edge_client.daemon.admission import Room
from outrider.edge_client.daemon.http.access import shown_key
from outrider.edge_client.daemon.http.answer import Answer, check_end, shown
from outrider.edge_client.daemon.http.front import GONE, STATUS
from outrider.edge_client.daemon.http.prompt_scores import PromptScores, until_done
from outrider.edge_client.daemon.http.wire import ClientGone, Wire
from outrider.edge_client.daemon.openai.choices import Choice, Plan
from outrider.edge_client.daemon.openai.errors import ApiError, from_failure
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest
from outrider.edge_client.daemon.openai.requests import parse_request
from outrider.edge_client.session.generation import Generation

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon
    from outrider.edge_client.session.shared_edge import Prepared

log = logging.getLogger(__name__)

_PREFIX = {Kind.COMPLETION: "cmpl-", Kind.CHAT: "chatcmpl-"}
_SUBJECT = {Kind.COMPLETION: "prompt", Kind.CHAT: "messages"}


class GenerationEndpoint:
    """Serves one kind of request as an ASGI endpoint."""

    def __init__(self, daemon: Daemon, kind: Kind) -> None:
        self._daemon = daemon
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _PREFIX[self._kind] + secrets.token_hex(12)
        start_s = time.perf_counter()
        facts: dict[str, object] = {"request": request_id, "route": scope["path"], "status": 200}
        entries: list[Entry] = []
        wire = Wire(scope, receive, send, request_id, self._daemon.serve)
        try:
            body = await wire.read_json(int(self._daemon.serve.max_body_mb * 2**20))
            is_strict = self._daemon.serve.strict_requests
            parsed = parse_request(self._kind, body, self._daemon.edge.tokenizer.num_tokens, is_strict)
            if parsed.ignored:
                facts["ignored"] = shown(parsed.ignored)
            await self._daemon.check_model(parsed.model)
            entries += [Entry(request_id, parsed, wire.client, index) for index in range(parsed.num_texts)]
            await _unless_gone(self._answer(parsed, entries, wire, shown_key(Headers(scope=scope))), wire)
        except ClientGone:
            facts |= {"status": GONE, "reason": "the client left"}
        except Exception as error:
            failure = _failure(error, _SUBJECT[self._kind], entries[0].parsed if entries else None)
            facts |= failure.facts()
            if failure.code == "internal_error":
                log.exception("a request failed", extra={"request": request_id})
            with suppress(ClientGone):
                await wire.fail(failure)
        facts["num_tokens"] = sum(entry.num_sent_tokens for entry in entries)
        if notes := [
            note for each in entries if each.session and (note := each.session.result.unverified_note)
        ]:
            facts["warning"] = "; ".join(notes)
        facts["ms"] = round((time.perf_counter() - start_s) * 1e3, 1)
        log.info("answered", extra=facts)
        scope[STATUS] = facts["status"]

    async def _answer(self, parsed: ParsedRequest, entries: list[Entry], wire: Wire, key: str) -> None:
        daemon = self._daemon
        with daemon.admission.room(len(entries)) as room:
            for entry in entries:
                daemon.activity.add(entry)
            try:
                plan = await asyncio.to_thread(daemon.plan, parsed)
                answer = Answer(daemon, parsed, plan, entries[0].request_id, wire)
                await self._generate_all(plan, entries, answer, room, key)
            finally:
                for entry in entries:
                    daemon.activity.remove(entry)
        await wire.flush()

    async def _generate_all(
        self, plan: Plan, entries: list[Entry], answer: Answer, room: Room, key: str
    ) -> None:
        """Generates all choices at once. Raises the error of the first that fails."""
        begun, scores = [asyncio.Event() for _ in entries], PromptScores(self._daemon, plan)
        try:
            async with asyncio.TaskGroup() as group:
                for choice, entry in zip(plan.choices, entries, strict=True):
                    text = self._generate(plan, choice, entry, answer, begun, scores, room, key)
                    group.create_task(text)
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__

    async def _generate(
        self,
        plan: Plan,
        choice: Choice,
        entry: Entry,
        answer: Answer,
        begun: list[asyncio.Event],
        scores: PromptScores,
        room: Room,
        key: str,
    ) -> None:
        """Generates one choice in a turn of its own."""
        daemon = self._daemon
        if choice.leader is not None:
            await begun[choice.leader].wait()
        async with daemon.admission.turn(room):
            prepared = await asyncio.to_thread(daemon.prepare, entry.parsed, plan, choice, key)
            method = judging_method(prepared.config)
            entry.begin(
                prepared.session, prepared.config.mode, method and str(method), prepared.num_prompt_tokens
            )
            generation = Generation(prepared.session, prepared.config.outage.reverify)
            try:
                first = await generation.next_batch()  # what fails before it has a status of its own
                check_end(first)
                begun[choice.index].set()
                prompt_logprobs: Sequence[TokenLogprobs | None] = ()
                if entry.parsed.scores_prompt:
                    prompt_logprobs = await scores.of(choice)
                await answer.write(choice, entry, prepared, generation, first, prompt_logprobs)
            finally:
                generation.cancel()
                # the turn may not be given away before
                await until_done(asyncio.ensure_future(generation.ended()))
                self._observe(entry, prepared)
                daemon.activity.remove(entry)

    def _observe(self, entry: Entry, prepared: Prepared) -> None:
        result, mode = prepared.session.result, prepared.config.mode
        self._daemon.note_slow_draft(mode, result.stats)
        self._daemon.metrics.observe(
            result,
            mode,
            entry.method,
            arrived_s=entry.start_s,
            num_reused_tokens=prepared.num_reused_tokens,
            num_read_tokens=prepared.num_read_tokens,
        )


def _failure(error: Exception, subject: str, parsed: ParsedRequest | None) -> ApiError:
    if parsed is None:
        return from_failure(error, subject)
    return from_failure(error, subject, parsed.constraint_param, parsed.params)


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
