"""`make bench-bank`: the controller's constants, fitted on some pairs of the bank and judged on the others.

For each pair, every constant takes the value that is best by itself over the cases of all *other* pairs (of a
grid, by the power mean of `bank.power_mean`), and the constants so chosen are played on the pair that was left
out. Beside it stand the constants that ship, on the same cases. All of it is virtual time over recorded
acceptance; in every second case forwards vary, as they do on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.controller.bank import DEFAULT, OPTIMAL, Case, Rivals, draw_cases, power_mean, rivals_of
from benchmarks.controller.pool import fresh_processes
from benchmarks.results_file import Found, write_results
from outrider.edge_client.controller.acceptance_posterior import usual_prior
from outrider.edge_client.controller.settings import SETTINGS
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged

Changes = Mapping[str, Any]

# Constant, or constants that change together → the values tried beside the shipped one.
GRID: Mapping[tuple[str, ...], Sequence[tuple[Any, ...]]] = {
    ("usual_accepted_tokens", "usual_rejected_tokens"): [(16.0, 4.0), (8.0, 2.0), (4.0, 1.0), (3.0, 2.0)],
    ("usual_share",): [(0.95,), (0.8,)],
    ("prompt_weight",): [(0.0,), (0.25,), (0.5,), (0.75,), (1.0,)],
    ("change_probability",): [(0.003,), (0.01,), (0.02,), (0.04,)],
    ("first_gain_share",): [(0.0,), (0.1,), (0.2,), (0.4,)],
    ("min_gain_share",): [(0.0,), (0.03,), (0.06,)],
    ("decision_interval_tokens",): [(8,), (16,), (32,)],
    ("prior_weight_tokens",): [(4.0,), (10.0,), (20.0,)],
    ("prior_reject_slope",): [(0.3,), (0.6,)],
    ("branch_prior_hit_share",): [(0.15,), (0.3,)],
    ("pipelined_excess_share",): [(0.0,), (0.03,), (0.08,)],
    ("acceptance_memory_per_round",): [(0.95,), (0.99,)],
    ("overall_weight_tokens",): [(4.0,), (16.0,)],
    ("neighbour_share", "max_neighbour_tokens"): [(0.5, 15.0), (0.9, 60.0)],
    ("carried_calibration_share",): [(0.0,), (1.0,)],
    ("reject_slope_weight_tokens", "min_doubt"): [(0.5, 0.02), (4.0, 0.1)],
    ("max_remembered_sequences",): [(3,)],
    ("num_prompt_choices", "enough_judged_tokens"): [(8, 16), (16, 64)],
    ("num_rtt_samples",): [(5,), (11,)],
    ("num_verify_samples",): [(9,), (25,)],
    ("token_share_of_verify", "token_share_weight_tokens"): [(0.15, 12.0), (0.3, 4.0), (0.3, 36.0)],
    ("stated_weight_tokens",): [(30.0,), (300.0,)],
    ("token_share_of_target",): [(0.015,), (0.06,)],
    ("draft_call_s", "draft_weight_tokens"): [(0.0, 12.0), (0.0003, 4.0), (0.0003, 36.0)],
    ("round_overhead_s",): [(0.0001,), (0.0006,)],
    ("stream_overhead_s",): [(-0.0001,), (0.0002,), (0.0004,)],
    ("max_stream_overhead_s",): [(0.0015,), (0.006,)],
    ("stream_overhead_memory",): [(0.25,), (0.75,)],
    ("stream_overhead_weight_samples",): [(2,), (8,)],
    ("rounds_a_stream_sample",): [(1,), (8,)],
    ("branch_memory_per_rejection", "branch_prior_weight_rejections"): [(0.95, 4.0), (0.99, 16.0)],
    ("branch_spared_share",): [(0.4,), (0.8,)],
    ("gap_prior_weight_tokens", "gap_memory_per_token"): [(4.0, 0.99), (16.0, 0.998)],
    ("min_branch_probability",): [(0.02,), (0.1,)],
    ("horizon_tokens",): [(128,), (512,)],
    ("time_ratio_weight_rounds",): [(4.0,), (16.0,)],
    ("longest_gap_rounds",): [(3.0,), (8.0,)],
    ("min_rounds",): [(1,), (4,)],
    ("dense_decisions",): [(8,), (32,)],
    ("decision_every",): [(1,), (8,)],
    ("length_memory_per_round",): [(0.7,), (0.9,)],
    ("min_round_probability", "probe_useless_every_tokens"): [(0.01, 32), (0.05, 32), (0.02, 16), (0.02, 64)],
    ("probe_every_tokens", "max_probe_share"): [(2, 0.5), (8, 0.5), (4, 0.25)],
    ("stream_sample_tokens",): [(2,), (8,)],
    ("rtt_probe_interval_s",): [(0.5,), (2.0,)],
}
# Constants that are not in the grid, by what they rest on instead.
NOT_FITTED: Mapping[str, Sequence[str]] = {
    "measured rates, and the bins of such": (
        "confidence_bins",
        "gap_bins_nats",
        "prior_reject_by_gap",
        "prior_runner_up_by_gap",
    ),
    "trees, which the bank's cases leave off (make bench-trees)": (
        "second_choice_share",
        "later_choice_share",
        "min_tree_gain_share",
        "tree_base_tokens",
        "tree_node_share",
        "tree_row_ratio",
        "tree_yield_weight_tokens",
        "tree_excess_weight_rounds",
    ),
    "the time of plans and decisions, which take none in virtual time": (
        "dense_rounds",
        "rounds_a_plan",
        "short_round_ms",
        "cost_tolerance_share",
        "min_alpha_probability",
    ),
    "processors that edge and verifier share, in real processes": (
        "max_link_work_s",
        "max_shared_delay_s",
        "min_stream_share",
    ),
    "several sessions of one verifier": (
        "min_sharing_sessions",
        "shared_wait_steps",
        "shared_gain_share",
        "shared_first_gain_share",
    ),
    "a range or a limit": ("lengths_tried", "max_in_flight", "max_unanswered", "min_rtt_s"),
}
MIN_GAIN = 0.0005  # of the power mean, below which the shipped value stays
CASES_A_PAIR, SEED = 2, 3  # a quarter of an hour on two cores
MEAN_TARGET, WORST_TARGET = 1 / 0.97, 1 / 0.90


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds the seconds a token of every case with some constants changed."""

    changes: Changes
    seconds: Sequence[float]


