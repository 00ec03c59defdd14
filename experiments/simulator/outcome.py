"""Figures of what was played: per group of edges, per verifier, and of the whole; as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from common.types import Origin
from experiments.simulator.edges import RequestLog
from experiments.simulator.run import Played
from experiments.simulator.verifier import SimulatedVerifier

SCHEMA = 1
PATIENCE_S = 5.0  # a first token later than this is no service
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """In ms, by nearest rank; None where there is nothing."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    n: int

    @property
    def shown(self) -> str:
        return " / ".join("-" if each is None else f"{each:.4g}" for each in (self.p50, self.p95, self.p99))


@dataclass(frozen=True, slots=True)
class EdgeFigures:
    """Of one group, or of all; after the warm-up. Requests count that began after it."""

    name: str
    num_edges: int
    num_requests: int
    num_finished: int
    num_failed: int
    num_starved: int  # had no first token within PATIENCE_S; those of the warm-up count too
    num_tokens: int  # of requests under way at the end too
    tokens_per_s: float
    num_rounds: int  # answered
    num_draft_tokens: int
    num_accepted_tokens: int
    num_timeouts: int
    num_refusals: int
    num_unverified_tokens: int
    bytes_up_per_token: float | None
    bytes_down_per_token: float | None
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    commit_gap_ms: Quantiles

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class VerifierFigures:
    """From the beginning, warm-up included."""

    name: str
    utilisation: float  # share of the time that steps took
    num_steps: int
    num_rounds: int
    mean_batch: float  # sessions a step
    mean_step_tokens: float
    num_refused: dict[str, int]  # by reason
    most_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    seed: int
    seconds: float
    warmup_s: float
    total: EdgeFigures
    groups: list[EdgeFigures]
    verifiers: list[VerifierFigures]
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(played: Played) -> Outcome:
    config = played.system.config
    groups = []
    for place, plan in enumerate(played.system.edges):
        logs = [log for log in played.requests if played.group_of[log.edge] == place]
        groups.append(_edges(plan.group.name, plan.group.count, logs, config.warmup_s, played.seconds))
    everybody = ("all edges", played.system.num_edges, played.requests, config.warmup_s, played.seconds)
    return Outcome(
        name=config.name,
        seed=config.seed,
        seconds=round(played.seconds, 9),
        warmup_s=config.warmup_s,
        total=_edges(*everybody),
        groups=groups,
        verifiers=[_verifier(each, played.seconds) for each in played.verifiers],
    )


def _edges(
    name: str, num_edges: int, logs: Sequence[RequestLog], warmup_s: float, end_s: float
) -> EdgeFigures:
    counted = [log for log in logs if log.start_s >= warmup_s]
    finished = [log for log in counted if log.is_finished]
    num_tokens = sum(n for log in logs for at_s, n in log.commits if at_s >= warmup_s)
    results = [log.result for log in counted if log.result is not None]
    stats = [result.stats for result in results]
    rounds = [each for stat in stats for each in stat.rounds if each.is_answered]
    seconds = end_s - warmup_s
    unverified = (Origin.FALLBACK, Origin.EDGE_ONLY)
    return EdgeFigures(
        name=name,
        num_edges=num_edges,
        num_requests=len(counted),
        num_finished=len(finished),
        num_failed=sum(bool(log.error) for log in counted),
        num_starved=sum(_is_starved(log, end_s) for log in logs),
        num_tokens=num_tokens,
        tokens_per_s=round(num_tokens / seconds, 6) if seconds > 0 else 0.0,
        num_rounds=len(rounds),
        num_draft_tokens=sum(each.num_draft_tokens for each in rounds),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in rounds),
        num_timeouts=sum(stat.num_timeouts for stat in stats),
        num_refusals=sum(stat.num_refusals for stat in stats),
        num_unverified_tokens=sum(origin in unverified for result in results for origin in result.origins),
        bytes_up_per_token=_per_token(finished, "bytes_up"),
        bytes_down_per_token=_per_token(finished, "bytes_down"),
        ttft_ms=quantiles(log.ttft_s for log in counted if log.ttft_s is not None),
        tpot_ms=quantiles(log.tpot_s for log in finished if log.tpot_s is not None),
        commit_gap_ms=quantiles(_gaps(logs, warmup_s)),
    )


