"""`rel.outage`: five seconds without a link under `first_token`, in real processes over the link proxy.

Two figures a text: how long the next token takes from the outage's begin, in deadlines; and how long after the link's
return the text is the target's again, against an interval between attempts to connect, three round trips (a fresh
connection's handshake, HTTP/2's, and the round) and the verifier's own time for that round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.common.errors import OutriderError
from outrider.edge_client.config.run_config import RunConfig, StopConfig
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, SessionEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.transport.breaker import ATTEMPT_INTERVAL_S
from outrider.experiments.links.base import OpenLink, create_realisation
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged

OUTAGE_S = 5.0
FORWARD_MS = 30.0
FIRST_TOKENS = 12  # of a text, before its outage is set going
LEAD_S = 1.0  # to its begin, and eight round trips: the deadline has learnt the link


@dataclass(frozen=True, slots=True)
class OutageRun:
    """Holds one text: seconds since the outage's begin, or since the link's return."""

    rtt_ms: float
    deadline_s: float  # of a round when the outage began
    next_token_s: float
    first_kept_s: float  # the first token by the edge itself; one that was on its way may come before it
    num_kept: int
    exact_again_s: float
    verifier_s: float  # of the round that was exact again

    @property
    def next_share(self) -> float:
        """Returns the time to the next token in deadlines."""
        return self.next_token_s / self.deadline_s

    @property
    def bound_s(self) -> float:
        """Returns how long it may take until the text is exact again."""
        return ATTEMPT_INTERVAL_S + 3 * self.rtt_ms / 1e3 + self.verifier_s

    @property
    def exact_share(self) -> float:
        """Returns the time until it was, by that."""
        return self.exact_again_s / self.bound_s


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found after each round trip. Raises `OutriderError` where a text ended before its outage did."""
    rtts_ms, num_texts = settings.pick(((20.0, 60.0, 200.0, 600.0), 5), ((20.0, 200.0), 1), ((20.0,), 1))
    prompts = [prompt.text for prompt in load_prompts(None, num_texts)]
    runs: list[OutageRun] = []
    with running_verifier(*QUIET, "--min-forward-ms", f"{FORWARD_MS:g}") as verifier:
        config = RunConfig(
            verifier=verifier.address,
            mode=ExecutionMode.SPECULATIVE,
            max_new_tokens=2000,
            stop=StopConfig(ignore_eos=True),
        )
        edge = create_edge(config)
        try:
            for rtt_ms in rtts_ms:
                for number, prompt in enumerate(prompts):
                    found = _meet_outage(edge, rtt_ms, prompt, number)
                    following = f"{found.next_token_s * 1e3:.0f} of {found.deadline_s * 1e3:.0f} ms"
                    exact = f"{found.exact_again_s * 1e3:.0f} of {found.bound_s * 1e3:.0f} ms"
                    settings.say(f"RTT {rtt_ms:g} ms: next token {following}, exact again {exact}")
                    runs.append(found)
                yield judge(runs), {"texts": [asdict(each) for each in runs], "tables": [_table(runs)]}
        finally:
            edge.close()


def judge(runs: Sequence[OutageRun]) -> list[Measure]:
    """Returns the worst of all texts."""
    slowest = max(runs, key=lambda each: each.next_share)
    late = max(runs, key=lambda each: each.exact_share)
    following = (
        f"next token after the outage's begin : deadline, worst of {len(runs)} texts, at RTT {slowest.rtt_ms:g} ms "
        f"({slowest.next_token_s * 1e3:.0f} of {slowest.deadline_s * 1e3:.0f} ms)"
    )
    exact = (
        f"exact again after the link's return : attempt interval + 3 RTT + verifier, worst of {len(runs)} texts, at "
        f"RTT {late.rtt_ms:g} ms ({late.exact_again_s * 1e3:.0f} of {late.bound_s * 1e3:.0f} ms)"
    )
    return [
        judged("rel.outage_next", following, slowest.next_share, "ratio", at_most(1.0)),
        judged("rel.outage_exact", exact, late.exact_share, "ratio", at_most(1.0)),
    ]


