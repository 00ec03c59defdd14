"""`str.hostile`: rounds of one tenant beside another's worst grammars, against those beside an honest busy tenant."""

from __future__ import annotations

import time

from benchmarks.engine.setup import pinned
from benchmarks.reliability.hostile import CLIENT_CORE, NUM_SESSIONS, START_S, VERIFIER_CORE, abusing, measure
from benchmarks.reliability.setup import QUIET
from benchmarks.results_file import Found
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.report import Tally
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_most, judged

GRAMMARS = ("ambiguous_grammars", "compiled_grammars")
SECONDS = 10.0


def run() -> Found:
    """Returns the measure."""
    beside: dict[str, dict[str, float]] = {}
    with pinned(VERIFIER_CORE):
        verifier = running_verifier(*QUIET, "--num-threads", "1")
        with verifier as served:
            sessions = record_embedded(served.address, num_sessions=NUM_SESSIONS, num_rounds=12).sessions
            for name in ("busy", *GRAMMARS, "busy_again"):
                with pinned(CLIENT_CORE), abusing(served.address, name):
                    time.sleep(START_S)
                    beside[name] = measure(served.address, sessions, Tally(), SECONDS)
    p99_ms = {name: each["p99_ms"] for name, each in beside.items()}
    worst = max(GRAMMARS, key=p99_ms.__getitem__)
    again = p99_ms["busy_again"] / p99_ms["busy"]
    what = (
        f"p99 of another tenant's round beside the worst grammars ({worst}, {p99_ms[worst]:.0f} ms) : "
        f"beside an honest busy tenant ({p99_ms['busy']:.0f} ms, A/A {again:.2f})"
    )
    return [judged("str.hostile", what, p99_ms[worst] / p99_ms["busy"], "ratio", at_most(1.5))], {
        "beside": beside
    }
