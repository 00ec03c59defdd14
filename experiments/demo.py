"""`make demo`: a verifier, an edge beside it, and the same text four ways, on loopback and over a slower link.

Decodes held-out prompts speculatively, cloud-only, co-located (draft and target both in the verifier) and
edge-only, and fails unless the first three write the same text, token for token, with nothing unverified. Then
once more as it would be with a larger target far away: forwards stretched, over an emulated link. With --heads the
target drafts for itself too (docs/heads.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.common.types import Origin
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.models import shipped_heads

EXACT: dict[str, dict[str, Any]] = {
    mode: {"mode": mode}
    for mode in (ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED)
}
UNVERIFIED: dict[str, dict[str, Any]] = {ExecutionMode.EDGE_ONLY: {"mode": ExecutionMode.EDGE_ONLY}}
TEMPERATURES = (0.0, 0.8)
SEED = 7
# A target of the size of 7B parameters on a small GPU, in another town.
FAR = LinkProfile(name="far", rtt_ms=30.0)
FORWARD_MS = 70.0


@dataclass(frozen=True)
class Run:
    """Holds one text, and how it was decoded."""

    way: str
    temperature: float
    result: SessionResult

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens it has."""
        return len(self.result.token_ids)

    @property
    def seconds(self) -> float:
        """Returns the time of its tokens after the first, for as many tokens as it has."""
        times_ns = self.result.stats.token_times_ns
        return (times_ns[-1] - times_ns[0]) / 1e9 / max(1, len(times_ns) - 1) * self.num_tokens


def decode_every_way(
    edge: Edge,
    address: str,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    num_tokens: int,
    exact: dict[str, dict[str, Any]],
) -> list[Run]:
    """Returns the runs of each prompt in every way. Raises SystemExit where those in `exact` differ."""
    runs: list[Run] = []
    for prompt in prompts:
        for temperature in temperatures:
            by_way: dict[str, Run] = {}
            for way, settings in (exact | UNVERIFIED).items():
                result = _decode(edge, address, prompt, settings | {"temperature": temperature}, num_tokens)
                by_way[way] = Run(way, temperature, result)
            _check_same(by_way, exact, prompt)
            _print_text(by_way[ExecutionMode.SPECULATIVE], exact, prompt)
            runs += by_way.values()
    return runs


def _decode(
    edge: Edge, address: str, prompt: Prompt, settings: dict[str, Any], num_tokens: int
) -> SessionResult:
    config = run_config(verifier=address, max_new_tokens=num_tokens, on_timeout="wait", **settings)
    session = edge.session(prompt.text, SEED, config)
    for _ in session.generate():
        pass
    return session.result


def _check_same(by_way: dict[str, Run], exact: Iterable[str], prompt: Prompt) -> None:
    expected = by_way[ExecutionMode.CLOUD_ONLY].result.token_ids
    for way in exact:
        result = by_way[way].result
        if result.num_unverified_tokens:
            raise SystemExit(f"demo: {way} decoding of {prompt.id} fell back: {result.unverified_note}")
        if result.token_ids != expected:
            raise SystemExit(f"demo: {way} and cloud-only text of {prompt.id} differ")


def _print_text(run: Run, exact: Iterable[str], prompt: Prompt) -> None:
    dim, plain = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("\n", "")
    print(f"\n--- {prompt.id}, temperature {run.temperature}: {' = '.join(exact)}, token for token")
    print(f"{prompt.text.rstrip()}{dim}{run.result.text}{plain}", flush=True)


def print_table(title: str, runs: Sequence[Run]) -> None:
    """Prints a line for each way and temperature."""
    print(
        f"\n{title}\n{'mode':<12}{'temp.':>6}{'ms/token':>10}{'accepted':>10}{'calls/token':>13}{'bytes/token':>13}"
    )
    for temperature in sorted({run.temperature for run in runs}):
        for way in dict.fromkeys(run.way for run in runs):
            group = [run for run in runs if run.way == way and run.temperature == temperature]
            print(_row(way, temperature, group))


