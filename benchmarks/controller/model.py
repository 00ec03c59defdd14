"""`make bench-controller ARGS="--only model"`: synchronous rounds against the cost model, over real links.

The rounds of `plan_check` alone: the embedded pair, drafts of 1, 4 and 8 tokens, each case in turn with the
others. The model gets the parts of the same runs (draft, verifier, trip, acceptance by position) and says
what they should have taken a token; the ratio is judged beside A/A, the same case's odd repeats : even ones.
"""

from __future__ import annotations

from typing import Any

from benchmarks.controller.plan_check import RTTS_MS, Checked, as_json, compare_own, model_measure
from benchmarks.controller.plan_check_runs import SPECULATIVE, decoding, run_all
from benchmarks.matrix import best_realisation
from outrider.experiments.links.base import check_realisable, create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.results import Measure

MIN_FORWARD_MS, MIN_DRAFT_MS = 30.0, 3.0  # a pair that one would speculate with


def measure_model(
    realisation_name: str | None = None, *, is_quick: bool = False
) -> tuple[list[Measure], dict[str, Any]]:
    """Measures `ctl.model`. Raises `UsageError` where the realisation refuses a constant delay."""
    realisation = create_realisation(realisation_name) if realisation_name else best_realisation()
    profiles = [LinkProfile(name=f"rtt{rtt:g}", rtt_ms=rtt) for rtt in RTTS_MS]
    for profile in profiles:
        check_realisable(realisation, profile)
    num_repeats, num_new = (2, 64) if is_quick else (6, 128)
    own: list[Checked] = []
    links: dict[str, Any] = {}
    with decoding(None, MIN_FORWARD_MS, MIN_DRAFT_MS) as (address, decoder_at):
        for profile in profiles:
            with realisation.open(profile, address) as link:
                runs = run_all(decoder_at(link.address), num_repeats, num_new, SPECULATIVE)
                links[profile.name] = link.facts()
            own += compare_own(runs, profile.rtt_ms)
            for each in own[-len(SPECULATIVE) :]:
                print(
                    f"{profile.name} {each.name}: {1e3 * each.measured_s:.2f} ms a token measured, "
                    f"{1e3 * each.predicted_s:.2f} by the model: "
                    f"{each.measured_s / each.predicted_s:.3f} (A/A {each.aa:.3f})",
                    flush=True,
                )
    pair = f"embedded pair, min-forward-ms {MIN_FORWARD_MS:g}, min-draft-ms {MIN_DRAFT_MS:g}"
    measure = model_measure(own, f"{pair}, {realisation.name}")
    details = {"labels": [pair], "realisation": realisation.name, "num_repeats": num_repeats}
    return [measure], {"model": details | {"runs": [as_json(each) for each in own], "links": links}}
