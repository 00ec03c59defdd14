"""Computes every metric of docs/design.md §8 as a pure function of requests, rounds and visits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.common import sequences
from outrider.common.types import Origin
from outrider.experiments.sweep.config.schema import Slo
from outrider.experiments.sweep.results.intervals import Interval, of_mean, of_quantiles, of_ratio
from outrider.experiments.sweep.results.records import Metric, RequestRow, RoundRow, VisitRow

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}  # what {q} stands for below

DESCRIPTIONS: dict[str, tuple[str, str]] = {
    "ttft_ms": ("ms", "time to first token, mean; the prompt is in the verifier's prefix cache"),
    "ttft_p95_ms": ("ms", "the same, 95th percentile"),
    "tpot_ms": ("ms", "time per output token after the first, mean of requests"),
    "total_ms": ("ms", "from the request to its last token, mean"),
    "otps": ("tokens/s", "output tokens per second of a request, its first token included, mean"),
    "tokens_per_s": ("tokens/s", "all sessions together, while they ran"),
    "itl_{q}_ms": ("ms", "gap between tokens; those of one commit have none between them"),
    "commit_gap_{q}_ms": ("ms", "gap between commits: moments at which the text grows"),
    "goodput_share": ("share", "requests that keep the SLO"),
    "goodput_tokens_per_s": ("tokens/s", "tokens of such requests, all sessions together"),
    "acceptance_rate": ("share", "drafted tokens that were accepted; of a tree those of its likeliest path"),
    "tokens_per_round": ("tokens", "committed tokens per answered round, correction or bonus included"),
    "draft_tokens_per_round": ("tokens", "drafted tokens per answered round; of a tree its nodes"),
    "tree_share": ("share", "rounds whose draft was a tree"),
    "verifier_calls_per_token": ("calls", "forwards of the target a request took part in, per token"),
    "forward_s_per_token": ("s", "time of those forwards per token, shared ones by equal parts"),
    "cost_per_million_tokens": ("price", "forwards and the verifier's drafting at the given price per hour"),
    "bytes_up_per_token": ("bytes", "payload of messages, edge to cloud, per token"),
    "bytes_up_per_draft_token": ("bytes", "messages of rounds per drafted token; of a tree its nodes"),
    "bytes_down_per_token": ("bytes", "cloud to edge"),
    "wire_bytes_up_per_token": ("bytes", "whole IP packets, where the realisation counts them"),
    "wire_bytes_down_per_token": ("bytes", "the same, cloud to edge"),
    "unverified_share": ("share", "tokens that the target never confirmed"),
    "fallback_share": ("share", "tokens kept after a timeout"),
    "approximate_share": ("share", "tokens that an approximate method let in"),
    "rolled_back_share": ("share", "tokens that were kept and taken back again, per token of the text"),
    "gate_share": ("share", "tokens that the gate kept without asking the target"),
    "hard_share": ("share", "drafted tokens that the gate doubted, mean over blocks"),
    "escalated_share": ("share", "blocks that the gate sent to the target"),
    "timeouts_per_request": ("timeouts", "rounds without an answer in time"),
    "round_ms": ("ms", "a round: draft and wait"),
    "round_draft_ms": ("ms", "of it: drafting"),
    "round_net_ms": ("ms", "of it: link, messages and everything else that is not the verifier's"),
    "round_queue_ms": ("ms", "of it: waiting at the verifier"),
    "round_forward_ms": ("ms", "of it: the target's forward"),
    "round_other_ms": ("ms", "of it: the verifier beside queue and forward"),
    "edge_peak_rss_mb": ("MB", "peak memory of an edge's process, the largest"),
    "verifier_peak_rss_mb": ("MB", "peak memory of the verifier's process"),
    "verifier_kv_peak_tokens": ("tokens", "most tokens of KV held at once since the verifier's start"),
    "verifier_kv_peak_share": ("share", "the same, of its pool"),
    "gpu_peak_allocated_mb": ("MB", "peak memory of the verifier's GPU since its start, in tensors"),
    "gpu_peak_reserved_mb": ("MB", "the same, taken from the device"),
    "energy_j_per_token": ("J", "of the whole machine, where it has counters"),
    "target_nats_per_token": ("nats", "loss of the text under the target: lower is likelier"),
}


_MB = 1e6
_MEMORY = {  # metric → key of `MemoryPeaks`, and its unit
    "verifier_kv_peak_tokens": ("kv_tokens", 1),
    "verifier_kv_peak_share": ("kv_share", 1),
    "gpu_peak_allocated_mb": ("gpu_allocated_bytes", _MB),
    "gpu_peak_reserved_mb": ("gpu_reserved_bytes", _MB),
}


def unit_of(name: str) -> str:
    """Returns the metric's unit."""
    return DESCRIPTIONS[_general(name)][0]


