"""`make bench-controller ARGS="--only guesses_real"`: guesses at what follows a rejection, over real links.

The embedded pair with the draft's own speed and the forward stretched to 30 ms: pipelined rounds with
guesses, without, with again (for the A/A ratio), and synchronous ones, in turns. Texts must be equal.
"""

from __future__ import annotations

from typing import Any

from benchmarks.controller.ways_real import OPTIMAL, measure_cases
from benchmarks.matrix import best_realisation
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged

RTTS_MS = (60, 200)
FORWARD_MS = 30
PIPELINED = (*OPTIMAL, "--pipeline", "on")
CASES = {
    "with": PIPELINED,
    "without": (*PIPELINED, "--guesses", "off"),
    "with again": PIPELINED,
    "synchronous": OPTIMAL,
}


def measure_guesses_real(
    realisation_name: str | None = None, *, is_quick: bool = False
) -> tuple[list[Measure], dict[str, Any]]:
    """Measures `ctl.guesses_real`. Raises `OutriderError` where texts differ."""
    realisation = create_realisation(realisation_name) if realisation_name else best_realisation()
    num_prompts, num_new = (1, 64) if is_quick else (4, 256)
    prompts = [prompt.text for prompt in load_prompts(None, num_prompts)]
    flags = ("--max-new-tokens", str(num_new))
    found: dict[int, dict[str, float]] = {}
    with running_verifier("--log-level", "warning", "--min-forward-ms", str(FORWARD_MS)) as verifier:
        for rtt_ms in RTTS_MS:
            with realisation.open(LinkProfile(f"rtt{rtt_ms}", rtt_ms=rtt_ms), verifier.address) as link:
                found[rtt_ms] = measure_cases(link.address, prompts, flags, CASES)
            figures = ", ".join(f"{name} {ms:.1f}" for name, ms in found[rtt_ms].items())
            print(f"RTT {rtt_ms} ms: {figures} ms a token", flush=True)
    ratios = {rtt_ms: ms["with"] / ms["without"] for rtt_ms, ms in found.items()}
    spread = max(abs(ms["with again"] / ms["with"] - 1) for ms in found.values())
    each = ", ".join(f"RTT {rtt_ms} ms {ratio:.3f}" for rtt_ms, ratio in ratios.items())
    text = f"TPOT with guesses : without, real runs, {each} ({realisation.name}; A/A spread {spread:.3f})"
    details = {
        "realisation": realisation.name,
        "labels": [f"embedded pair, {num_prompts} prompts x {num_new} tokens, temperature 0.8"],
        "ms_per_token": {f"RTT {rtt_ms} ms": ms for rtt_ms, ms in found.items()},
    }
    measure = judged("ctl.guesses_real", text, max(ratios.values()), "ratio", at_most(0.97))
    return [measure], {"guesses_real": details}