def _row(way: str, temperature: float, group: Sequence[Run]) -> str:
    stats = [summary_of(run) for run in group]
    num_tokens = sum(run.num_tokens for run in group)
    drafted = sum(each["num_draft_tokens"] for each in stats)
    accepted = f"{sum(each['num_accepted_tokens'] for each in stats) / drafted:.0%}" if drafted else "–"
    size = sum(each["bytes_up"] + each["bytes_down"] for each in stats) / num_tokens
    return (
        f"{way:<12}{temperature:>6.1f}{ms_per_token(group):>10.1f}{accepted:>10}"
        f"{calls_per_token(group):>13.2f}{size:>13.1f}"
    )


def summary_of(run: Run) -> dict[str, Any]:
    """Returns the statistics of a run."""
    return run.result.stats.summary(run.result.origins)


def ms_per_token(group: Sequence[Run]) -> float:
    """Returns the milliseconds between tokens, over all of some runs."""
    return 1e3 * sum(run.seconds for run in group) / sum(run.num_tokens for run in group)


def calls_per_token(group: Sequence[Run]) -> float:
    """Returns the target's forwards a token: one for each round, and for each token of the target alone."""
    rounds = sum(summary_of(run)["num_rounds"] for run in group)
    alone = sum(run.result.origins.count(Origin.TARGET) for run in group)
    calls: int = rounds + alone
    return calls / sum(run.num_tokens for run in group)


def read_table(runs: Sequence[Run]) -> str:
    """Returns what the runs over the link show, in one sentence."""
    by_way = {way: [run for run in runs if run.way == way] for way in EXACT}
    here, alone, beside = map(ms_per_token, by_way.values())
    is_faster = here < alone
    factor = alone / here if is_faster else here / alone
    per_call = 1 / calls_per_token(by_way[ExecutionMode.SPECULATIVE])
    return (
        f"With forwards of {FORWARD_MS:.0f} ms and a round trip of {FAR.rtt_ms:.0f} ms, drafting here writes a "
        f"token in {here:.0f} ms, {factor:.1f} times as {'fast' if is_faster else 'slow'} as the target alone "
        f"({alone:.0f} ms), for one call writes {per_call:.1f} tokens; a draft beside the target takes "
        f"{beside:.0f} ms."
    )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few short prompts, for CI")
    parser.add_argument(
        "--heads", action="store_true", help="let the target draft for itself too, by trained heads"
    )
    arguments = parser.parse_args()
    is_quick = arguments.quick
    heads = shipped_heads() if arguments.heads else []
    drafting = [flag for path in heads for flag in ("--heads", str(path))]
    exact = EXACT | {
        path.name: {"mode": ExecutionMode.CO_LOCATED, "draft_source": path.name} for path in heads
    }
    prompts, num_tokens = load_prompts(limit=2 if is_quick else 3), 32 if is_quick else 96
    edge = create_edge(run_config())
    print("starting cloud-verifier on loopback with the embedded target ...", flush=True)
    with running_verifier("--log-level", "warning", *drafting) as verifier:
        _say_serving(verifier)
        runs = decode_every_way(edge, verifier.address, prompts, TEMPERATURES, num_tokens, exact)
    print_table("on loopback", runs)
    print(f"\nstarting another, with forwards of {FORWARD_MS:.0f} ms ...", flush=True)
    flags = ("--log-level", "warning", "--min-forward-ms", str(FORWARD_MS), *drafting)
    with running_verifier(*flags) as verifier:
        _say_serving(verifier)
        with create_realisation("proxy").open(FAR, verifier.address) as link:
            far = decode_every_way(edge, link.address, prompts[:1], TEMPERATURES[1:], num_tokens, exact)
    edge.close()
    print_table(f"forwards of {FORWARD_MS:.0f} ms, over a link of {FAR.rtt_ms:.0f} ms", far)
    print(f"\n{read_table(far)}")
    num_same = (len(runs) + len(far)) // len(exact | UNVERIFIED)
    print(f"\n{num_same} of {num_same} texts identical, no token unverified, verifiers stopped.")
    return 0


def _say_serving(verifier: VerifierProcess) -> None:
    print(f"serving on {verifier.address} after {verifier.start_s:.1f} s", flush=True)


if __name__ == "__main__":
    run_command("demo", main)