def describe(name: str) -> str:
    """Returns what the metric is, in a sentence."""
    return DESCRIPTIONS[_general(name)][1]


def _general(name: str) -> str:
    if name in DESCRIPTIONS:
        return name
    return next(name.replace(f"_{q}_", "_{q}_") for q in QUANTILES if f"_{q}_" in name)


@dataclass(frozen=True, slots=True)
class Observed:
    """Holds everything a cell left. `requests` are those that ended without an error."""

    requests: Sequence[RequestRow]
    rounds: Sequence[RoundRow]
    visits: Sequence[VisitRow]

    @property
    def num_tokens(self) -> list[int]:
        """Returns the tokens of each request."""
        return [row.num_tokens for row in self.requests]


def compute_metrics(seen: Observed, slo: Slo, price_per_hour: float | None) -> dict[str, Metric]:
    """Returns the metrics by name, as in `metric_names`; what was not measured is absent."""
    if not seen.requests:
        return {}
    return {
        **_latency(seen),
        **_gaps(seen),
        **_goodput(seen, slo),
        **_speculation(seen),
        **_trees(seen.rounds),
        **_verifier(seen, price_per_hour),
        **_traffic(seen),
        **_marks(seen),
        **_gate(seen),
        **_round_parts(seen.rounds),
        **_machine(seen.visits),
    }


def meets(row: RequestRow, slo: Slo) -> bool:
    """Returns whether a request keeps the SLO. One too short to have a time per token cannot miss it."""
    gaps = sorted(_commit_gaps(row))
    p95 = gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else None  # as the metric of that name
    limits = ((row.ttft_ms, slo.ttft_ms), (row.tpot_ms, slo.tpot_ms), (p95, slo.commit_gap_p95_ms))
    return all(limit is None or value is None or value <= limit for value, limit in limits)


def _commit_gaps(row: RequestRow) -> list[float]:
    return [after - before for before, after in itertools.pairwise(row.commit_times_ms)]


def _token_gaps(row: RequestRow) -> list[float]:
    return [after - before for before, after in itertools.pairwise(row.token_times_ms)]


def acceptance_by_position(rounds: Iterable[RoundRow]) -> tuple[list[float], list[float]]:
    """Returns alpha_i, how often token i was accepted of the rounds that drafted it and in which all
    before it were; and a_cum_i, how often the first i all were of the rounds that drafted so many."""
    answered = [r for r in rounds if r.is_answered]
    counts = sequences.acceptance_by_position(map(_as_chain, answered))
    alphas = [round(each.accepted / each.reached, 4) if each.reached else 0.0 for each in counts]
    return alphas, [round(each.accepted / each.drafted, 4) for each in counts]


# ------------------------------------------------------------------------------------------ groups


def _latency(seen: Observed) -> dict[str, Metric]:
    found = {}
    for name in ("ttft_ms", "tpot_ms", "total_ms", "otps"):
        values = [value for row in seen.requests if (value := getattr(row, name)) is not None]
        if values:
            found[name] = _metric(name, of_mean(values), len(values))
    first = [[row.ttft_ms] for row in seen.requests if row.ttft_ms is not None]
    if p95 := of_quantiles(first, [0.95]):
        found["ttft_p95_ms"] = _metric("ttft_p95_ms", p95[0], len(first))
    if wall_s := sum(visit.wall_s for visit in seen.visits):
        value = sum(visit.num_tokens for visit in seen.visits) / wall_s
        interval = _over_visits(seen.visits, lambda visit: visit.num_tokens, lambda visit: visit.wall_s)
        found["tokens_per_s"] = _metric("tokens_per_s", (value, interval), len(seen.visits))
    return found