def _gaps(logs: Iterable[RequestLog], warmup_s: float) -> Iterable[float]:
    for log in logs:
        for (before_s, _), (at_s, _) in pairwise(log.commits):
            if at_s >= warmup_s:
                yield at_s - before_s


def _is_starved(log: RequestLog, end_s: float) -> bool:
    waited_s = (log.commits[0][0] if log.commits else min(log.end_s, end_s)) - log.start_s
    return waited_s > PATIENCE_S or bool(log.error and not log.commits)


def _per_token(logs: Sequence[RequestLog], name: str) -> float | None:
    num_tokens = sum(log.num_tokens for log in logs)
    if not num_tokens:
        return None
    num_bytes = sum(int(getattr(log.result.stats, name)) for log in logs if log.result)
    return round(num_bytes / num_tokens, 3)


def _verifier(verifier: SimulatedVerifier, seconds: float) -> VerifierFigures:
    engine, target = verifier.engine, verifier.target
    refused = dict(engine.backlog.num_refused)
    for reason, number in engine.observer.refusals.items():
        refused[reason] = refused.get(reason, 0) + number
    num_steps = max(1, target.num_forwards)
    return VerifierFigures(
        name=verifier.name,
        utilisation=round(min(1.0, verifier.busy_s / seconds), 6) if seconds else 0.0,
        num_steps=target.num_forwards,
        num_rounds=engine.observer.num_rounds["verify"],
        mean_batch=round(engine.observer.batch_size.total / num_steps, 4),
        mean_step_tokens=round(target.num_query_rows / num_steps, 4),
        num_refused={reason: number for reason, number in sorted(refused.items()) if number},
        most_kv_tokens=target.most_used_tokens,
    )


def quantiles(seconds: Iterable[float]) -> Quantiles:
    ordered = sorted(seconds)
    if not ordered:
        return Quantiles(None, None, None, None, 0)
    p50, p95, p99 = (_rank_ms(ordered, share) for share in QUANTILES)
    mean_ms = round(1e3 * math.fsum(ordered) / len(ordered), 9)
    return Quantiles(p50, p95, p99, mean_ms, len(ordered))


def _rank_ms(ordered_s: Sequence[float], share: float) -> float:
    return round(1e3 * ordered_s[max(0, math.ceil(share * len(ordered_s)) - 1)], 9)


# ------------------------------------------------------------------------------------------- table


def table(outcome: Outcome) -> str:
    times = "ms as p50 / p95 / p99"
    lines = [
        f"{outcome.name}: {outcome.seconds:g} s played, {outcome.warmup_s:g} s of warm-up; {times}",
        "",
        f"{'edges':<16}{'number':>7}{'requests':>9}{'failed':>7}{'starved':>8}{'tokens/s':>10}{'rounds':>9}{'refused':>8}"
        f"{'timeouts':>9}{'kept':>7}  {'TTFT':<22}{'TPOT':<22}{'commit gap':<22}",
    ]
    everybody = [*outcome.groups, outcome.total] if len(outcome.groups) > 1 else outcome.groups
    lines += [_edges_line(each) for each in everybody]
    lines += ["", f"{'verifier':<16}{'busy':>7}{'steps':>9}{'batch':>7}{'tokens':>9}{'KV most':>10}  refused"]
    lines += [_verifier_line(each) for each in outcome.verifiers]
    return "\n".join(lines)


def _edges_line(edges: EdgeFigures) -> str:
    return (
        f"{edges.name[:15]:<16}{edges.num_edges:>7}{edges.num_requests:>9}{edges.num_failed:>7}{edges.num_starved:>8}"
        f"{edges.tokens_per_s:>10.1f}{edges.num_rounds:>9}{edges.num_refusals:>8}{edges.num_timeouts:>9}"
        f"{edges.num_unverified_tokens:>7}  {edges.ttft_ms.shown:<22}{edges.tpot_ms.shown:<22}"
        f"{edges.commit_gap_ms.shown:<22}"
    )


def _verifier_line(verifier: VerifierFigures) -> str:
    refused = ", ".join(f"{number} {reason}" for reason, number in verifier.num_refused.items()) or "-"
    return (
        f"{verifier.name[:15]:<16}{verifier.utilisation:>7.1%}{verifier.num_steps:>9}"
        f"{verifier.mean_batch:>7.1f}{verifier.mean_step_tokens:>9.1f}{verifier.most_kv_tokens:>10}  "
        f"{refused}"
    )
