"""Results folders out of a seeded stand-in for runs: for tests of what reads them, and to look at a report.

Times follow the usual arithmetic (a round is drafts + RTT + a forward), with noise; nothing is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.sweep.results.records import (
    BASELINES,
    MANIFEST,
    NO_LINK,
    REQUESTS,
    ROUNDS,
    SWEEP,
    CellRow,
    Comparison,
    Manifest,
    Metric,
    Prediction,
    RequestRow,
    RoundRow,
    Sweep,
    TextCheck,
    to_json,
    write_json,
)

CLOUD_ONLY, CO_LOCATED, EDGE_ONLY, FIXED = BASELINES


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell. `alpha` is the chance that a drafted token stands."""

    link: LinkProfile
    mode: str = "speculative"
    depth: int | None = 4
    policy: str = "fixed"
    alpha: float = 0.8
    variant: str = ""
    baseline: str = ""
    twin: str = ""
    method: str = "coupled"
    temperature: float = 0.8
    num_sessions: int = 1
    min_forward_ms: float = 0.0
    min_draft_ms: float = 0.0
    is_synthetic: bool = False
    on_timeout: str = "wait"
    id: str = ""

    @property
    def name(self) -> str:
        parts = [
            self.link.name,
            self.mode,
            f"{self.policy}-{self.depth}",
            self.variant,
            f"T{self.temperature:g}",
        ]
        slow = f"forward{self.min_forward_ms:g}" if self.min_forward_ms else ""
        return self.id or " ".join([p for p in [*parts, slow, "again" if self.twin else ""] if p])


@dataclass(frozen=True, slots=True)
class Times:
    draft_ms: float = 2.0
    target_ms: float = 25.0
    verify_token_ms: float = 0.4
    co_draft_ms: float = 2.0


@dataclass(slots=True)
class Folder:
    """What will be written; tests change it first."""

    manifest: Manifest
    sweep: Sweep
    requests: list[RequestRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / MANIFEST, self.manifest)
        write_json(path / SWEEP, self.sweep)
        for name, rows in ((REQUESTS, self.requests), (ROUNDS, self.rounds)):
            text = "".join(json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows)
            (path / name).write_text(text, encoding="utf-8")
        return path


def make_folder(
    plans: Sequence[Plan],
    times: Times | None = None,
    seed: int = 0,
    num_prompts: int = 4,
    repeats: int = 3,
    num_tokens: int = 48,
) -> Folder:
    """Every plan as a cell with requests, rounds, metrics, comparisons and predictions."""
    rng = np.random.default_rng(seed)
    times = times or Times()
    folder = Folder(make_manifest(), Sweep([], [], [], is_complete=True))
    tpots: dict[str, np.ndarray[Any, Any]] = {}
    for plan in plans:
        found = [
            _request(plan, times, rng, repeat, prompt, num_tokens)
            for repeat in range(repeats)
            for prompt in range(num_prompts)
        ]
        folder.requests += [request for request, _ in found]
        folder.rounds += [row for _, rows in found for row in rows]
        tpots[plan.name] = np.array([request.tpot_ms for request, _ in found])
        folder.sweep.cells.append(_cell(plan, [request for request, _ in found], rng))
        if plan.mode != EDGE_ONLY:
            folder.sweep.predictions.append(_prediction(plan, times))
    folder.sweep.comparisons.extend(_comparisons(plans, tpots, rng))
    _fill_twins(folder, tpots, rng)
    return folder


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        name="stand-in",
        commit="0123456789ab",
        is_dirty=False,
        command="edge-client bench stand-in.yaml --out results/stand-in",
        config={"name": "stand-in", "links": [{"name": "rtt1", "rtt_ms": 1.0}], "seed": 1},
        models={"draft": "sha256:11aa", "target": "sha256:22bb"},
        machine={"cpu": "a processor", "cores": 2, "kernel": "6.1", "congestion_control": "cubic"},
        seeds={"sweep": 1},
        realisation={"rtt1": {"realisation": "tun", "kernel": "6.1"}},
        calibration=[
            {"what": "rtt", "rtt_ms": 1.0, "nominal": 1.0, "measured": 1.1, "tolerance": 0.5, "share": 0.2}
        ],
        started="2025-06-01T12:00:00Z",
        finished="2025-06-01T13:00:00Z",
        versions={"onnxruntime": "1.31"},
    )
    return replace(manifest, **changes)


