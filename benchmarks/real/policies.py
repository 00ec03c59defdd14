"""Policies in real processes, at points drawn by a seed: the defaults, `--depth-policy optimal`, `--pipeline auto`.

At each point virtual time names candidates among the fixed settings (mode, draft length, pipelined or not); then one
edge process runs them and the policies in turns. Every second turn's runs choose the best candidate, the others
compare. What a point found is written before the next one begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.real.cases import (
    CLOUD_ONLY,
    DEFAULT,
    OPTIMAL,
    PIPELINE_AUTO,
    PIPELINE_ON,
    PIPELINED,
    SYNCHRONOUS,
    cases_at,
    comparisons,
    name_candidates,
)
from benchmarks.real.judging import JudgedPoint, a_a_ratio, judge, next_rerun
from benchmarks.real.points import PointOptions, RealPoint, draw_points
from benchmarks.real.running import describe_case, describe_stretches, find_pair, run_point
from benchmarks.real.virtual import measured_times, virtual_ms
from benchmarks.results_file import Found, measured_commit
from outrider.experiments.shared.results import Measure, at_least, at_most, judged

NUM_SHOWN_RUNS = 6  # of the default, stretch by stretch
MAX_VIRTUAL_TOKENS = 100  # of texts that only rank lengths
NEVER_SLOWER = {400: 0.97, 100: 0.95, 32: 0.90}

Points = dict[int, dict[str, Any]]
"""What is known of each point, by its number, as JSON takes it."""


def run(options: PointOptions, before: Mapping[str, Any]) -> Iterator[Found]:
    """Yields what all points so far come to, after each one. `before` is what the stage found the last time."""
    wanted = options.numbers or tuple(range(1, options.num_points + 1))
    points = {each.number: each for each in draw_points(max(wanted))}
    for number in wanted:
        find_pair(points[number])
    known = {int(key): each for key, each in before.get("points", {}).items()} if options.numbers else {}
    for number in wanted:
        known[number] = measure_point(points[number])
        yield report(known)
    while (
        again := next_rerun([_judged(each) for number, each in known.items() if number in wanted])
    ) is not None:
        num_reruns = known[again]["num_reruns"] + 1
        nearest = min(known[again], measure_point(points[again]), key=_a_a_error)
        known[again] = {**nearest, "num_reruns": num_reruns}
        yield report(known)


def _a_a_error(found: Mapping[str, Any]) -> float:
    return abs(float(found["a_a"]) - 1)


def measure_point(point: RealPoint) -> dict[str, Any]:
    """Returns what is found at a point, as JSON takes it."""
    print(f"point {point.number}: {point}", flush=True)
    begin_s = time.monotonic()
    short = replace(point, num_tokens=min(point.num_tokens, MAX_VIRTUAL_TOKENS))
    times = measured_times(point)
    virtual = virtual_ms(short, (*SYNCHRONOUS, *PIPELINED), times)
    candidates = name_candidates(virtual)
    policies = (DEFAULT, CLOUD_ONLY, OPTIMAL, PIPELINE_AUTO, PIPELINE_ON)
    virtual = {name: ms for name, ms in virtual.items() if name in candidates.names}
    virtual |= virtual_ms(point, policies, times)
    cases, compared = cases_at(candidates, point.is_near), comparisons(candidates, point.is_near)
    runs = run_point(point, cases, compared)
    outcomes = {each.id: judge(runs.ms, each) for each in compared}
    found = {
        "point": str(point),
        "settings": asdict(point),
        **measured_commit(),
        "ratios": {id: round(each.ratio, 4) for id, each in outcomes.items()},
        "against": {id: each.chosen for id, each in outcomes.items()},
        "a_a": round(a_a_ratio(runs.ms), 4),
        "num_turns": runs.num_turns,
        "num_reruns": 0,
        "num_other_texts": runs.num_other_texts,
        "load_average": [min(runs.load_averages), max(runs.load_averages)],
        "seconds": round(time.monotonic() - begin_s),
        "realisation": runs.realisation,
        "cases": {name: describe_case(runs.seen[name], ms) for name, ms in runs.ms.items()},
        "virtual_ms": virtual,
        "virtual_times": times,
        "default": [describe_stretches(each) for each in runs.seen[DEFAULT.name][:NUM_SHOWN_RUNS]],
    }
    print(f"  {_summary(found)}", flush=True)
    return found


def _summary(found: Mapping[str, Any]) -> str:
    ratios = ", ".join(
        f"{id} {ratio:.3f} (of {found['against'][id]})" for id, ratio in found["ratios"].items()
    )
    return f"{ratios}; A/A {found['a_a']:.3f}, {found['num_turns']} turns, {found['seconds']} s"


def _judged(found: Mapping[str, Any]) -> JudgedPoint:
    settings, ratios = found["settings"], dict(found["ratios"])
    ratios[f"never_slower_{settings['num_tokens']}"] = ratios.pop("never_slower")
    where = "near" if settings["rtt_ms"] == 0 else "far"
    ratios[f"pipeline_auto_{where}"] = ratios.pop("pipeline_auto")
    return JudgedPoint(settings["number"], ratios, found["a_a"], found["num_reruns"])


def report(known: Points) -> Found:
    """Returns the measures of the points known so far, and the points."""
    points = [_judged(known[number]) for number in sorted(known)]
    of = f"{len(points)} points"
    auto = [point.ratios["auto"] for point in points]
    mean = judged(
        "real.auto", f"default : best fixed setting, tokens/s, mean of {of}", statistics.fmean(auto), "ratio",
        at_least(0.97),
    )  # fmt: skip
    worst = [
        _worst(points, "auto", "real.auto_worst", "the same", 0.90),
        *(
            _worst(points, f"never_slower_{n}", f"real.never_slower_{n}", f"default : cloud-only, texts of {n}", bound)
            for n, bound in NEVER_SLOWER.items()
        ),
        _worst(points, "optimal", "real.optimal", "--depth-policy optimal : best fixed length", 0.95),
        _worst(points, "pipeline_auto_near", "real.pipeline_auto_near", "--pipeline auto : off, loopback", 0.98),
        _worst(points, "pipeline_auto_far", "real.pipeline_auto", "--pipeline auto : best of on and off, links", 0.95),
    ]  # fmt: skip
    num_other = sum(found["num_other_texts"] for found in known.values())
    same = judged(
        "real.other_texts", f"texts that differ from cloud-only's, {of}", num_other, "texts", at_most(0)
    )
    measures = [mean, *(each for each in worst if each is not None), same]
    return measures, {"points": {str(number): known[number] for number in sorted(known)}}


def _worst(points: Sequence[JudgedPoint], name: str, id: str, what: str, bound: float) -> Measure | None:
    """Returns the lowest of a ratio; None where no point has it."""
    having = [point for point in points if name in point.ratios]
    if not having:
        return None
    worst = min(having, key=lambda point: point.ratios[name])
    text = f"{what}: worst, at point {worst.number} (A/A {worst.a_a:.3f})"
    return judged(id, text, worst.ratios[name], "ratio", at_least(bound))