def use(changes: Changes) -> None:
    """Changes constants of this process, for what it plays from here on."""
    for name, value in changes.items():
        object.__setattr__(SETTINGS, name, value)
    usual_prior.cache_clear()


def play(changes: Changes, cases: Sequence[Case], edge: Mapping[str, Any] = DEFAULT) -> list[float]:
    """Returns the seconds a token of each case, played in processes whose constants are changed."""
    with fresh_processes(use, changes) as pool:
        return list(pool.map(_play_one, cases, itertools.repeat(edge), chunksize=4))


def _play_one(case: Case, edge: Mapping[str, Any]) -> float:
    return case.play(edge)


def all_changes() -> list[dict[str, Any]]:
    """Returns each single change of the grid from what ships."""
    found = []
    for names, values in GRID.items():
        shipped = tuple(getattr(SETTINGS, name) for name in names)
        found += [dict(zip(names, each, strict=True)) for each in values if each != shipped]
    return found


def choose(trials: Iterable[Trial], shipped: Trial, loss: Callable[[Sequence[float]], float]) -> Changes:
    """Returns the changes that are each best for their constants by `loss`, combined."""
    best: dict[frozenset[str], tuple[float, Changes]] = {}
    before = loss(shipped.seconds)
    for trial in trials:
        names, after = frozenset(trial.changes), loss(trial.seconds)
        if after < min(before - MIN_GAIN, best.get(names, (before, {}))[0]):
            best[names] = after, trial.changes
    return {name: value for _, changes in best.values() for name, value in changes.items()}


@dataclass(frozen=True, slots=True)
class Judged:
    """Holds ratios to the best fixed setting and to cloud-only, case by case."""

    to_best: Sequence[float]
    to_cloud: Sequence[float]

    @classmethod
    def of(cls, seconds: Sequence[float], rivals: Sequence[Rivals]) -> Judged:
        """Returns those of some cases."""
        pairs = list(zip(seconds, rivals, strict=True))
        return cls(
            [each / rival.best_s for each, rival in pairs],
            [each / rival.cloud_only_s for each, rival in pairs],
        )

    def __str__(self) -> str:
        best, cloud = self.to_best, self.to_cloud
        return f"{statistics.fmean(best):.3f}, {max(best):.3f} of the best; {max(cloud):.3f} of cloud-only"