def matrix(rtts: Sequence[float], depths: Sequence[int] = (4,), **changes: Any) -> list[Plan]:
    """On plain links of these round-trip times: the baselines, and speculation of these depths."""
    plans = []
    for rtt in rtts:
        link = LinkProfile(name=f"rtt{rtt:g}", rtt_ms=rtt)
        plans.append(Plan(link, CLOUD_ONLY, None, baseline=CLOUD_ONLY, **changes))
        plans.append(Plan(link, CO_LOCATED, 4, baseline=CO_LOCATED, **changes))
        plans += [Plan(link, depth=n, baseline=FIXED if n == 4 else "", **changes) for n in depths]
    alone = LinkProfile(name=NO_LINK)
    edge = {name: value for name, value in changes.items() if name != "min_forward_ms"}
    return [*plans, Plan(alone, EDGE_ONLY, None, baseline=EDGE_ONLY, **edge)]


# ---------------------------------------------------------------------------------------- one request


def _request(
    plan: Plan, times: Times, rng: np.random.Generator, repeat: int, prompt: int, num_tokens: int
) -> tuple[RequestRow, list[RoundRow]]:
    name = f"{plan.name}/{repeat}/0/p{prompt}"
    pace = (
        1 + 0.04 * np.random.default_rng([repeat, prompt]).standard_normal()
    )  # a prompt's own, in all cells
    link_age_ms = 0.0  # outages begin anew with each request
    clock = times.target_ms + plan.link.rtt_ms * 1.5
    groups: list[tuple[float, list[str]]] = [(clock, ["target"])]
    rows: list[RoundRow] = []
    while sum(len(origins) for _, origins in groups) < num_tokens:
        parts, drafted, accepted = _round(plan, times, rng, pace)
        wait = _outage_wait(plan.link, link_age_ms + clock)
        clock += sum(parts.values())
        if wait and plan.on_timeout == "first_token":
            clock += 400.0
            groups.append((clock, ["fallback"]))
            continue
        clock += wait
        ending = "bonus" if accepted == drafted else "correction"
        origins = ["target"] if not drafted else ["accepted"] * accepted + [ending]
        if plan.mode == EDGE_ONLY:
            origins = ["edge_only"]
        groups.append((clock, origins))
        if drafted:
            rows.append(_round_row(plan, name, len(rows), clock, parts, drafted, accepted))
    return _request_row(plan, name, repeat, prompt, groups, rows, link_age_ms), rows


def _round(
    plan: Plan, times: Times, rng: np.random.Generator, pace: float
) -> tuple[dict[str, float], int, int]:
    target = max(times.target_ms, plan.min_forward_ms) * pace * (1 + 0.03 * abs(rng.standard_normal()))
    draft = max(times.draft_ms, plan.min_draft_ms)
    if plan.mode == EDGE_ONLY:
        return {"draft": draft}, 0, 0
    if plan.mode == CLOUD_ONLY:
        return {"forward": target + _slow(plan.link, 60)}, 0, 0
    n = plan.depth or 4
    accepted = int(np.argmin(np.append(rng.random(n) < plan.alpha, False)))
    forward = target + n * times.verify_token_ms
    if plan.mode == CO_LOCATED:
        return {"draft": n * times.co_draft_ms, "forward": forward}, n, accepted
    jitter = abs(rng.standard_normal()) * (0.4 + plan.link.jitter_ms)
    network = plan.link.rtt_ms + jitter + _slow(plan.link, 120 + 8 * n)
    queue = 0.3 * rng.random() * plan.num_sessions
    return (
        {"draft": n * draft, "network": network, "queue": queue, "forward": forward, "rest": 0.8},
        n,
        accepted,
    )


