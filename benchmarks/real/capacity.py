"""What one verifier carries: committed tokens a second of several sessions, drafted for at edges, by the verifier
itself, or not at all, or as the controller chooses, and how long each session waits between its tokens.

Recorded texts are replayed by a process beside the verifier (`outrider.experiments.load`), so no draft model takes
the verifier's cores; a drafted token takes its time there. All ways write the same texts, and every verdict and
every token is compared with the recorded one. The ways of one number of sessions take turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.setup import QUIET, generate_load
from benchmarks.real.step_times import NUM_SHARING, measure_steps
from benchmarks.results_file import Found
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.report import LoadReport
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.results import Measure, at_least, judged

SESSIONS = (1, 4, 8, 16, 32)
LENGTHS, CO_LOCATED_LENGTHS = (2, 4, 8), (2, 4)
DRAFT_TOKEN_MS = "0.6"  # of the embedded draft on a core of its own
NUM_TURNS, SECONDS, WARMUP_S = 4, 2.0, 0.7
NUM_THREADS = os.cpu_count() or 1  # of a forward, as by default
NUM_POSITIONS = 96
LIMITS_MS = (50, 100)
CLOUD_ONLY, AGAIN, OWN, AUTO = "cloud-only", "cloud-only again", "rounds, own depth", "defaults"

Reports = Mapping[int, Mapping[str, Sequence[LoadReport]]]
"""Of each number of sessions and way, one report a turn."""


def ways() -> dict[str, tuple[str, ...]]:
    """Returns the load generator's flags by way."""
    drafting = ("--draft-token-ms", DRAFT_TOKEN_MS, "--depth-policy")
    found: dict[str, tuple[str, ...]] = {
        edge_way(n): (*drafting, "fixed", "--num-speculative-tokens", str(n)) for n in LENGTHS
    }
    found[OWN] = (*drafting, "optimal")
    found[AUTO] = (*drafting, "optimal", "--mode", "auto")
    found[CLOUD_ONLY] = found[AGAIN] = ("--mode", "cloud-only")
    for n in CO_LOCATED_LENGTHS:
        found[co_located_way(n)] = ("--mode", "co-located", "--num-speculative-tokens", str(n))
    return found


def edge_way(num_drafted: int) -> str:
    """Returns the name of drafts of that length made at edges."""
    return f"drafts of {num_drafted}"


def co_located_way(num_drafted: int) -> str:
    """Returns the name of drafts of that length made by the verifier."""
    return f"co-located, {num_drafted}"