def fit_and_judge(cases: Sequence[Case]) -> Found:
    """Plays all of it and returns the measures."""
    begin_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin_s:5.0f} s  {text}", flush=True)

    rivals = _rivals(cases)
    say(f"{len(cases)} cases, every fixed setting")
    shipped = Trial({}, play({}, cases))
    say(f"shipped: {Judged.of(shipped.seconds, rivals)}")
    trials = []
    for changes in all_changes():
        trials.append(Trial(changes, play(changes, cases)))
        say(f"{_text(changes)}: {Judged.of(trials[-1].seconds, rivals)}")
    chosen, left_out = dict[str, Changes](), dict[int, float]()
    for pair in dict.fromkeys(case.pair for case in cases):
        others = [number for number, case in enumerate(cases) if case.pair != pair]
        own = [number for number, case in enumerate(cases) if case.pair == pair]

        def loss(seconds: Sequence[float], others: Sequence[int] = others) -> float:
            return power_mean([seconds[number] / rivals[number].best_s for number in others])

        chosen[pair] = choose(trials, shipped, loss)
        left_out |= zip(own, play(chosen[pair], [cases[number] for number in own]), strict=True)
        judged_own = Judged.of([left_out[number] for number in own], [rivals[number] for number in own])
        say(f"without {pair}: {_text(chosen[pair])}: {judged_own}")
    optimal = play({}, cases, OPTIMAL)
    judgements = {
        "shipped": Judged.of(shipped.seconds, rivals),
        "left_out": Judged.of([left_out[number] for number in range(len(cases))], rivals),
    }
    say(f"left out: {judgements['left_out']}")
    to_length = [each / rival.best_length_s for each, rival in zip(optimal, rivals, strict=True)]
    return _measures(cases, judgements, to_length), _details(cases, rivals, shipped, judgements, chosen)


def _rivals(cases: Sequence[Case]) -> list[Rivals]:
    with fresh_processes() as pool:
        return list(pool.map(rivals_of, cases, chunksize=2))


def _text(changes: Changes) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "as shipped"


_WHAT = {
    "shipped": "constants that ship",
    "left_out": "constants fitted on the other pairs",
}


def _measures(
    cases: Sequence[Case], judgements: Mapping[str, Judged], to_length: Sequence[float]
) -> list[Measure]:
    measures = []
    for name, found in judgements.items():
        suffix = "" if name == "shipped" else f"_{name}"
        what = _WHAT[name]
        worst = max(range(len(cases)), key=found.to_best.__getitem__)
        mean_text = (
            f"TPOT of the defaults : best fixed setting, {len(cases)} cases of the bank, in every second one "
            f"forwards vary, {what}, mean"
        )
        measures += [
            judged(
                f"ctl.bank{suffix}", mean_text, statistics.fmean(found.to_best), "ratio", at_most(MEAN_TARGET)
            ),
            judged(
                f"ctl.bank_worst{suffix}",
                f"the same, worst: {cases[worst]}",
                found.to_best[worst],
                "ratio",
                at_most(WORST_TARGET),
            ),
            judged(
                f"ctl.bank_cloud{suffix}",
                "the same : cloud-only, worst",
                max(found.to_cloud),
                "ratio",
                at_most(WORST_TARGET),
            ),
        ]
    text = (
        f"TPOT of --depth-policy optimal : best fixed length, worst (mean {statistics.fmean(to_length):.3f})"
    )
    measures.append(judged("ctl.bank_optimal", text, max(to_length), "ratio", at_most(1 / 0.95)))
    return measures


def _details(
    cases: Sequence[Case],
    rivals: Sequence[Rivals],
    shipped: Trial,
    judgements: Mapping[str, Judged],
    chosen: Mapping[str, Changes],
) -> dict[str, Any]:
    rows = zip(cases, rivals, shipped.seconds, *(each.to_best for each in judgements.values()), strict=True)
    lines = {
        str(case): f"best {rival.best}, {1e3 * rival.best_s:.2f} ms a token, shipped {1e3 * own_s:.2f} "
        f"({ratio:.3f}), left out {left_out:.3f}"
        for case, rival, own_s, ratio, left_out in rows
    }
    without = {pair: _text(changes) for pair, changes in chosen.items()}
    return {"chosen_without": without, "not_fitted": NOT_FITTED, "cases": lines}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.fit", description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES_A_PAIR, metavar="N", help="of each pair")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="that draws them")
    parser.add_argument("--try", dest="tried", metavar="JSON", help="only play these constants")
    arguments = parser.parse_args(argv)
    drawn = draw_cases(arguments.cases, arguments.seed)
    cases = [replace(case, is_busy=number % 2 == 1) for number, case in enumerate(drawn)]
    if arguments.tried is not None:
        print(Judged.of(play(json.loads(arguments.tried), cases), _rivals(cases)))
        return 0
    measures, details = fit_and_judge(cases)
    write_results("controller_bank", measures, {"seed": arguments.seed, **details})
    return 0


if __name__ == "__main__":
    run_command("bench_bank", main)
