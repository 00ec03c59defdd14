"""`make bench-controller`: depth policies, pipelined rounds, branches and the choice of the mode, in virtual time.

Acceptance is recorded (`experiments/shared/traces/`) or, where labelled so, synthetic; times are the cost
model's. Every text is a session of its own, played by the simulator (`simulated`), and a policy starts each
without knowledge; the best fixed length is chosen afterwards from a full sweep. `--only` selects a part.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.controller.auto import measure_auto
from benchmarks.controller.guesses import measure_guesses
from benchmarks.controller.pool import fresh_processes
from benchmarks.controller.shared import measure_shared
from benchmarks.controller.simulated import (
    DRAFTS_MS,
    FORWARDS_MS,
    POINTS,
    SYNTHETIC,
    VERIFY_TOKEN_SHARE,
    Point,
    play_texts,
)
from benchmarks.controller.ways import pipelined_measures
from benchmarks.results_file import Found, write_results
from outrider.edge_client.controller.cost_model import expected_tokens, round_s, round_token_s, tokens_per_s
from outrider.edge_client.controller.depth.fixed import DEFAULT_DEPTH
from outrider.edge_client.controller.depth.optimal import OptimalDepth
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    RECORDED,
    TextTrace,
    TraceSet,
    load_traces,
    signals_of,
    synthetic_traces,
)
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged

STEP_MS = (20, 200, 20)
STEP_ROUNDS = 40  # between two steps
STEP_ALPHAS = (0.6, 0.8, 0.95)
SETTLED = 0.95  # of the tokens/s of the length a policy ends with


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums up all texts of a set. Rounds' times are linear in their lengths, so these serve every point."""

    num_rounds: int
    num_draft_tokens: int
    num_tokens: float

    def tpot_s(self, point: Point) -> float:
        """Returns the seconds a token at a point."""
        drafting_s = self.num_draft_tokens * round_token_s(point.models, point.link)
        return (self.num_rounds * round_s(0, point.models, point.link) + drafting_s) / self.num_tokens


def play_set(case: tuple[TraceSet, str, Point]) -> Totals:
    """Returns a set's synchronous rounds by a depth policy at a point, played by the simulator."""
    traces, policy, point = case
    orders = [[each] for each in traces.texts]
    played = play_texts(orders, point, ExecutionMode.SPECULATIVE, policy=policy)
    records = [each for (text,) in played for each in text.stats.rounds]
    return _totals([(each.num_accepted_tokens, each.num_draft_tokens) for each in records], traces.alpha)