def _table(runs: Sequence[OutageRun]) -> dict[str, Any]:
    rows = []
    for rtt_ms in dict.fromkeys(each.rtt_ms for each in runs):
        its = [each for each in runs if each.rtt_ms == rtt_ms]
        exact = sorted(each.exact_share for each in its)
        rows.append(
            [
                f"{rtt_ms:g} ms",
                f"{max(each.next_share for each in its):.2f}",
                f"{statistics.median(exact):.2f}, {exact[-1]:.2f}",
                f"{min(each.num_kept for each in its)} to {max(each.num_kept for each in its)}",
            ]
        )
    columns = [
        "RTT",
        "next token, in deadlines, worst",
        "exact again by the bound, median, worst",
        "tokens kept",
    ]
    return {"title": "Five seconds without a link, by round trip", "columns": columns, "rows": rows}


def _meet_outage(edge: Edge, rtt_ms: float, prompt: str, number: int) -> OutageRun:
    # At a moment of a round that nobody chose.
    start_s = LEAD_S + 8 * rtt_ms / 1e3 + random.Random(number).uniform(0, 0.5)
    profile = LinkProfile(rtt_ms=rtt_ms, outages=(Outage(start_s, OUTAGE_S),))
    with create_realisation("proxy").open(profile, edge.config.verifier) as link:
        config = replace(edge.config, verifier=link.address)
        session = edge.session(prompt, number, config)
        watch = _Watch(session, link, start_s)
        for event in session.generate():
            if watch.see(event):
                session.cancel()
    return watch.found(rtt_ms)


class _Watch:
    """Sets the outage going, and notes what happens when."""

    def __init__(self, session: EdgeSession, link: OpenLink, start_s: float) -> None:
        self._session, self._link, self._start_s = session, link, start_s
        self._begin_s = float("inf")
        self._deadline_s = 0.0
        self._next_s: float | None = None
        self._kept_s: list[float] = []
        self._exact_s: float | None = None
        self._verifier_s = 0.0

    def see(self, event: SessionEvent) -> bool:
        """Notes an event; returns whether all is seen."""
        now_s = time.monotonic()
        if self._begin_s == float("inf"):
            if isinstance(event, TokenEvent) and event.index >= FIRST_TOKENS:
                self._link.restart_outages()
                self._begin_s = (now_s + time.monotonic()) / 2 + self._start_s
            return False
        if now_s < self._begin_s:
            self._deadline_s = self._session.deadline_s or 0.0
            return False
        if isinstance(event, TokenEvent):
            self._next_s = self._next_s or now_s
            if not event.is_verified:
                self._kept_s.append(now_s)
        is_exact = isinstance(event, MarkClearedEvent | RolledBackEvent) or (
            isinstance(event, TokenEvent) and event.is_verified
        )
        if is_exact and now_s > self._begin_s + OUTAGE_S and self._exact_s is None:
            self._exact_s = now_s
            answered = [each for each in self._session.result.stats.rounds if each.is_answered]
            self._verifier_s = answered[-1].verifier_ms / 1e3
        return self._exact_s is not None

    def found(self, rtt_ms: float) -> OutageRun:
        """Returns the figures; raises `OutriderError` where something did not happen."""
        if self._next_s is None or self._exact_s is None or not self._kept_s:
            raise OutriderError("the text ended before the outage did, or nothing was kept meanwhile")
        return OutageRun(
            rtt_ms=rtt_ms,
            deadline_s=self._deadline_s,
            next_token_s=self._next_s - self._begin_s,
            first_kept_s=self._kept_s[0] - self._begin_s,
            num_kept=len(self._kept_s),
            exact_again_s=self._exact_s - self._begin_s - OUTAGE_S,
            verifier_s=self._verifier_s,
        )
