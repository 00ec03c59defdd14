"""`make demo`: a verifier on loopback, an edge beside it, and the same text four ways.

Decodes held-out prompts speculatively, cloud-only, co-located (draft and target both in the verifier) and
edge-only through the real commands, and fails unless the first three write the same text, token for token,
with nothing unverified.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts

EXACT = ("speculative", "cloud-only", "co-located")
MODES = (*EXACT, "edge-only")


@dataclass(frozen=True)
class _Run:
    mode: str
    temperature: float
    result: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.result["token_ids"])

    @property
    def tokens_per_s(self) -> float:
        tpot_ms: float = self.result["stats"]["tpot_ms"]
        return 1000.0 / tpot_ms if tpot_ms else 0.0


def _decode(address: str, prompt: Prompt, mode: str, temperature: float, num_tokens: int) -> _Run:
    arguments = ["run", "-", "--json", "--mode", mode, "--seed", "7", "--on-timeout", "wait"]
    arguments += ["--temperature", str(temperature), "--max-new-tokens", str(num_tokens)]
    if mode != "edge-only":
        arguments += ["--verifier", address]
    done = run_edge(arguments, prompt=prompt.text)
    if done.returncode != 0:
        raise SystemExit(f"demo: edge-client {' '.join(arguments)} failed:\n{done.stderr}")
    return _Run(mode, temperature, json.loads(done.stdout))


def _check_same(by_mode: dict[str, _Run], prompt: Prompt) -> None:
    for mode in EXACT:
        result = by_mode[mode].result
        if result["num_unverified_tokens"] or result["stats"]["num_fallback_tokens"]:
            raise SystemExit(f"demo: {mode} decoding of {prompt.id} fell back; see above")
        if result["token_ids"] != by_mode["cloud-only"].result["token_ids"]:
            raise SystemExit(f"demo: {mode} and cloud-only text of {prompt.id} differ")


def _print_table(runs: list[_Run]) -> None:
    header = ("mode", "temp.", "tokens/s", "accepted", "calls/token", "bytes/token")
    print(f"\n{header[0]:<12}{header[1]:>6}{header[2]:>10}{header[3]:>10}{header[4]:>13}{header[5]:>13}")
    for temperature in sorted({run.temperature for run in runs}):
        for mode in MODES:
            group = [r for r in runs if r.mode == mode and r.temperature == temperature]
            print(_row(mode, temperature, group))


def _row(mode: str, temperature: float, group: list[_Run]) -> str:
    num_tokens = sum(r.num_tokens for r in group)
    stats = [r.result["stats"] for r in group]
    speed = num_tokens / sum(r.num_tokens / r.tokens_per_s for r in group if r.tokens_per_s)
    drafted = sum(s["num_draft_tokens"] for s in stats)
    accepted = f"{sum(s['num_accepted_tokens'] for s in stats) / drafted:.0%}" if drafted else "–"
    # Each round is one target forward, and so is each token of the target alone.
    by_target = sum(r.result["token_origins"].count("target") for r in group)
    calls = (sum(s["num_rounds"] for s in stats) + by_target) / num_tokens
    size = sum(s["bytes_up"] + s["bytes_down"] for s in stats) / num_tokens
    return f"{mode:<12}{temperature:>6.1f}{speed:>10.1f}{accepted:>10}{calls:>13.2f}{size:>13.1f}"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two short prompts, for CI")
    quick = parser.parse_args().quick
    prompts, num_tokens = load_prompts(limit=2 if quick else 3), 32 if quick else 96
    runs: list[_Run] = []
    print("starting cloud-verifier on loopback with the embedded target ...", flush=True)
    with running_verifier("--log-level", "warning") as verifier:
        print(f"serving on {verifier.address} after {verifier.start_s:.1f} s", flush=True)
        for prompt in prompts:
            for temperature in (0.0, 0.8):
                by_mode = {m: _decode(verifier.address, prompt, m, temperature, num_tokens) for m in MODES}
                runs += by_mode.values()
                _check_same(by_mode, prompt)
                print(f"\n--- {prompt.id}, temperature {temperature}: {' = '.join(EXACT)}, token for token")
                print(
                    prompt.text.rstrip()
                    + "\n\033[2m" * sys.stdout.isatty()
                    + "\n" * (not sys.stdout.isatty()),
                    end="",
                )
                print(by_mode["speculative"].result["text"] + "\033[0m" * sys.stdout.isatty(), flush=True)
    _print_table(runs)
    num_same = len(prompts) * 2
    print(f"\n{num_same} of {num_same} texts identical, no token unverified, verifier stopped.")
    return 0


if __name__ == "__main__":
    run_command("demo", main)