def fixed_rounds(text: TextTrace, num_draft_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields (accepted, drafted) of a text's rounds of one length, the last ones no longer than what is
    left."""
    position = 0
    while position < text.num_positions:
        num_drafted = min(num_draft_tokens, text.num_positions - position - 1)
        num_accepted = min(int(text.runs[position]), num_drafted)
        yield num_accepted, num_drafted
        position += num_accepted + 1


def _totals(rounds: Sequence[tuple[int, int]], alpha: float | None) -> Totals:
    """Counts a round for the tokens that its length is expected to commit where all have one acceptance:
    luck, of which the best of 64 lengths has most, then decides nothing but what the policy sees."""
    tokens = (n + 1 if alpha is None else expected_tokens(alpha, drafted) for n, drafted in rounds)
    return Totals(len(rounds), sum(drafted for _, drafted in rounds), math.fsum(tokens))


# -------------------------------------------------------------------------------- against fixed lengths


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds one policy over all points of one set."""

    ratios: dict[Point, float]  # TPOT : the best fixed length's
    mean_lengths: dict[Point, float]

    @property
    def worst(self) -> Point:
        """Returns the point with the largest ratio."""
        return max(self.ratios, key=self.ratios.__getitem__)


class FixedSweep:
    """Plays every fixed length from 1 to 64 on one set."""

    def __init__(self, traces: TraceSet) -> None:
        self._by_length = {
            n: _totals([each for text in traces.texts for each in fixed_rounds(text, n)], traces.alpha)
            for n in range(1, MAX_DEPTH + 1)
        }

    def totals(self, num_draft_tokens: int) -> Totals:
        """Returns those of one length."""
        return self._by_length[num_draft_tokens]

    def best(self, point: Point) -> int:
        """Returns the length of the lowest TPOT at a point."""
        return min(self._by_length, key=lambda n: self._by_length[n].tpot_s(point))

    def tpot_s(self, num_draft_tokens: int, point: Point) -> float:
        """Returns the seconds a token of one length at a point."""
        return self._by_length[num_draft_tokens].tpot_s(point)

    def compare(self, totals: dict[Point, Totals]) -> Comparison:
        """Compares a policy's totals with the best length of each point."""
        return Comparison(
            {point: t.tpot_s(point) / self.tpot_s(self.best(point), point) for point, t in totals.items()},
            {point: t.num_draft_tokens / t.num_rounds for point, t in totals.items()},
        )


def compare_policies(traces: TraceSet) -> tuple[FixedSweep, dict[str, Comparison]]:
    """Returns every policy against the best fixed length. `optimal` is played at every point; the others do
    not look at times, so one point tells all."""
    sweep = FixedSweep(traces)
    cases = [(traces, "optimal", point) for point in POINTS]
    cases += [(traces, name, POINTS[0]) for name in ("ratio", "window")]
    with fresh_processes() as pool:
        *optimal, ratio, window = pool.map(play_set, cases)
    found = {
        "optimal": dict(zip(POINTS, optimal, strict=True)),
        "ratio": dict.fromkeys(POINTS, ratio),
        "window": dict.fromkeys(POINTS, window),
        "fixed": dict.fromkeys(POINTS, sweep.totals(DEFAULT_DEPTH)),
    }
    return sweep, {name: sweep.compare(totals) for name, totals in found.items()}


# ------------------------------------------------------------------------------------- after a step


def rounds_to_settle(alpha: float, forward_ms: float, draft_ms: float) -> int:
    """Returns the most rounds after a step of the link until ten in a row make, by the cost model, at least
    SETTLED of the tokens/s of the length that `optimal` ends with."""
    points = [Point(rtt_ms, forward_ms, draft_ms) for rtt_ms in STEP_MS]
    lengths = _lengths_over(points, alpha)
    models = points[0].models
    most = 0
    for number, point in list(enumerate(points))[1:]:
        here = lengths[number * STEP_ROUNDS : (number + 1) * STEP_ROUNDS]
        rates = [tokens_per_s(alpha, n, models, point.link) for n in here]
        least = SETTLED * tokens_per_s(alpha, round(statistics.median(here[-10:])), models, point.link)
        starts = range(len(rates) - 9)
        most = max(most, next((i for i in starts if min(rates[i : i + 10]) >= least), STEP_ROUNDS))
    return most


def _lengths_over(points: Sequence[Point], alpha: float) -> list[int]:
    """Returns the lengths that `optimal` asks for where each point lasts STEP_ROUNDS rounds: the policy
    alone, as links of the simulator have no steps."""
    num_positions = 20 * STEP_ROUNDS * len(points)  # of which as many as the rounds need
    text = synthetic_traces(alpha, "none", num_texts=1, num_positions=num_positions).texts[0]
    policy, position = OptimalDepth(), 0
    lengths: list[int] = []
    for point in points:
        for _ in range(STEP_ROUNDS):
            length = min(policy.next_depth(), num_positions - position - 1)
            num_accepted = min(int(text.runs[position]), length)
            policy.observe(
                RoundRecord(
                    round_id=len(lengths) + 1,
                    num_draft_tokens=length,
                    num_accepted_tokens=num_accepted,
                    draft_ms=length * point.draft_ms,
                    net_ms=point.rtt_ms,
                    verifier_ms=1e3 * point.models.verify_s(length),
                )
            )
            lengths.append(length)
            position += num_accepted + 1
    return lengths


# ------------------------------------------------------------------------------------- what it takes


def measure_cost_us() -> tuple[float, float]:
    """Returns the µs of a round's share of `optimal` (observing, planning), and of a drafted token's (the
    stop rule)."""
    policy = OptimalDepth()
    record = RoundRecord(1, 8, 4, draft_ms=4, rtt_ms=60, net_ms=50, verifier_ms=10, confidences=(0.5,) * 8)
    num_rounds, num_tokens = 2000, 8
    signals = signals_of(0.5)
    start_s = time.perf_counter()
    for _ in range(num_rounds):
        policy.observe(record)
        policy.next_depth()
        should_stop = policy.stop_rule()
    middle_s = time.perf_counter()
    assert should_stop is not None
    for _ in range(num_rounds):
        for number in range(1, num_tokens + 1):
            should_stop(0, signals, number)
    end_s = time.perf_counter()
    return (middle_s - start_s) / num_rounds * 1e6, (end_s - middle_s) / num_rounds / num_tokens * 1e6


# ------------------------------------------------------------------------------------------ report


def make_measures(found: dict[str, list[dict[str, Comparison]]], settled: int) -> list[Measure]:
    """Returns the measures of `found`: by label, recorded or synthetic, the sets' comparisons."""
    measures = []
    for policy, label in itertools.product(("optimal", "ratio", "window", "fixed"), found):
        comparisons = [policies[policy] for policies in found[label]]
        worst = max(comparisons, key=lambda c: c.ratios[c.worst])
        mean = statistics.fmean(ratio for c in comparisons for ratio in c.ratios.values())
        suffix = "" if label == "recorded" else f"_{label}"
        name = f"fixed {DEFAULT_DEPTH}" if policy == "fixed" else policy
        text = f"TPOT of {name} : best fixed length, {label}, worst, at {worst.worst} (mean {mean:.3f})"
        value = worst.ratios[worst.worst]
        if policy == "optimal":
            measures.append(judged(f"ctl.optimal{suffix}", text, value, "ratio", at_most(1.05)))
        else:
            measures.append(Measure(f"ctl.{policy}{suffix}", text, round(value, 4), "ratio"))
    text = "link step 20 -> 200 ms and back: rounds until ten within 5 % of the end's tokens/s, worst"
    measures.append(judged("ctl.step", text, settled, "rounds", at_most(10)))
    round_us, token_us = measure_cost_us()
    measures.append(
        Measure("ctl.optimal_round", "optimal: learns and plans, a round", round(round_us, 1), "us")
    )
    measures.append(Measure("ctl.optimal_token", "optimal: the stop rule, a token", round(token_us, 2), "us"))
    return measures


def details_of(sweep: FixedSweep, policies: dict[str, Comparison]) -> dict[str, str]:
    """Returns one line a point."""
    optimal = policies["optimal"]
    return {
        str(point): f"best fixed {sweep.best(point)}, optimal drafts {optimal.mean_lengths[point]:.1f}, TPOT "
        + ", ".join(f"{name} {comparison.ratios[point]:.3f}" for name, comparison in policies.items())
        for point in POINTS
    }


def print_set(traces: TraceSet, policies: dict[str, Comparison]) -> None:
    """Prints one line a policy."""
    print(f"\n{traces.name} ({traces.label}, first token stands {traces.acceptance_rate:.3f})")
    print(f"{'policy':<10}{'mean':>8}{'worst':>8}  TPOT : best fixed length, over {len(POINTS)} points")
    for name, comparison in policies.items():
        mean = statistics.fmean(comparison.ratios.values())
        print(f"{name:<10}{mean:>8.3f}{comparison.ratios[comparison.worst]:>8.3f}  at {comparison.worst}")


def measure_depth(sets: Sequence[TraceSet], details: dict[str, Any]) -> list[Measure]:
    """Measures every depth policy against the best fixed length, and after a step of the link."""
    found: dict[str, list[dict[str, Comparison]]] = {}
    details["sets"] = {}
    for traces in sets:
        sweep, policies = compare_policies(traces)
        print_set(traces, policies)
        found.setdefault(traces.label, []).append(policies)
        details["sets"][f"{traces.name} ({traces.label})"] = details_of(sweep, policies)
    points = itertools.product(STEP_ALPHAS, FORWARDS_MS, DRAFTS_MS)
    settled = {f"alpha {a:g} forward {f:g} draft {d:g} ms": rounds_to_settle(a, f, d) for a, f, d in points}
    details["rounds_to_settle"] = settled
    return make_measures(found, max(settled.values()))


def load_sets(path: Path) -> list[TraceSet]:
    """Returns recorded texts, and synthetic ones."""
    synthetic = [synthetic_traces(alpha, confidence, num_texts=8) for alpha, confidence in SYNTHETIC]
    return [*load_traces(path), *synthetic]


def _depth(arguments: argparse.Namespace) -> Found:
    details: dict[str, Any] = {"verify_token_share": VERIFY_TOKEN_SHARE}
    return measure_depth(load_sets(arguments.traces), details), details


def _ways(arguments: argparse.Namespace) -> Found:
    ahead, pipelined = pipelined_measures()
    auto, details = measure_auto(load_sets(arguments.traces))
    return [*ahead, *auto], {"pipelined": pipelined, **details}


def _guesses(arguments: argparse.Namespace) -> Found:
    measures, details = measure_guesses(load_traces(arguments.traces))
    return measures, {"guesses": details}


def _shared(_: argparse.Namespace) -> Found:
    measures, details = measure_shared()
    return measures, {"shared": details}


Part = Callable[[argparse.Namespace], Found]
PARTS: dict[str, Part] = {"depth": _depth, "ways": _ways, "guesses": _guesses, "shared": _shared}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.run", description=__doc__)
    parser.add_argument(
        "--only",
        choices=tuple(PARTS),
        help="depth policies, ways to work, speculative branches, or sessions that share a verifier",
    )
    parser.add_argument("--traces", type=Path, default=RECORDED, metavar="FILE", help="recorded acceptance")
    arguments = parser.parse_args(argv)
    parts = {arguments.only: PARTS[arguments.only]} if arguments.only else PARTS
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    start_s = time.perf_counter()
    for part in parts.values():
        its_measures, found = part(arguments)
        measures += its_measures
        details |= found
    write_results(f"controller_{arguments.only}" if arguments.only else "controller", measures, details)
    print(f"{time.perf_counter() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    run_command("bench_controller", main)
