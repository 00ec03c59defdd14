"""The simulator against what it promises, as measures: `exp.sim_error`, `exp.sim_10k`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.results_file import ROOT, Found
from outrider.edge_client.config.run_config import RunConfig, run_config
from outrider.experiments.links.base import LinkRealisation, create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.measure import (
    NUM_POSITIONS,
    NUM_TEXTS,
    THINK,
    VERIFIER_FLAGS,
    Rounds,
    collect,
    edge_times,
    middle,
    think_times,
    verifier_times,
)
from outrider.experiments.simulator.parts.drafts import KnownText
from outrider.experiments.simulator.parts.edges import Ask, RequestLog
from outrider.experiments.simulator.parts.times import SystemTimes
from outrider.experiments.simulator.replay import RealRequest, ReplayEdges, learn_texts, tokens_per_s
from outrider.experiments.simulator.run import Played, play
from outrider.experiments.simulator.shards import num_parts, play_parts

RTTS_MS = (10, 50, 150)
SESSIONS = (1, 4)
NUM_TOKENS = 48
# Of the real edges and the simulated ones.
EDGE: dict[str, Any] = {
    "on_timeout": "wait",
    "mode": "speculative",
    "pipeline": "off",
    "num_speculative_tokens": 4,
}


@dataclass(slots=True)
class Compared:
    """Holds one setting: real repeats, and the one simulated run. TPOT in ms, tokens a second of all
    sessions."""

    rtt_ms: float
    num_sessions: int
    tpot_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    simulated_tpot_ms: float = 0.0
    simulated_tokens_per_s: float = 0.0
    link_facts: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[float, float]:
        """Returns simulated : real - 1, of TPOT and of tokens a second; the median of the real repeats."""
        return (
            self.simulated_tpot_ms / statistics.median(self.tpot_ms) - 1,
            self.simulated_tokens_per_s / statistics.median(self.tokens_per_s) - 1,
        )

    @property
    def spreads(self) -> tuple[float, float]:
        """Returns the A/A: (largest - smallest) : mean of the real repeats."""
        return tuple(  # type: ignore[return-value]
            (max(values) - min(values)) / statistics.fmean(values)
            for values in (self.tpot_ms, self.tokens_per_s)
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the setting's figures."""
        tpot_error, rate_error = self.errors
        return {
            "rtt_ms": self.rtt_ms,
            "num_sessions": self.num_sessions,
            "tpot_ms": [round(value, 3) for value in self.tpot_ms],
            "tokens_per_s": [round(value, 2) for value in self.tokens_per_s],
            "simulated_tpot_ms": round(self.simulated_tpot_ms, 3),
            "simulated_tokens_per_s": round(self.simulated_tokens_per_s, 2),
            "tpot_error": round(tpot_error, 4),
            "tokens_per_s_error": round(rate_error, 4),
            "spreads": [round(spread, 4) for spread in self.spreads],
            "link": self.link_facts,
        }


def compare(is_quick: bool = False, realisation: str = "tun") -> list[Compared]:
    """Measures times, runs and simulates every setting; repeats take turns. Raises `UsageError` where this
    machine cannot make such links."""
    cells = [Compared(rtt_ms, sessions) for sessions in SESSIONS for rtt_ms in RTTS_MS]
    with running_verifier(*VERIFIER_FLAGS) as verifier:
        texts = learn_texts(verifier.address, NUM_TEXTS, NUM_POSITIONS)
        edges = ReplayEdges(texts, THINK, _settings())
        edges.run(verifier.address, 1, len(texts))  # warms up
        links = create_realisation(realisation)
        turns: list[list[Rounds]] = []
        for _ in range(3 if is_quick else 5):
            turns.append(collect(edges, verifier.address))
            for cell in cells:
                _run(cell, edges, links, verifier.address, requests_each=2)
        times = SystemTimes(
            middle([verifier_times(turn) for turn in turns]),
            middle([edge_times(turn, verifier.address) for turn in turns]),
            middle([think_times(turn) for turn in turns]),
        )
    for cell in cells:
        _simulate(cell, texts, times, requests_each=2)
    return cells


def worst(cells: Sequence[Compared]) -> tuple[float, float]:
    """Returns the largest error of all, whatever its sign, and the largest spread."""
    errors = [abs(error) for cell in cells for error in cell.errors]
    return max(errors), max(spread for cell in cells for spread in cell.spreads)


