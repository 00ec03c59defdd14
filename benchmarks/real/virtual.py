"""A point in virtual time: the simulator with the pair's recorded acceptance and times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.real.cases import RealCase
from benchmarks.real.points import RealPoint
from outrider.experiments.shared.acceptance_traces import find_traces
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.parts.drafts import TracedText
from outrider.experiments.simulator.parts.edges import Ask, RequestLog
from outrider.experiments.simulator.run import play

NUM_PROMPT_TOKENS = 100
_SECONDS = 1e6  # more than any text takes


def virtual_ms(point: RealPoint, cases: Sequence[RealCase]) -> dict[str, float]:
    """Returns the milliseconds a token of each case, the mean of the pair's recorded texts."""
    return {case.name: round(_play(point, case), 3) for case in cases}


def _play(point: RealPoint, case: RealCase) -> float:
    """Returns the milliseconds a token of texts by edges that each have a verifier to themselves. Later texts are
    the second ones of their edges."""
    traces = find_traces(point.traces)
    assert traces.times is not None, "the bank's traces have times"
    found: list[float] = []

    def take(log: RequestLog) -> None:
        assert log.is_finished and log.tpot_s is not None, log.error
        if log.number == num_before:
            found.append(1e3 * log.tpot_s)

    count = len(traces.texts)
    # Two tokens, so that the verifier has seen steps of two sizes; then texts.
    num_before = 1 if point.is_first else 2
    lengths = [2, *[point.num_tokens] * num_before]
    asks = [
        [Ask(NUM_PROMPT_TOKENS, length, (place + number) % count) for number, length in enumerate(lengths)]
        for place in range(count)
    ]
    system = {
        "seconds": _SECONDS,
        "edges": [
            {
                "count": count,
                "link": {"name": "point", "rtt_ms": point.rtt_ms},
                "edge": {"on_timeout": "wait", "min_draft_ms": point.min_draft_ms, **case.settings},
                "draft": traces.times["draft"],
            }
        ],
        "verifiers": [
            {
                "count": count,
                "balance": "edge",
                "serve": {"min_forward_ms": point.min_forward_ms},
                "times": traces.times["verifier"],
            }
        ],
    }
    play(
        load_system(system),
        on_request=take,
        asks=asks,
        traces=[TracedText(trace, has_runner_ups=True) for trace in traces.texts],
    )
    return statistics.fmean(found)