def _gaps(seen: Observed) -> dict[str, Metric]:
    found = {}
    for name, gaps_of in (("itl", _token_gaps), ("commit_gap", _commit_gaps)):
        groups = [gaps_of(row) for row in seen.requests]
        quantiles = of_quantiles(groups, list(QUANTILES.values()))
        for (label, _), result in zip(QUANTILES.items(), quantiles or (), strict=False):
            full = f"{name}_{label}_ms"
            found[full] = _metric(full, result, len(groups))
    return found


def _goodput(seen: Observed, slo: Slo) -> dict[str, Metric]:
    good = [meets(row, slo) for row in seen.requests]
    found = {"goodput_share": _metric("goodput_share", of_mean(good), len(good))}
    if wall_s := sum(visit.wall_s for visit in seen.visits):
        tokens = sum(row.num_tokens for row, is_good in zip(seen.requests, good, strict=True) if is_good)
        # A visit that was interrupted left requests and no time: the share of all tokens, at the pace of whole visits.
        pace = sum(visit.num_tokens for visit in seen.visits) / wall_s
        value = pace * tokens / (sum(seen.num_tokens) or 1)
        found["goodput_tokens_per_s"] = _metric("goodput_tokens_per_s", (value, None), len(good))
    return found


def _speculation(seen: Observed) -> dict[str, Metric]:
    rows = [row for row in seen.requests if row.num_rounds]
    in_rounds = [sum(o in ("accepted", "correction", "bonus") for o in row.token_origins) for row in rows]
    accepted = {row.request: (row.num_accepted_tokens, row.num_draft_tokens) for row in rows}
    if any(r.main_path for r in seen.rounds):
        accepted = dict.fromkeys(accepted, (0, 0))
        for each in seen.rounds:
            if each.is_answered and each.request in accepted:
                so_far, here = accepted[each.request], _as_chain(each)
                accepted[each.request] = so_far[0] + here[0], so_far[1] + here[1]
    num_drafted = [row.num_draft_tokens for row in rows]
    found = {
        "acceptance_rate": of_ratio([n for n, _ in accepted.values()], [n for _, n in accepted.values()]),
        "tokens_per_round": of_ratio(in_rounds, [row.num_rounds for row in rows]),
        "draft_tokens_per_round": of_ratio(num_drafted, [row.num_rounds for row in rows]),
    }
    return _present(found, len(rows))


def _as_chain(each: RoundRow) -> tuple[int, int]:
    """Returns how many tokens were accepted of how many of one chain: of a tree its likeliest path."""
    if each.main_path is not None:
        return each.main_path[0], each.main_path[1]
    return each.num_accepted_tokens, each.num_draft_tokens


def _trees(rounds: Sequence[RoundRow]) -> dict[str, Metric]:
    """Returns means over answered rounds, without intervals; no share of trees where there was none."""
    answered = [r for r in rounds if r.is_answered]
    found: dict[str, tuple[float, Interval] | None] = {}
    if num_trees := sum(r.main_path is not None for r in answered):
        found["tree_share"] = num_trees / len(answered), None
    if num_drafted := sum(r.num_draft_tokens for r in answered if r.bytes_up):
        bytes_up = sum(r.bytes_up for r in answered if r.num_draft_tokens)
        found["bytes_up_per_draft_token"] = bytes_up / num_drafted, None
    return _present(found, len(answered))


def _verifier(seen: Observed, price_per_hour: float | None) -> dict[str, Metric]:
    if not any(row.verifier_calls for row in seen.requests):
        return {}
    busy_s = [row.forward_s + row.cloud_draft_s for row in seen.requests]
    found = {
        "verifier_calls_per_token": of_ratio([row.verifier_calls for row in seen.requests], seen.num_tokens),
        "forward_s_per_token": of_ratio([row.forward_s for row in seen.requests], seen.num_tokens),
    }
    if price_per_hour is not None:
        cost = [seconds / 3600 * price_per_hour * 1e6 for seconds in busy_s]
        found["cost_per_million_tokens"] = of_ratio(cost, seen.num_tokens)
    return _present(found, len(seen.requests))


def _traffic(seen: Observed) -> dict[str, Metric]:
    found = {}
    if any(row.bytes_up for row in seen.requests):
        found = {
            "bytes_up_per_token": of_ratio([row.bytes_up for row in seen.requests], seen.num_tokens),
            "bytes_down_per_token": of_ratio([row.bytes_down for row in seen.requests], seen.num_tokens),
        }
    counted = [visit for visit in seen.visits if visit.wire_bytes_up is not None]
    for way in ("up", "down"):
        sizes = [getattr(visit, f"wire_bytes_{way}") or 0 for visit in counted]
        found[f"wire_bytes_{way}_per_token"] = of_ratio(sizes, [visit.num_tokens for visit in counted])
    return _present(found, len(seen.requests))