def run() -> Found:
    """Returns the measures, and a table of every number of sessions and way."""
    flags = (*QUIET, "--num-threads", str(NUM_THREADS), "--admin-listen", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as scratch, running_verifier(*flags) as verifier:
        recording = record_embedded(verifier.address, num_sessions=max(SESSIONS), num_positions=NUM_POSITIONS)
        file = recording.save(Path(scratch) / "traces.jsonl")
        reports = {number: _take_turns(verifier, file, number) for number in SESSIONS}
    step_s = measure_steps(recording.sessions[:NUM_SHARING], (0, *LENGTHS), NUM_THREADS)
    details: dict[str, Any] = {
        "step_ms": {str(rows): round(1e3 * seconds, 3) for rows, seconds in step_s.items()},
        "tables": [table(reports)],
        "memory": asdict(memory) if (memory := reports[max(SESSIONS)][OWN][-1].memory) else None,
    }
    return judge(reports, step_s), details


def _take_turns(verifier: VerifierProcess, file: Path, num_sessions: int) -> dict[str, list[LoadReport]]:
    found: dict[str, list[LoadReport]] = {way: [] for way in ways()}
    flags: tuple[str, ...] = ("--closed", "--sessions", str(num_sessions))
    flags += ("--connections", str(num_sessions))
    flags += ("--seconds", str(SECONDS), "--warmup-s", str(WARMUP_S), "--admin-url", verifier.admin_url)
    order = list(ways().items())
    for turn in range(NUM_TURNS):
        shift = turn * len(order) // NUM_TURNS
        for way, own in (*order[shift:], *order[:shift]):
            report = generate_load(verifier.address, file, *flags, *own)
            assert report.is_right, f"{num_sessions} sessions, {way}: {report}"
            found[way].append(report)
            print(
                f"  {num_sessions} sessions, {way}: {report.tokens_per_s:.0f} tokens/s, p95 between tokens "
                f"{report.commit_gap_p95_ms:.0f} ms, batches of {report.mean_batch:g}",
                flush=True,
            )
    return found


# ------------------------------------------------------------------------------------------- figures


def ratio(reports: Reports, num_sessions: int, way: str, other: str) -> float:
    """Returns tokens a second of one way : another, the median of the turns."""
    pairs = zip(reports[num_sessions][way], reports[num_sessions][other], strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)


def best_of(reports: Reports, num_sessions: int, names: Sequence[str]) -> str:
    """Returns the way with most tokens a second."""
    return max(names, key=lambda way: _median(reports[num_sessions][way], "tokens_per_s"))


def num_within(reports: Reports, way: str, limit_ms: float) -> int:
    """Returns the most sessions, of those tried, whose slowest one has its p95 within the limit; so have all fewer
    ones. 0: none."""
    most = 0
    for num_sessions in sorted(reports):
        if _median(reports[num_sessions][way], "worst_commit_gap_p95_ms") > limit_ms:
            break
        most = num_sessions
    return most


def judge(reports: Reports, step_s: Mapping[int, float]) -> list[Measure]:
    """Returns the measures. `step_s` is a step's time by its rows."""
    edges = [edge_way(n) for n in LENGTHS]
    return [
        *_judge_eight(reports, step_s, best_of(reports, NUM_SHARING, edges)),
        _judge_colocated(reports, edges),
        _judge_load(reports),
        *(_count_fitting(reports, limit_ms) for limit_ms in LIMITS_MS),
    ]


def _judge_eight(reports: Reports, step_s: Mapping[int, float], best: str) -> list[Measure]:
    own = ratio(reports, NUM_SHARING, best, CLOUD_ONLY)
    aa = ratio(reports, NUM_SHARING, AGAIN, CLOUD_ONLY)
    num_drafted = int(best.split()[-1])
    tokens = _median(reports[NUM_SHARING][best], "tokens_per_round")
    rows = NUM_SHARING * (num_drafted + 1)
    possible = tokens * step_s[NUM_SHARING] / step_s[rows]
    what = f"tokens/s of one verifier, {NUM_SHARING} sessions, {best} : cloud-only (A/A {aa:.3f})"
    bound = f"that : {tokens:.2f} tokens a round x t({NUM_SHARING} rows) / t({rows} rows) = {possible:.2f}"
    return [
        judged("real.capacity8", what, own, "ratio", at_least(1.3)),
        judged("real.capacity8_possible", bound, own / possible, "ratio", at_least(0.85)),
    ]


def _judge_colocated(reports: Reports, edges: Sequence[str]) -> Measure:
    ratios = {}
    for num_sessions in (8, 32):
        there = best_of(reports, num_sessions, [co_located_way(n) for n in CO_LOCATED_LENGTHS])
        ratios[num_sessions] = ratio(reports, num_sessions, best_of(reports, num_sessions, edges), there)
    shown = ", ".join(f"{value:.2f} with {number}" for number, value in ratios.items())
    what = f"tokens/s, edges drafting : the verifier drafting, best lengths of both ({shown})"
    return judged("real.capacity_vs_colocated", what, min(ratios.values()), "ratio", at_least(1.15))


def _judge_load(reports: Reports) -> Measure:
    most = max(reports)
    drafted = _median(reports[most][OWN], "mean_drafted")
    lone = _median(reports[min(reports)][OWN], "mean_drafted")
    fewer = ", ".join(
        f"{ratio(reports, number, AUTO, CLOUD_ONLY):.2f} with {number}" for number in sorted(reports)[:-1]
    )
    what = (
        f"tokens/s, {most} sessions whose controller chooses mode and depth : cloud-only ({fewer}; "
        f"rounds alone {ratio(reports, most, OWN, CLOUD_ONLY):.2f}, of {drafted:.1f} tokens, {lone:.1f} of a session "
        f"alone; A/A {ratio(reports, most, AGAIN, CLOUD_ONLY):.3f})"
    )
    return judged("real.capacity_load", what, ratio(reports, most, AUTO, CLOUD_ONLY), "ratio", at_least(1.0))


def _count_fitting(reports: Reports, limit_ms: int) -> Measure:
    fitting = {way: num_within(reports, way, limit_ms) for way in ways() if way != AGAIN}
    tried = ", ".join(map(str, sorted(reports)))
    shown = ", ".join(f"{way} {number}" for way, number in fitting.items() if way != AUTO)
    what = f"sessions with a p95 between tokens <= {limit_ms} ms, of {tried}: {AUTO} ({shown})"
    return Measure(f"real.capacity_p95_{limit_ms}", what, fitting[AUTO], "sessions")


def table(reports: Reports) -> dict[str, Any]:
    """Returns tokens a second, the slowest session's p95 between tokens, and the p99 of all answers' waits, by sessions
    and way."""
    names = [way for way in ways() if way != AGAIN]
    rows = []
    for num_sessions in sorted(reports):
        cells = []
        for way in names:
            found = reports[num_sessions][way]
            rate, gap_ms = _median(found, "tokens_per_s"), _median(found, "worst_commit_gap_p95_ms")
            cells.append(f"{rate:.0f} ({gap_ms:.0f}, {_median(found, 'p99_ms'):.0f})")
        rows.append([str(num_sessions), *cells])
    title = "Tokens a second of one verifier (ms: the slowest session's p95 between tokens; p99 of all answers' waits)"
    return {"title": title, "columns": ["sessions", *names], "rows": rows}


def _median(reports: Sequence[LoadReport], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in reports))