def _slow(link: LinkProfile, num_bytes: float) -> float:
    return num_bytes * 8 / (1e3 * link.up_mbit) if link.up_mbit else 0.0


def _outage_wait(link: LinkProfile, at_ms: float) -> float:
    for outage in link.outages:
        if outage.start_s * 1e3 <= at_ms < outage.end_s * 1e3:
            return outage.end_s * 1e3 - at_ms + 200.0
    return 0.0


def _round_row(
    plan: Plan,
    request: str,
    index: int,
    at_ms: float,
    parts: Mapping[str, float],
    drafted: int,
    accepted: int,
) -> RoundRow:
    network, queue, forward = parts.get("network", 0.0), parts.get("queue", 0.0), parts["forward"]
    return RoundRow(
        cell=plan.name,
        request=request,
        round=index,
        at_ms=at_ms,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        la_over_k=accepted / drafted,
        alpha_mean=plan.alpha,
        draft_ms=parts["draft"],
        rtt_ms=network and network + queue + forward,
        net_ms=network,
        queue_ms=queue,
        forward_ms=forward,
        verifier_ms=queue + forward,
        batch_size=1,
        bytes_up=40 + 8 * drafted,
        bytes_down=80,
    )


def _request_row(
    plan: Plan,
    name: str,
    repeat: int,
    prompt: int,
    groups: list[tuple[float, list[str]]],
    rows: Sequence[RoundRow],
    link_age_ms: float,
) -> RequestRow:
    times = [at for at, origins in groups for _ in origins]
    origins = [origin for _, group in groups for origin in group]
    num_fallback = origins.count("fallback")
    return RequestRow(
        cell=plan.name,
        request=name,
        repeat=repeat,
        session=0,
        prompt=f"p{prompt}",
        seed=1 + repeat,
        started_s=1.7e9,
        link_age_ms=link_age_ms,
        num_prompt_tokens=12,
        num_tokens=len(times),
        finish_reason="length",
        token_ids=list(range(len(times))),
        token_hash="00ff",
        token_times_ms=times,
        commit_times_ms=[at for at, _ in groups],
        token_origins=origins,
        ttft_ms=times[0],
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1),
        total_ms=times[-1],
        otps=1e3 * len(times) / times[-1],
        num_rounds=len(rows),
        num_draft_tokens=sum(row.num_draft_tokens for row in rows),
        num_accepted_tokens=sum(row.num_accepted_tokens for row in rows),
        verifier_calls=len(groups),
        forward_s=sum(row.forward_ms for row in rows) / 1e3,
        cloud_draft_s=0.0,
        bytes_up=48 * len(rows),
        bytes_down=80 * len(groups),
        num_unverified_tokens=num_fallback + origins.count("edge_only"),
        num_fallback_tokens=num_fallback,
        num_approximate_tokens=0,
        num_timeouts=num_fallback,
        num_reconnects=0,
        num_rebuilds=0,
        num_refusals=0,
        open_ms=plan.link.rtt_ms,
        target="stand-in (float32, cpu)",
    )


# ------------------------------------------------------------------------------------- what is made of them