def _marks(seen: Observed) -> dict[str, Metric]:
    found: dict[str, tuple[float, Interval] | None] = {}
    for name in ("unverified", "fallback", "approximate"):
        counts = [getattr(row, f"num_{name}_tokens") for row in seen.requests]
        found[f"{name}_share"] = of_ratio(counts, seen.num_tokens)
    if any(row.num_rolled_back_tokens for row in seen.requests):
        found["rolled_back_share"] = of_ratio(
            [row.num_rolled_back_tokens for row in seen.requests], seen.num_tokens
        )
    found["timeouts_per_request"] = of_mean([row.num_timeouts for row in seen.requests])
    return _present(found, len(seen.requests))


def _gate(seen: Observed) -> dict[str, Metric]:
    judged = [r for r in seen.rounds if r.hard_ratio is not None]
    if not judged:
        return {}
    kept = [row.token_origins.count(Origin.GATE) for row in seen.requests]
    means: dict[str, tuple[float, Interval] | None] = {
        "hard_share": (sum(r.hard_ratio or 0.0 for r in judged) / len(judged), None),
        "escalated_share": (sum(bool(r.escalated) for r in judged) / len(judged), None),
    }
    shares = {"gate_share": of_ratio(kept, seen.num_tokens)}
    return {**_present(shares, len(seen.requests)), **_present(means, len(judged))}


def _round_parts(rounds: Sequence[RoundRow]) -> dict[str, Metric]:
    """Returns means over answered rounds, without intervals: they explain, they do not compare."""
    answered = [r for r in rounds if r.is_answered]
    if not answered:
        return {}
    parts: dict[str, Callable[[RoundRow], float]] = {
        "round_ms": lambda r: r.draft_ms + r.rtt_ms if r.rtt_ms else r.draft_ms + r.queue_ms + r.forward_ms,
        "round_draft_ms": lambda r: r.draft_ms,
        "round_net_ms": lambda r: r.net_ms,
        "round_queue_ms": lambda r: r.queue_ms,
        "round_forward_ms": lambda r: r.forward_ms,
        "round_other_ms": lambda r: max(0.0, r.verifier_ms - r.queue_ms - r.forward_ms),
    }
    means = {name: sum(map(part, answered)) / len(answered) for name, part in parts.items()}
    return {name: _metric(name, (mean, None), len(answered)) for name, mean in means.items()}


def _machine(visits: Sequence[VisitRow]) -> dict[str, Metric]:
    found: dict[str, tuple[float, Interval] | None] = {}
    for side in ("edge", "verifier"):
        peaks = [peak for visit in visits if (peak := getattr(visit, f"{side}_peak_rss_bytes")) is not None]
        found[f"{side}_peak_rss_mb"] = (max(peaks) / _MB, None) if peaks else None
    for name, (key, scale) in _MEMORY.items():
        sizes = [size for visit in visits if (size := visit.verifier_memory.get(key)) is not None]
        found[name] = (max(sizes) / scale, None) if sizes else None
    metered = [visit for visit in visits if visit.energy_j is not None]
    found["energy_j_per_token"] = of_ratio(
        [visit.energy_j or 0.0 for visit in metered], [visit.num_tokens for visit in metered]
    )
    return _present(found, len(visits))


# ----------------------------------------------------------------------------------------- helpers


def _over_visits(
    visits: Sequence[VisitRow], part: Callable[[VisitRow], float], whole: Callable[[VisitRow], float]
) -> Interval:
    result = of_ratio([part(visit) for visit in visits], [whole(visit) for visit in visits])
    return result[1] if result else None


def _present(found: dict[str, tuple[float, Interval] | None], n: int) -> dict[str, Metric]:
    return {name: _metric(name, result, n) for name, result in found.items() if result is not None}


def _metric(name: str, result: tuple[float, Interval], n: int) -> Metric:
    value, interval = result
    low, high = interval if interval else (None, None)
    return Metric(_rounded(value), unit_of(name), _rounded(low), _rounded(high), n)  # type: ignore[arg-type]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
