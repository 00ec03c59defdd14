"""Figures of what was played: per group of edges, per verifier, and of the whole; as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.experiments.simulator.figures.tally import Tally, total
from outrider.experiments.simulator.parts.verifier import VerifierTally
from outrider.experiments.simulator.run import Played

SCHEMA = 1
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Holds quantiles in ms, by nearest rank; None where there is nothing."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    n: int

    @property
    def shown(self) -> str:
        """Returns p50 / p95 / p99 for the table."""
        return " / ".join("-" if each is None else f"{each:.4g}" for each in (self.p50, self.p95, self.p99))


@dataclass(frozen=True, slots=True)
class EdgeFigures:
    """Holds the figures of one group, or of all, after the warm-up. Requests count that began after it."""

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
    num_tree_rounds: int  # whose draft was a tree; its nodes are draft tokens
    tokens_per_round: float | None  # accepted ones, and the correction or bonus
    draft_tokens_per_round: float | None
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
        """Returns accepted / drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class VerifierFigures:
    """Holds the figures of one verifier from the beginning, warm-up included."""

    name: str
    utilisation: float  # share of the time that steps took
    num_steps: int
    num_rounds: int
    mean_batch: float  # sessions a step
    mean_step_tokens: float
    num_refused: dict[str, int]  # by reason
    most_kv_tokens: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """Holds the figures of a played system."""

    name: str
    seed: int
    seconds: float
    warmup_s: float
    total: EdgeFigures
    groups: list[EdgeFigures]
    verifiers: list[VerifierFigures]
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as JSON takes them."""
        return asdict(self)


def figures_of(played: Played) -> SystemFigures:
    """Computes the figures of what was played."""
    config = played.system.config
    groups = [
        _edges(plan.group.name, plan.group.count, tally, played.seconds)
        for plan, tally in zip(played.system.edges, played.tallies, strict=True)
    ]
    everybody = total(played.tallies, config.warmup_s)
    return SystemFigures(
        name=config.name,
        seed=config.seed,
        seconds=round(played.seconds, 9),
        warmup_s=config.warmup_s,
        total=_edges("all edges", played.system.num_edges, everybody, played.seconds),
        groups=groups,
        verifiers=[_verifier(each, played.seconds) for each in played.verifiers],
    )


def _edges(name: str, num_edges: int, tally: Tally, end_s: float) -> EdgeFigures:
    counts, seconds = tally.counts, end_s - tally.warmup_s
    return EdgeFigures(
        name=name,
        num_edges=num_edges,
        num_requests=counts["requests"],
        num_finished=counts["finished"],
        num_failed=counts["failed"],
        num_starved=counts["starved"],
        num_tokens=counts["tokens"],
        tokens_per_s=round(counts["tokens"] / seconds, 6) if seconds > 0 else 0.0,
        num_rounds=counts["rounds"],
        num_draft_tokens=counts["draft_tokens"],
        num_accepted_tokens=counts["accepted_tokens"],
        num_tree_rounds=counts["tree_rounds"],
        tokens_per_round=_per_round(tally, counts["round_tokens"]),
        draft_tokens_per_round=_per_round(tally, counts["draft_tokens"]),
        num_timeouts=counts["timeouts"],
        num_refusals=counts["refusals"],
        num_unverified_tokens=counts["unverified_tokens"],
        bytes_up_per_token=_per_token(tally, "bytes_up"),
        bytes_down_per_token=_per_token(tally, "bytes_down"),
        ttft_ms=quantiles(tally.ttfts_s),
        tpot_ms=quantiles(tally.tpots_s),
        commit_gap_ms=quantiles(tally.gaps_s),
    )


def _per_round(tally: Tally, number: int) -> float | None:
    num_rounds = tally.counts["rounds"]
    return round(number / num_rounds, 4) if num_rounds else None


def _per_token(tally: Tally, name: str) -> float | None:
    num_tokens = tally.counts["finished_tokens"]
    return round(tally.counts[name] / num_tokens, 3) if num_tokens else None


def _verifier(verifier: VerifierTally, seconds: float) -> VerifierFigures:
    num_steps = max(1, verifier.num_steps)
    return VerifierFigures(
        name=verifier.name,
        utilisation=round(min(1.0, verifier.busy_s / seconds), 6) if seconds else 0.0,
        num_steps=verifier.num_steps,
        num_rounds=verifier.num_rounds,
        mean_batch=round(verifier.num_sessions / num_steps, 4),
        mean_step_tokens=round(verifier.num_tokens / num_steps, 4),
        num_refused={reason: number for reason, number in sorted(verifier.num_refused.items()) if number},
        most_kv_tokens=verifier.most_kv_tokens,
        num_evicted=verifier.num_evicted,
    )


def quantiles(seconds: Iterable[float]) -> Quantiles:
    """Returns the quantiles and the mean of times in seconds."""
    ordered = sorted(seconds)
    if not ordered:
        return Quantiles(None, None, None, None, 0)
    p50, p95, p99 = (_rank_ms(ordered, share) for share in QUANTILES)
    mean_ms = round(1e3 * math.fsum(ordered) / len(ordered), 9)
    return Quantiles(p50, p95, p99, mean_ms, len(ordered))


def _rank_ms(ordered_s: Sequence[float], share: float) -> float:
    return round(1e3 * ordered_s[max(0, math.ceil(share * len(ordered_s)) - 1)], 9)


# ------------------------------------------------------------------------------------------- table


def table(outcome: SystemFigures) -> str:
    """Returns the outcome for a person."""
    times = "ms as p50 / p95 / p99; drafted tokens and committed tokens a round"
    lines = [
        f"{outcome.name}: {outcome.seconds:g} s played, {outcome.warmup_s:g} s of warm-up; {times}",
        "",
        f"{'edges':<16}{'number':>7}{'requests':>9}{'failed':>7}{'starved':>8}{'tokens/s':>10}{'rounds':>9}{'drafted':>9}{'tokens':>8}{'refused':>8}"
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
        f"{edges.tokens_per_s:>10.1f}{edges.num_rounds:>9}{_shown(edges.draft_tokens_per_round):>9}"
        f"{_shown(edges.tokens_per_round):>8}{edges.num_refusals:>8}{edges.num_timeouts:>9}"
        f"{edges.num_unverified_tokens:>7}  {edges.ttft_ms.shown:<22}{edges.tpot_ms.shown:<22}"
        f"{edges.commit_gap_ms.shown:<22}"
    )


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _verifier_line(verifier: VerifierFigures) -> str:
    refused = ", ".join(f"{number} {reason}" for reason, number in verifier.num_refused.items()) or "-"
    return (
        f"{verifier.name[:15]:<16}{verifier.utilisation:>7.1%}{verifier.num_steps:>9}"
        f"{verifier.mean_batch:>7.1f}{verifier.mean_step_tokens:>9.1f}{verifier.most_kv_tokens:>10}  "
        f"{refused}"
    )