def _cell(plan: Plan, rows: Sequence[RequestRow], rng: np.random.Generator) -> CellRow:
    metrics = {}
    for name, unit in (("tpot_ms", "ms"), ("ttft_ms", "ms"), ("otps", "1/s")):
        metrics[name] = _metric(np.array([getattr(row, name) for row in rows]), unit, rng)
    gaps = np.concatenate([np.diff(row.commit_times_ms) for row in rows])
    metrics["commit_gap_p95_ms"] = Metric(float(np.percentile(gaps, 95)), "ms", n=len(rows))
    is_exact = plan.mode != EDGE_ONLY
    return CellRow(
        id=plan.name,
        link=asdict(plan.link),
        realisation=NO_LINK if plan.mode == EDGE_ONLY else "tun",
        mode=plan.mode,
        depth_policy=plan.policy,
        num_speculative_tokens=plan.depth,
        method=plan.method,
        tls=False,
        temperature=plan.temperature,
        num_sessions=plan.num_sessions,
        min_forward_ms=plan.min_forward_ms,
        min_draft_ms=plan.min_draft_ms if plan.mode not in (CLOUD_ONLY, CO_LOCATED) else 0.0,
        variant=plan.variant,
        baseline=plan.baseline,
        twin=plan.twin,
        is_synthetic=plan.is_synthetic,
        labels=["synthetic"] if plan.is_synthetic else [],
        num_requests=len(rows),
        num_errors=0,
        metrics=metrics,
        texts=TextCheck(is_exact, len(rows), len(rows), share_equal=1.0) if is_exact else TextCheck(False),
    )


def _metric(values: np.ndarray[Any, Any], unit: str, rng: np.random.Generator) -> Metric:
    means = values[rng.integers(0, len(values), (200, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Metric(float(values.mean()), unit, float(low), float(high), len(values))


def _comparisons(
    plans: Sequence[Plan], tpots: Mapping[str, np.ndarray[Any, Any]], rng: np.random.Generator
) -> list[Comparison]:
    """Against the fastest baseline of each kind on the same link, with the same slow-downs."""
    found = []
    for plan in plans:
        for kind in BASELINES:
            rivals = [each for each in plans if each.baseline == kind and _is_setting_of(each, plan)]
            if plan.mode == kind or not rivals:
                continue
            rival = min(rivals, key=lambda each: tpots[each.name].mean())
            if rival.name != plan.name:
                ratio = _ratio(tpots[rival.name], tpots[plan.name], rng)
                n = len(tpots[plan.name])
                found.append(Comparison(plan.name, rival.name, kind, "tpot_ms", *ratio, n))
    return found


def _is_setting_of(baseline: Plan, plan: Plan) -> bool:
    is_alone = baseline.mode == EDGE_ONLY
    same_link = is_alone or (baseline.link, baseline.min_forward_ms) == (plan.link, plan.min_forward_ms)
    return same_link and baseline.temperature == plan.temperature


def _ratio(
    over: np.ndarray[Any, Any], under: np.ndarray[Any, Any], rng: np.random.Generator
) -> tuple[float, float, float]:
    picks = rng.integers(0, len(over), (200, len(over)))
    low, high = np.percentile(over[picks].mean(axis=1) / under[picks].mean(axis=1), [2.5, 97.5])
    return float(over.mean() / under.mean()), float(low), float(high)


def _prediction(plan: Plan, times: Times) -> Prediction:
    target = max(times.target_ms, plan.min_forward_ms)
    value = target
    if plan.depth:
        expected = sum(plan.alpha**i for i in range(plan.depth + 1))
        draft = times.co_draft_ms if plan.mode == CO_LOCATED else max(times.draft_ms, plan.min_draft_ms)
        network = 0.0 if plan.mode == CO_LOCATED else plan.link.rtt_ms
        value = (plan.depth * (draft + times.verify_token_ms) + target + network) / expected
    return Prediction(plan.name, "tpot_ms", value, "ms", "costmodel")


def _fill_twins(folder: Folder, tpots: Mapping[str, np.ndarray[Any, Any]], rng: np.random.Generator) -> None:
    for cell in list(folder.sweep.cells):
        if cell.twin:
            speedup, low, high = _ratio(tpots[cell.twin], tpots[cell.id], rng)
            measure = {"twin": cell.twin, "tpot_ms": {"speedup": speedup, "low": low, "high": high}}
            cell.a_a.update(measure)
