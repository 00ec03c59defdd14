"""`bench_controller --only outage`: 5 s without a link under `first_token`; real processes, the link proxy.

Two figures a run: how long the next token takes from the outage's begin, in deadlines; and how long after the
link's return the text is the target's again, against the probe interval + 3 round trips + the verifier's own
time for the round that did it (what is missing there is in it). Three round trips are a fresh connection's
handshake, HTTP/2's, and the round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.common.errors import OutriderError
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, SessionEvent, TokenEvent
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.transport.breaker import ATTEMPT_INTERVAL_S
from outrider.experiments.links.base import OpenLink, create_realisation
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged

RTTS_MS = (20.0, 60.0, 200.0, 600.0)
OUTAGE_S = 5.0
FORWARD_MS = 30.0
NUM_RUNS = 5
_FIRST_TOKENS = 12  # before the outage is set going
_LEAD_S = 1.0  # and as long as this and eight round trips, to its begin: the deadline has learnt the link


@dataclass(frozen=True, slots=True)
class OutageRun:
    """Holds seconds since the outage's begin or the link's return. `deadline_s` is a round's when it
    began."""

    rtt_ms: float
    deadline_s: float
    next_token_s: float
    first_kept_s: float  # by the edge itself; a token that was on its way may come before it
    num_kept: int
    exact_again_s: float
    verifier_s: float  # of the round that was exact again

    @property
    def next_share(self) -> float:
        """Returns the wait for the next token : the deadline."""
        return self.next_token_s / self.deadline_s

    @property
    def bound_s(self) -> float:
        """Returns the attempt interval + 3 round trips + the verifier's time."""
        return ATTEMPT_INTERVAL_S + 3 * self.rtt_ms / 1e3 + self.verifier_s

    @property
    def exact_share(self) -> float:
        """Returns the time until the text is exact again : its bound."""
        return self.exact_again_s / self.bound_s


def outage_measures(num_runs: int = NUM_RUNS) -> tuple[list[Measure], dict[str, Any]]:
    """Runs texts through outages at every RTT. Raises `OutriderError` where a text ended before its outage
    did."""
    measures, details = [], {}
    prompts = [prompt.text for prompt in load_prompts(None, num_runs)]
    with running_verifier("--log-level", "warning", "--min-forward-ms", f"{FORWARD_MS:g}") as verifier:
        edge = create_edge(run_config(verifier=verifier.address, max_new_tokens=2000, ignore_eos=True))
        for rtt_ms in RTTS_MS:
            runs = [
                _run(edge, verifier.address, rtt_ms, prompts[number % len(prompts)], number)
                for number in range(num_runs)
            ]
            measures += _measures_of(rtt_ms, runs)
            details[f"RTT {rtt_ms:g} ms"] = [asdict(run) for run in runs]
        edge.close()
    return measures, details


def _measures_of(rtt_ms: float, runs: Sequence[OutageRun]) -> list[Measure]:
    at, most = f"RTT {rtt_ms:g} ms, worst of {len(runs)}", at_most(1.0)
    worst = max(runs, key=lambda run: run.exact_share)
    middle = statistics.median(run.exact_share for run in runs)
    exact = (
        f"exact again after the return : probe interval + 3 RTT + verifier, {at} "
        f"({worst.exact_again_s * 1e3:.0f} of {worst.bound_s * 1e3:.0f} ms; median {middle:.2f})"
    )
    kept = max(run.first_kept_s for run in runs)
    slowest = max(runs, key=lambda run: run.next_share)
    following = (
        f"next token after the outage's begin : deadline, {at} (deadline {slowest.deadline_s * 1e3:.0f} ms; "
        f"first kept token after {kept * 1e3:.0f} at most)"
    )
    return [
        # A round sent as the outage begins ends at its deadline, and the token comes just after it: above 1.
        judged(f"ctl.outage_next_{rtt_ms:g}", following, slowest.next_share, "ratio", most),
        judged(f"ctl.outage_exact_{rtt_ms:g}", exact, worst.exact_share, "ratio", most),
    ]


def _run(edge: Edge, address: str, rtt_ms: float, prompt: str, number: int) -> OutageRun:
    # At a moment of a round that nobody chose.
    start_s = _LEAD_S + 8 * rtt_ms / 1e3 + random.Random(number).uniform(0, 0.5)
    profile = LinkProfile(rtt_ms=rtt_ms, outages=(Outage(start_s, OUTAGE_S),))
    with create_realisation("proxy").open(profile, address) as link:
        session = edge.session(prompt, number, replace(edge.config, verifier=link.address))
        watch = _Watch(session, link, start_s)
        for event in session.generate():
            if watch.see(event):
                session.cancel()
    found = watch.found(rtt_ms)
    following = f"next token {found.next_token_s * 1e3:.0f} ms (deadline {found.deadline_s * 1e3:.0f})"
    exact = f"exact again {found.exact_again_s * 1e3:.0f} of {found.bound_s * 1e3:.0f} ms"
    print(f"RTT {rtt_ms:g} ms: {following}, {found.num_kept} kept, {exact}", flush=True)
    return found


class _Watch:
    """Starts the outage, and records when what happens."""

    def __init__(self, session: EdgeSession, link: OpenLink, start_s: float) -> None:
        self._session, self._link, self._start_s = session, link, start_s
        self._begin_s = float("inf")
        self._deadline_s = 0.0
        self._next_s: float | None = None
        self._kept_s: list[float] = []
        self._exact_s: float | None = None
        self._verifier_s = 0.0

    def see(self, event: SessionEvent) -> bool:
        """Returns whether everything was seen."""
        now_s = time.monotonic()
        if self._begin_s == float("inf"):
            if isinstance(event, TokenEvent) and event.index >= _FIRST_TOKENS:
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
