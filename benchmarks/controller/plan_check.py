"""What `edge-client plan` predicts against real runs over real links: `exp.plan_error` and `ctl.model`.

    python -m benchmarks.controller.plan_check --realisation tun
    python -m benchmarks.controller.plan_check --realisation proxy --synthetic --quick

At each RTT every case decodes the same prompts in turn, several times. The plan gets the parts of those runs
(draft, verifier, trip, acceptance; the target's step from the cloud-only stream's forwards) and predicts
ms a token of each case; what the runs themselves took a token is held against it. A plan is for long texts.
These are short, so what is predicted counts their ends in: the last round is cut to what is wanted, and
asking for a stream costs one round trip. The A/A spread is what the same case differs by between its odd and
its even repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.plan_check_parts import Checked, compare, compare_own
from benchmarks.controller.plan_check_runs import CASES, decoding, run_all
from outrider.experiments.links.base import LinkRealisation, check_realisable, create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged, print_table
from outrider.experiments.synthetic.pair import SyntheticPair

RTTS_MS = (10.0, 50.0, 150.0)
# A draft of 3 ms and a target of 30: a plan is for a pair that one would plan for.
SYNTHETIC = SyntheticPair((0.85, 0.8, 0.75), draft_token_s=0.003, target_s=0.03, verify_token_s=0.0003)


@dataclass(frozen=True, slots=True)
class PlanCheck:
    measures: list[Measure]
    details: dict[str, Any]


def plan_check(
    realisation: LinkRealisation,
    pair: SyntheticPair | None = None,
    *,
    rtts_ms: Sequence[float] = RTTS_MS,
    num_repeats: int = 6,
    num_new: int = 128,
    min_forward_ms: float = 0.0,
    min_draft_ms: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> PlanCheck:
    """With the embedded pair, stretched to stand for a larger one, or with a synthetic pair. An even
    `num_repeats`: each two share a prompt.

    Raises `UsageError` where the realisation refuses a constant delay.
    """
    profiles = [LinkProfile(name=f"rtt{rtt:g}", rtt_ms=rtt) for rtt in rtts_ms]
    for profile in profiles:
        check_realisable(realisation, profile)
    planned: list[Checked] = []
    own: list[Checked] = []
    facts: dict[str, Any] = {}
    stretch = f", min-forward-ms {min_forward_ms:g}, min-draft-ms {min_draft_ms:g}"
    own_labels = (f"embedded pair{stretch if min_forward_ms or min_draft_ms else ''}",)
    labels = own_labels if pair is None else pair.labels
    with decoding(pair, min_forward_ms, min_draft_ms) as (address, decoder_at):
        for profile in profiles:
            with realisation.open(profile, address) as link:
                runs = run_all(decoder_at(link.address), num_repeats, num_new)
                facts[profile.name] = link.facts()
            planned += compare(runs, profile.rtt_ms)
            own += compare_own(runs, profile.rtt_ms)
            for each in planned[-len(CASES) :]:
                say(
                    f"{profile.name} {each.name}: {1e3 * each.measured_s:.2f} ms a token measured, "
                    f"{1e3 * each.predicted_s:.2f} predicted ({100 * each.error:+.1f} %, A/A {each.aa:.3f})"
                )
    details = {
        "labels": list(labels),
        "realisation": realisation.name,
        "num_repeats": num_repeats,
        "num_new": num_new,
        "plan": [as_json(each) for each in planned],
        "own_parts": [as_json(each) for each in own],
        "links": facts,
    }
    return PlanCheck(_measures(planned, own, realisation.name, labels[0]), details)


def _measures(planned: list[Checked], own: list[Checked], realisation: str, label: str) -> list[Measure]:
    worst = max(planned, key=lambda c: abs(c.error))
    spread = max(abs(each.aa - 1) for each in planned)
    where = f"{label}, {realisation}"
    return [
        judged(
            "exp.plan_error",
            f"TPOT predicted by plan : measured, worst of {len(planned)} cases ({worst.name} at RTT "
            f"{worst.rtt_ms:g} ms; {where}; A/A spread {spread:.3f})",
            abs(worst.error),
            "share",
            at_most(0.10),
        ),
        model_measure(own, where),
    ]


def model_measure(own: Sequence[Checked], where: str) -> Measure:
    """`ctl.model`. Slower than the model says is what counts: a round has parts that it does not know."""
    slowest = max(own, key=lambda c: -c.error)
    spread = max(abs(each.aa - 1) for each in own)
    return judged(
        "ctl.model",
        f"measured TPOT of synchronous rounds : cost model from their own parts, worst of {len(own)} "
        f"({slowest.name} at RTT {slowest.rtt_ms:g} ms; {where}; A/A spread {spread:.3f})",
        slowest.measured_s / slowest.predicted_s,
        "ratio",
        at_most(1.10),
    )


def as_json(each: Checked) -> dict[str, Any]:
    return {
        "case": each.name,
        "rtt_ms": each.rtt_ms,
        "measured_tpot_ms": round(1e3 * each.measured_s, 4),
        "predicted_tpot_ms": round(1e3 * each.predicted_s, 4),
        "error": round(each.error, 4),
        "aa": round(each.aa, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller.plan_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--realisation", default="tun", metavar="NAME", help="of the link; default tun")
    parser.add_argument("--synthetic", action="store_true", help=f"without weights: {SYNTHETIC.labels[1]}")
    for name, default in (("--min-forward-ms", 30.0), ("--min-draft-ms", 3.0)):
        parser.add_argument(
            name, type=float, default=default, metavar="MS", help=f"of the embedded pair; default {default:g}"
        )
    parser.add_argument("--quick", action="store_true", help="four repeats of 64 tokens")
    namespace = parser.parse_args()
    check = plan_check(
        create_realisation(namespace.realisation),
        SYNTHETIC if namespace.synthetic else None,
        say=lambda line: print(f"  {line}", flush=True),
        min_forward_ms=namespace.min_forward_ms,
        min_draft_ms=namespace.min_draft_ms,
        num_repeats=4 if namespace.quick else 6,
        num_new=64 if namespace.quick else 128,
    )
    print_table(check.measures)
    return 0


if __name__ == "__main__":
    run_command("plan_check", main)
