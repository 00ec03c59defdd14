"""The ways to work over an emulated link, with real processes: cloud-only, synchronous, pipelined, auto.

    python -m experiments.bench_ways_real --rtt-ms 60 200 --min-forward-ms 30 --min-draft-ms 12

All take turns prompt by prompt; synchronous rounds twice, for the A/A ratio. Texts must be equal.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence

from common.errors import OutriderError
from experiments.command import run_command
from experiments.links.base import create_realisation
from experiments.links.profiles import load_profile
from experiments.processes import run_edge, running_verifier
from experiments.prompts import load_prompts

OPTIMAL = ("--depth-policy", "optimal")
CASES = {
    "cloud-only": ("--mode", "cloud-only"),
    "synchronous": OPTIMAL,
    "pipelined": (*OPTIMAL, "--pipeline", "on"),
    "without guesses": (*OPTIMAL, "--pipeline", "on", "--guesses", "off"),
    "auto": (*OPTIMAL, "--mode", "auto"),
    "synchronous again": OPTIMAL,
}


def measure(address: str, prompts: Sequence[str], flags: Sequence[str]) -> dict[str, float]:
    """Milliseconds a token of each case, the mean over prompts. Raises `OutriderError` where texts differ."""
    times: dict[str, list[float]] = defaultdict(list)
    for prompt in prompts:
        texts = set()
        for name, case in CASES.items():
            common = ("--json", "--verifier", address, "--seed", "1", "--on-timeout", "wait", "--ignore-eos")
            done = run_edge(["run", "-", *common, *flags, *case], prompt=prompt)
            if done.returncode:
                raise OutriderError(f"{name}: {done.stderr[-500:]}")
            report = json.loads(done.stdout)
            texts.add(tuple(report["token_ids"]))
            times[name].append(report["stats"]["tpot_ms"])
        if len(texts) > 1:
            raise OutriderError("the texts differ")
    return {name: sum(each) / len(each) for name, each in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_ways_real", description=__doc__)
    parser.add_argument("--realisation", default="proxy", help="of the link (default proxy)")
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[60.0, 200.0], metavar="MS")
    parser.add_argument("--min-forward-ms", default="30", metavar="MS")
    parser.add_argument("--min-draft-ms", default="12", metavar="MS")
    parser.add_argument("--limit", type=int, default=2, help="prompts (default 2)")
    parser.add_argument("--max-new-tokens", default="128", metavar="N")
    arguments = parser.parse_args(argv)
    prompts = [prompt.text for prompt in load_prompts(None, arguments.limit)]
    flags = ("--max-new-tokens", arguments.max_new_tokens, "--min-draft-ms", arguments.min_draft_ms)
    with running_verifier(
        "--log-level", "warning", "--min-forward-ms", arguments.min_forward_ms
    ) as verifier:
        for rtt_ms in arguments.rtt_ms:
            profile = load_profile({"rtt_ms": rtt_ms})
            with create_realisation(arguments.realisation).open(profile, verifier.address) as link:
                found = measure(link.address, prompts, flags)
            figures = ", ".join(f"{name} {ms:.1f}" for name, ms in found.items())
            ratio, again = found["pipelined"], found["synchronous again"]
            print(
                f"RTT {rtt_ms:g} ms: {figures} ms a token; pipelined : synchronous "
                f"{ratio / found['synchronous']:.3f} (A/A {again / found['synchronous']:.3f})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    run_command("bench_ways_real", main)
