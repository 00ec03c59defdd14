"""`make bench-controller ARGS="--only ways_real"`: the ways to work over real links, with real processes.

Three points of the grid that `auto` is judged at in virtual time: one where pipelined rounds are the best,
one where the target's own stream is, one where both are about as fast. The embedded pair, stretched; every
case takes its turn prompt by prompt, synchronous rounds twice, for the A/A ratio. Texts must be equal.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.controller.grid import Point
from benchmarks.matrix import best_realisation
from outrider.common.errors import OutriderError
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged

POINTS = (Point(20, 70, 12), Point(60, 30, 12), Point(200, 30, 12))
OPTIMAL = ("--depth-policy", "optimal")
CASES = {
    "cloud-only": ("--mode", "cloud-only"),
    "synchronous": OPTIMAL,
    "pipelined": (*OPTIMAL, "--pipeline", "on"),
    "auto": (*OPTIMAL, "--mode", "auto"),
    "synchronous again": OPTIMAL,
}
FIXED = ("cloud-only", "synchronous", "pipelined")


def measure_ways_real(
    realisation_name: str | None = None, *, is_quick: bool = False
) -> tuple[list[Measure], dict[str, Any]]:
    """Measures `ctl.auto_real`. Raises `OutriderError` where texts differ."""
    realisation = create_realisation(realisation_name) if realisation_name else best_realisation()
    num_prompts, num_new = (1, 64) if is_quick else (4, 256)
    prompts = [prompt.text for prompt in load_prompts(None, num_prompts)]
    found: dict[Point, dict[str, float]] = {}
    for point in POINTS:
        forward = ("--min-forward-ms", f"{point.forward_ms:g}")
        flags = ("--max-new-tokens", str(num_new), "--min-draft-ms", f"{point.draft_ms:g}")
        profile = LinkProfile(f"rtt{point.rtt_ms:g}", rtt_ms=point.rtt_ms)
        with (
            running_verifier("--log-level", "warning", *forward) as verifier,
            realisation.open(profile, verifier.address) as link,
        ):
            found[point] = measure_cases(link.address, prompts, flags, CASES)
        print(f"{point}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in found[point].items()), flush=True)
    details = {
        "realisation": realisation.name,
        "labels": [f"embedded pair, {num_prompts} prompts x {num_new} tokens, temperature 0.8"],
        "ms_per_token": {str(point): {n: round(ms, 2) for n, ms in t.items()} for point, t in found.items()},
    }
    return [_measure(found, realisation.name)], {"ways_real": details}


def measure_cases(
    address: str, prompts: Sequence[str], flags: Sequence[str], cases: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Returns the milliseconds a token of each case, flags by name, the mean over prompts."""
    times: dict[str, list[float]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        print(f"  prompt {number + 1} of {len(prompts)}", flush=True)
        texts = set()
        for name, case in list(cases.items())[:: 1 if number % 2 == 0 else -1]:
            common = ("--json", "--verifier", address, "--seed", "1", "--on-timeout", "wait", "--ignore-eos")
            done = run_edge(["run", "-", *common, *flags, *case], prompt=prompt)
            if done.returncode:
                raise OutriderError(f"{name}: {done.stderr[-500:]}")
            report = json.loads(done.stdout)
            texts.add(tuple(report["token_ids"]))
            times[name].append(report["stats"]["tpot_ms"])
        if len(texts) > 1:
            raise OutriderError("the texts differ")
    return {name: statistics.fmean(each) for name, each in times.items()}


def _measure(found: dict[Point, dict[str, float]], realisation: str) -> Measure:
    ratios = {point: ms["auto"] / min(ms[name] for name in FIXED) for point, ms in found.items()}
    spread = max(abs(ms["synchronous again"] / ms["synchronous"] - 1) for ms in found.values())
    each = ", ".join(f"{point} {ratio:.3f}" for point, ratio in ratios.items())
    text = f"TPOT of auto : best fixed way, real runs, {each} ({realisation}; A/A spread {spread:.3f})"
    return judged("ctl.auto_real", text, max(ratios.values()), "ratio", at_most(1.05))
