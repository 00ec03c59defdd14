"""The metrics of a cell by name: their units, and what they are in a sentence."""

from __future__ import annotations

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
    "acceptance_rate": ("share", "drafted tokens that were accepted"),
    "tokens_per_round": ("tokens", "committed tokens per answered round, correction or bonus included"),
    "verifier_calls_per_token": ("calls", "forwards of the target a request took part in, per token"),
    "forward_s_per_token": ("s", "time of those forwards per token, shared ones by equal parts"),
    "cost_per_million_tokens": ("price", "forwards and the verifier's drafting at the given price per hour"),
    "bytes_up_per_token": ("bytes", "payload of messages, edge to cloud, per token"),
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
    "energy_j_per_token": ("J", "of the whole machine, where it has counters"),
    "target_nats_per_token": ("nats", "loss of the text under the target: lower is likelier"),
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
