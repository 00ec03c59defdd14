"""Has a request's prompts scored: each once, for all of its choices, and no longer than the request is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.common.types import TokenIds, TokenLogprobs
from outrider.edge_client.daemon.openai.choices import Choice, Plan

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon

Scores = Sequence[TokenLogprobs | None]


class PromptScores:
    """Holds the scores of one request's prompts. Used on one event loop."""

    def __init__(self, daemon: Daemon, plan: Plan) -> None:
        self._daemon, self._plan = daemon, plan
        self._found: dict[TokenIds, asyncio.Future[Scores]] = {}

    async def of(self, choice: Choice) -> Scores:
        """Returns the scores of a choice's prompt; the first that asks has them made, in its turn. Where that one is
        cancelled, returns its turn only after the thread has ended. Raises what `Daemon.score` does."""
        ids = choice.prompt_ids
        if (known := self._found.get(ids)) is not None:
            return await asyncio.shield(known)
        scoring = self._daemon.scoring(self._plan)
        made: asyncio.Future[Scores] = asyncio.ensure_future(
            asyncio.to_thread(self._daemon.score, scoring, ids)
        )
        self._found[ids] = made
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            scoring.cancel()
            await until_done(made)
            raise


async def until_done(work: asyncio.Future[Any]) -> None:
    """Waits until `work` is done, whatever comes of it, even where this task is cancelled; raises that then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        work.exception()  # was seen
    if cancelled is not None:
        raise cancelled
