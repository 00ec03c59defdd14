"""`rel.overload`: ten times the sessions that give peak goodput, a minute long, each honouring its hints.

The verifier takes 30 ms a forward and 2 ms more for each token, so that a dozen sessions fill it and ten times
as many real clients fit on two cores beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.reliability.edges import Crowd, EdgeLog, run_crowd
from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.experiments.load.report import percentile_ms
from outrider.experiments.shared.results import at_least, at_most, judged
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic

PAIR = SyntheticPair(target_s=0.03, verify_token_s=0.002)
SIZES = (4, 8, 12, 16, 24)
OVERLOAD = 10
IN_TIME_S = 0.4
SETTLE_S = 3.0  # after the last session's first token
NEAR_PEAK = 0.97  # the fewest sessions with this share of the best goodput are those that give the peak


def run(settings: Settings) -> Iterator[Found]:
    """Measures goodput, latency and the longest pause at the peak and at ten times its sessions."""
    seconds = settings.pick(15.0, 8.0, 2.0)
    found: dict[int, dict[str, float]] = {}
    with running_synthetic(PAIR, *QUIET) as verifier:

        def measure(num_sessions: int, seconds: float) -> dict[str, float]:
            ramp_s = max(1.0, num_sessions / 10)
            logs = run_crowd(
                verifier.address, Crowd(num_sessions, seconds + SETTLE_S, ramp_s, prompt_tokens=16)
            )
            figures = summarise(logs, seconds)
            settings.say(f"{num_sessions} sessions: {figures}")
            return figures

        for num_sessions in settings.pick(SIZES, (8, 12), (4,)):
            found[num_sessions] = measure(num_sessions, seconds)
        best = max(each["goodput"] for each in found.values())
        peak = min(n for n, each in found.items() if each["goodput"] >= NEAR_PEAK * best)
        crowd = measure(OVERLOAD * peak, settings.pick(60.0, 20.0, 2.0))
    yield judge(peak, found[peak], crowd), {"peak_sessions": peak, "sweep": found, "overload": crowd}


def summarise(logs: Sequence[EdgeLog], seconds: float) -> dict[str, float]:
    """Returns the figures of the `seconds` from when the last session had its first token and settled; a
    session without any token in them is one that starved."""
    firsts = [log.token_s[0] for log in logs if log.token_s]
    begin_s = max(firsts, default=0.0) + SETTLE_S
    end_s = begin_s + seconds
    rounds = [each for log in logs for each in log.rounds if begin_s <= each[0] < end_s]
    pauses = [_longest_pause_s(log.token_s, begin_s, end_s) for log in logs]
    waits_s = sorted(wait_s for _, wait_s, _ in rounds)
    return {
        "goodput": round(sum(wait_s <= IN_TIME_S for wait_s in waits_s) / seconds, 2),
        "p50_ms": percentile_ms(waits_s, 0.5),
        "p99_ms": percentile_ms(waits_s, 0.99),
        "longest_pause_s": round(max(pauses, default=math.inf), 2),
        "starved": sum(pause_s >= seconds for pause_s in pauses) + len(logs) - len(firsts),
        "refusals": sum(log.num_refusals for log in logs),
        "failed": sum(bool(log.error) for log in logs),
        "unverified": sum(log.num_unverified for log in logs),
    }


def _longest_pause_s(token_s: Sequence[float], begin_s: float, end_s: float) -> float:
    inside = [begin_s, *(each for each in token_s if begin_s <= each < end_s), end_s]
    return max(later - former for former, later in pairwise(inside))


def judge(peak: int, once: dict[str, float], crowd: dict[str, float]) -> list[Any]:
    """Returns the three measures."""
    sessions = f"{OVERLOAD * peak} sessions : {peak}, which give the peak of {once['goodput']:g} rounds/s"
    slower = crowd["p99_ms"] / once["p99_ms"] if once["p99_ms"] else math.inf
    lost = int(crowd["starved"] + crowd["failed"])
    return [
        judged(
            "rel.overload_goodput",
            f"goodput, {sessions}; {crowd['refusals']:g} refusals",
            crowd["goodput"] / once["goodput"] if once["goodput"] else 0.0,
            "ratio",
            at_least(0.9),
        ),
        judged("rel.overload_p99", "p99 of rounds that were served, the same", slower, "ratio", at_most(2.0)),
        judged(
            "rel.overload_pause",
            f"longest time without a token for anybody; {lost} sessions starved or failed",
            crowd["longest_pause_s"],
            "s",
            ("<= 10, none starved", lambda pause_s: pause_s <= 10.0 and not lost),
        ),
    ]
