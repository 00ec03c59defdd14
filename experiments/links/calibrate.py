"""Measures every realisation that works here against its profile and against the others.

python -m outrider.experiments.links.calibrate [--json] [--short] [--realisation proxy tun]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.links.base import REALISATIONS, create_realisation
from outrider.experiments.links.calibration.measure import (
    SHORT,
    Calibration,
    Plan,
    Point,
    calibrate,
    num_points,
)
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged, print_table


def exp_links(found: Calibration) -> tuple[Measure, dict[str, Any]]:
    """Returns the measure `exp.links` and its details: the worst deviation as a share of its tolerance."""
    names = ", ".join(dict.fromkeys(point.realisation for point in found.points))
    rtts = "/".join(f"{rtt:g}" for rtt in sorted({point.rtt_ms for point in found.points}))
    text = f"worst deviation : tolerance, {names}, RTT {rtts} ms, {len(found.points)} points"
    return judged("exp.links", text, found.worst_share, "share", at_most(1.0)), found.record()


def run(names: Sequence[str], plan: Plan) -> Calibration:
    """Calibrates with a line a point on stderr, and how long it will take. Raises UsageError where no realisation
    works here."""
    working = [name for name in names if not create_realisation(name).refusals(LinkProfile(rtt_ms=1))]
    total, begin_s, done = len(working) * num_points(plan), time.monotonic(), 0

    def on_point(point: Point) -> None:
        nonlocal done
        done += 1
        left_s = (time.monotonic() - begin_s) / done * (total - done)
        print(f"[{done:>2}/{total}, {left_s:3.0f} s left] {point}", file=sys.stderr, flush=True)

    found = calibrate(names, plan, on_point)
    for name, reasons in found.refused.items():
        print(f"{name}: not measured: {'; '.join(reasons)}", file=sys.stderr)
    if not found.points:
        raise UsageError(f"--realisation {' '.join(names)}: none of them works here, so nothing was measured")
    return found


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.links.calibrate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="every point as JSON on stdout")
    parser.add_argument("--short", action="store_true", help="round trips only, few of them")
    parser.add_argument("--realisation", nargs="+", default=REALISATIONS, metavar="NAME")
    arguments = parser.parse_args()
    measure, details = exp_links(run(arguments.realisation, SHORT if arguments.short else Plan()))
    if arguments.json:
        print(json.dumps(details, indent=1))
    else:
        print_table([measure])
        print(f"worst against nominal  {details['worst_point']}")
        print(f"worst pair             {details['worst_pair']}")
    return 0


if __name__ == "__main__":
    run_command("calibrate", main)