def _settings() -> RunConfig:
    return run_config(max_new_tokens=NUM_TOKENS, **EDGE)


def _run(
    cell: Compared, edges: ReplayEdges, links: LinkRealisation, verifier: str, requests_each: int
) -> None:
    with links.open(LinkProfile(f"rtt-{cell.rtt_ms:g}", rtt_ms=cell.rtt_ms), verifier) as link:
        requests: list[RealRequest] = edges.run(link.address, cell.num_sessions, requests_each)
        cell.link_facts = link.facts()
    cell.tpot_ms.append(1e3 * statistics.fmean(each.tpot_s for each in requests))
    cell.tokens_per_s.append(tokens_per_s(requests))


def _simulate(cell: Compared, texts: Sequence[KnownText], times: SystemTimes, requests_each: int) -> None:
    group = {
        "count": cell.num_sessions,
        "link": {"rtt_ms": cell.rtt_ms},
        "edge": EDGE,
    }
    system = load_system({"times": dataclasses.asdict(times), "edges": [group], "seconds": 600.0})
    asks = [
        [_ask(texts, (session + number) % len(texts)) for number in range(requests_each)]
        for session in range(cell.num_sessions)
    ]
    logs: list[RequestLog] = []
    traces = [known.trace for known in texts]
    play(system, on_request=logs.append, asks=asks, traces=traces)
    cell.simulated_tpot_ms = 1e3 * statistics.fmean(_tpots_s(logs))
    start_s = min(log.start_s for log in logs)
    last_s = max(log.commits[-1][0] for log in logs)
    cell.simulated_tokens_per_s = sum(log.num_tokens for log in logs) / (last_s - start_s)


def _ask(texts: Sequence[KnownText], place: int) -> Ask:
    return Ask(len(texts[place].prompt_ids), NUM_TOKENS, text=place)


def _tpots_s(logs: Sequence[RequestLog]) -> Iterator[float]:
    for log in logs:
        assert log.tpot_s is not None, f"a simulated request failed: {log.error}"
        yield log.tpot_s


SYSTEMS = ROOT / "experiments" / "simulator" / "systems"
TEN_THOUSAND = SYSTEMS / "ten-thousand.yaml"
MIN_ROUNDS, MAX_WALL_S = 500_000, 120.0


def exp_sim_error(is_quick: bool = False) -> Found:
    """Compares real edges over a real link with the simulator; see `benchmarks.simulator_checks`."""
    from benchmarks.simulator_checks import compare, worst

    cells = compare(is_quick)
    error, noise = worst(cells)
    text = (
        "simulator : real runs over TUN, RTT 10/50/150 ms, 1 and 4 sessions, worst of TPOT and tokens/s; "
        f"real repeats differ by up to {100 * noise:.1f} % among themselves"
    )
    measure = judged("exp.sim_error", text, 100 * error, "%", at_most(10))
    return [measure], {"cells": [cell.as_json() for cell in cells]}


def exp_sim_10k(is_quick: bool = False) -> Found:
    """Times a system of 10,000 edges; `is_quick` plays a tenth of them, and judges nothing."""
    system = load_system(TEN_THOUSAND)
    if is_quick:
        system = system.with_edges(system.num_edges // 10)
    played = play_parts(system)
    total = figures_of(played).total
    parts = num_parts(system)
    text = (
        f"{total.num_edges} edges, {played.seconds:g} virtual s, {_num_rounds(played)} rounds, {parts} cores"
    )
    details = {
        "num_rounds": _num_rounds(played),
        "us_a_round": round(1e6 * played.wall_s / _num_rounds(played), 1),
        "num_parts": parts,
        "total": asdict(total),
    }
    if is_quick:
        return [Measure("exp.sim_10k", text, round(played.wall_s, 1), "s")], details
    wording = f"<= {MAX_WALL_S:g}, >= {MIN_ROUNDS} rounds"
    is_enough = _num_rounds(played) >= MIN_ROUNDS and total.num_edges >= 10_000
    target = (wording, lambda wall_s: is_enough and wall_s <= MAX_WALL_S)
    return [judged("exp.sim_10k", text, played.wall_s, "s", target)], details


def _num_rounds(played: Played) -> int:
    return sum(verifier.num_rounds for verifier in played.verifiers)
