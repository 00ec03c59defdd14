"""Lists the requests under way for `/v1/sessions` and `edge-client ps`, without any of their text."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.common.clock import SYSTEM_CLOCK
from outrider.edge_client.core.live_stats import LiveStats
from outrider.edge_client.daemon.openai.parsed import ParsedRequest
from outrider.edge_client.session.scoring import TextScoring
from outrider.edge_client.session.session import EdgeSession


@dataclass(slots=True)
class Entry:
    """Describes one text of a request from its arrival to its end; `session` is None while it waits for its turn."""

    request_id: str
    parsed: ParsedRequest
    client: str
    index: int = 0  # of the request's texts
    start_s: float = field(default_factory=SYSTEM_CLOCK.now)  # the clock of its tokens' times
    session: EdgeSession | None = None  # None: it waits for its turn
    live: LiveStats | None = None
    mode: str = ""
    method: str | None = None
    num_prompt_tokens: int | None = None
    num_reused_tokens: int = 0
    num_sent_tokens: int = 0  # to the client, so far

    @property
    def name(self) -> str:
        """Returns the id of the text: the request's, with the index of all but the first."""
        return f"{self.request_id}/{self.index}" if self.index else self.request_id

    def begin(self, session: EdgeSession, mode: str, method: str | None, num_prompt_tokens: int) -> None:
        """Records the session that the request got with its turn."""
        self.session, self.live = session, LiveStats(session.result.stats)
        self.mode, self.method, self.num_prompt_tokens = mode, method, num_prompt_tokens

    def describe(self) -> dict[str, object]:
        """Returns the request as JSON: its state, and once it runs its modes, counts and rates."""
        about: dict[str, object] = {
            "id": self.name,
            "object": "session",
            "state": "waiting" if self.session is None else "running",
            "kind": str(self.parsed.kind),
            "stream": self.parsed.is_stream,
            "user": self.parsed.user,
            "client": self.client,
            "age_s": round(SYSTEM_CLOCK.now() - self.start_s, 3),
        }
        if self.session is not None and self.live is not None:
            result, live = self.session.result, self.live.snapshot()
            del live["rounds"]
            about |= {
                "mode": self.mode,
                "method": self.method,
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": len(result.token_ids),
                "num_unverified_tokens": result.num_unverified_tokens,
                **live,
            }
        return about


class Activity:
    """Holds the requests under way in order of arrival."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.scorings: set[TextScoring] = set()  # of prompts

    def add(self, entry: Entry) -> None:
        """Adds a request that has been read."""
        self.entries[entry.name] = entry

    def remove(self, entry: Entry) -> None:
        """Removes a request; one that is not there is ignored."""
        self.entries.pop(entry.name, None)

    def describe(self) -> list[dict[str, object]]:
        """Returns all requests as JSON."""
        return [entry.describe() for entry in self.entries.values()]

    def cancel_all(self) -> int:
        """Cancels every running session, and the scoring of every prompt; returns how many sessions there were."""
        running = [entry.session for entry in self.entries.values() if entry.session is not None]
        for session in running:
            session.cancel()
        for scoring in list(self.scorings):  # threads take theirs out
            scoring.cancel()
        return len(running)
