"""The statistics of a generation in progress, for the live view and the daemon's stream, list of sessions
and metrics."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

from outrider.edge_client.core.stats import JudgedTree, SessionStats


class LiveStats:
    """Keeps running sums over `stats.rounds`, so that reading them often is cheap. Used by the event loop's
    thread, while the session's thread appends rounds."""

    def __init__(self, stats: SessionStats, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._stats = stats
        self._clock_ns = clock_ns
        self._num_seen = 0
        self.num_rounds = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.draft_length: int | None = None  # of the last round
        self.rtt_ms: float | None = None  # of the last round that crossed the network

    def update(self) -> list[tuple[int, int, bool]]:
        """Returns the numbers of drafted and accepted tokens of each round answered since the last call, and whether
        its draft was a tree."""
        rounds, news = self._stats.rounds, []
        while self._num_seen < len(rounds):
            each = rounds[self._num_seen]
            self._num_seen += 1
            if not each.is_answered:
                continue
            self.num_rounds += 1
            num_accepted, num_drafted = each.as_chain
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self.draft_length = each.num_draft_tokens
            news.append((each.num_draft_tokens, each.num_accepted_tokens, each.main_path is not None))
            if each.rtt_ms:
                self.rtt_ms = each.net_ms
        return news

    @property
    def last_tree(self) -> JudgedTree | None:
        """Returns the last round's tree; None where it was a chain."""
        return self._stats.last_tree

    @property
    def acceptance_rate(self) -> float | None:
        """Returns accepted / drafted tokens."""
        return round(self.num_accepted / self.num_drafted, 4) if self.num_drafted else None

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the rate since the first token."""
        times = self._stats.token_times_ns
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return round((len(times) - 1) / ((times[-1] - times[0]) / 1e9), 2)

    @property
    def calls_per_token(self) -> float | None:
        """Returns the target's forwards for this session, but for its opening, per token."""
        num_calls, num_tokens = self.num_rounds + len(self._stats.generate_forward_ms), self.num_tokens
        return round(num_calls / num_tokens, 4) if num_tokens else None

    @property
    def num_tokens(self) -> int:
        return len(self._stats.token_times_ns)

    def recent_tokens_per_s(self, seconds: float) -> float | None:
        """Returns the rate of the last `seconds`, or since the first token."""
        times, now_ns = self._stats.token_times_ns, self._clock_ns()
        if not times or now_ns <= times[0]:
            return None
        since_ns = max(times[0], now_ns - int(seconds * 1e9))
        return (len(times) - bisect_right(times, since_ns)) / ((now_ns - since_ns) / 1e9)

    def snapshot(self) -> dict[str, object]:
        """Returns the figures as JSON, None where not measured (yet); `rounds` are those since the last call."""
        rounds = self.update()
        return {
            "rounds": rounds,
            "num_rounds": self.num_rounds,
            "acceptance_rate": self.acceptance_rate,
            "draft_length": self.draft_length,
            "rtt_ms": None if self.rtt_ms is None else round(self.rtt_ms, 2),
            "tokens_per_s": self.tokens_per_s,
        }
