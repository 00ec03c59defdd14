"""`make bench-bank`: the controller's constants, fitted on some pairs of the bank and judged on the others.

For each pair, every constant takes the value that is best by itself over the cases of all *other* pairs (of a
grid, by the power mean of `bank.power_mean`), and the constants so chosen are played on the pair that was left
out. Beside it stand the constants that ship, on the same cases. All of it is virtual time over recorded
acceptance.
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
    ("decision_every",): [(1,), (4,)],
}
MIN_GAIN = 0.0005  # of the power mean, below which the shipped value stays
CASES_A_PAIR, SEED = 14, 2
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
        "busy": judge_cases(_on_a_busy_machine(cases)),
    }
    say(f"forwards vary: {judgements['busy']}")
    to_length = [each / rival.best_length_s for each, rival in zip(optimal, rivals, strict=True)]
    return _measures(cases, judgements, to_length), _details(cases, rivals, shipped, judgements, chosen)


def judge_cases(cases: Sequence[Case], changes: Changes | None = None) -> Judged:
    """Plays every fixed setting, and the defaults with changed constants (None: those that ship)."""
    return Judged.of(play(changes or {}, cases), _rivals(cases))


def _rivals(cases: Sequence[Case]) -> list[Rivals]:
    with fresh_processes() as pool:
        return list(pool.map(rivals_of, cases, chunksize=2))


def _on_a_busy_machine(cases: Sequence[Case]) -> list[Case]:
    return [replace(case, is_busy=True) for case in cases]


def _text(changes: Changes) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "as shipped"


_WHAT = {
    "shipped": "constants that ship",
    "left_out": "constants fitted on the other pairs",
    "busy": "forwards that vary",
}


def _measures(
    cases: Sequence[Case], judgements: Mapping[str, Judged], to_length: Sequence[float]
) -> list[Measure]:
    measures = []
    for name, found in judgements.items():
        suffix = "" if name == "shipped" else f"_{name}"
        what = _WHAT[name]
        worst = max(range(len(cases)), key=found.to_best.__getitem__)
        mean_text = f"TPOT of the defaults : best fixed setting, {len(cases)} cases of the bank, {what}, mean"
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
        f"({ratio:.3f}), left out {left_out:.3f}, busy {busy:.3f}"
        for case, rival, own_s, ratio, left_out, busy in rows
    }
    return {"chosen_without": {pair: _text(changes) for pair, changes in chosen.items()}, "cases": lines}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.fit", description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES_A_PAIR, metavar="N", help="of each pair")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="that draws them")
    parser.add_argument("--try", dest="tried", metavar="JSON", help="only play these constants")
    parser.add_argument(
        "--busy", action="store_true", help="only play what ships, or --try, where forwards vary"
    )
    arguments = parser.parse_args(argv)
    cases = draw_cases(arguments.cases, arguments.seed)
    if arguments.busy:
        cases = _on_a_busy_machine(cases)
    if arguments.busy or arguments.tried is not None:
        print(judge_cases(cases, json.loads(arguments.tried or "{}")))
        return 0
    measures, details = fit_and_judge(cases)
    write_results("controller_bank", measures, {"seed": arguments.seed, **details})
    return 0


if __name__ == "__main__":
    run_command("bench_bank", main)
