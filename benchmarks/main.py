"""`make bench-main`: what the main job costs and gains on the embedded pair over loopback.

Every ratio is of medians over prompts from one run in which the cases take turns prompt by prompt, so a
drift of the machine hits all of them; the A/A ratio of cloud-only against itself says how far to trust them.
No slow-down option is used. The verifier is a process of its own, its forwards on all cores, as served.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hf_target import compare_with_generate
from benchmarks.pair.draft import measure_draft
from benchmarks.results_file import Found, write_results
from benchmarks.sessions import Sessions, run_cases, warn_of_other_texts
from benchmarks.timing import median_ratio
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, tokens_per_s
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import acceptance_per_position
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED
from outrider.training.common.metrics import repeated_share

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
TEMPERATURES = (0.0, 0.8)
PARTS_DEPTH = 4  # the draft length whose rounds are taken apart
# Cloud-only again, for the A/A ratio: equal cases would be one key, so it differs by a depth that is not used.
AGAIN = Case(ExecutionMode.CLOUD_ONLY, 0.0, 1)
EDGE_ONLY = Case(ExecutionMode.EDGE_ONLY, 0.0, PARTS_DEPTH)
CO_LOCATED = Case(ExecutionMode.CO_LOCATED, 0.0, PARTS_DEPTH)
CASES = (
    *(Case(ExecutionMode.CLOUD_ONLY, t) for t in TEMPERATURES),
    *(Case(ExecutionMode.SPECULATIVE, t, n) for t in TEMPERATURES for n in DEPTHS),
    AGAIN,
    EDGE_ONLY,
    CO_LOCATED,
)


@dataclass
class Run:
    """Holds everything that was measured."""

    sessions: dict[Case, Sessions]
    hf_s: dict[str, list[float]]  # seconds a token: ours, transformers, again
    draft_run_ms: float  # one drafted token, as the bare onnxruntime run
    process_s: float  # a whole `edge-client run` of one token
    ttft_ms: float  # from its request to its first token

    def cloud(self, temperature: float) -> Sessions:
        """Returns the cloud-only sessions."""
        return self.sessions[Case(ExecutionMode.CLOUD_ONLY, temperature)]

    def speculative(self, temperature: float, num_draft_tokens: int) -> Sessions:
        """Returns the speculative sessions of one draft length."""
        return self.sessions[Case(ExecutionMode.SPECULATIVE, temperature, num_draft_tokens)]

    def speedup(self, temperature: float, num_draft_tokens: int) -> float:
        """Returns tokens a second, speculative : cloud-only."""
        rate = self.speculative(temperature, num_draft_tokens).tokens_per_s
        return rate / self.cloud(temperature).tokens_per_s


def measure(prompts: Sequence[Prompt], num_new: int, num_threads: int) -> Run:
    """Runs every case in turns, then what is measured alone."""
    draft_run_ms = measure_draft(EMBEDDED / "draft")["greedy"].run_ms
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    with (
        running_verifier("--num-threads", str(num_threads), "--log-level", "warning") as verifier,
        OnnxDraftModel.open(EMBEDDED / "draft") as draft,
    ):
        decoder = Decoder(verifier.address, draft, tokenizer)
        sessions = run_cases(decoder, prompts, CASES, num_new)
        hf_s = compare_with_generate(decoder, prompts[:6], num_new, num_threads)
        process_s, ttft_ms = _measure_start(verifier.address, prompts[0])
    return Run(sessions, hf_s, draft_run_ms, process_s, ttft_ms)


def _measure_start(address: str, prompt: Prompt) -> tuple[float, float]:
    walls, ttfts = [], []
    for _ in range(5):
        start = time.perf_counter()
        done = run_edge(
            ["run", "-", "--json", "--verifier", address, "--max-new-tokens", "1", "--seed", "1"],
            prompt=prompt.text,
        )
        walls.append(time.perf_counter() - start)
        ttfts.append(json.loads(done.stdout)["stats"]["ttft_ms"])
    return statistics.median(walls), statistics.median(ttfts)


def _take_apart(run: Run) -> dict[str, float]:
    """Returns the models' times in rounds at PARTS_DEPTH, temperature 0, in ms, and the measured speed-up : the cost
    model's own on a free link (`efficiency`)."""
    n, bare_run_ms = PARTS_DEPTH, run.draft_run_ms
    cloud, speculative = run.cloud(0.0), run.speculative(0.0, n)
    target_ms = statistics.median(ms for r in cloud.results for ms in r.stats.generate_forward_ms)
    full = [record for record in speculative.rounds if record.num_draft_tokens == n]
    verify_ms = statistics.median(record.forward_ms for record in full)
    # E t_target / (n t_draft + t_verify(n))
    models = ModelCosts(bare_run_ms / 1e3, target_ms / 1e3, verify_ms / 1e3)
    acceptance = speculative.acceptance(n)
    predicted = tokens_per_s(acceptance, n, models, LinkCosts(rtt_s=0.0)) * models.target_token_s
    return {
        "tokens_per_round": sum(record.num_accepted_tokens + 1 for record in full) / len(full),
        "target_ms": target_ms,  # one cloud-only forward
        "verify_ms": verify_ms,  # one round's forward
        "draft_ms": bare_run_ms,
        "efficiency": run.speedup(0.0, n) / predicted,
    }


def report(run: Run) -> Found:
    """Returns the measures with their targets, and the figures that they come from."""
    best = {t: max(DEPTHS, key=lambda n: run.speedup(t, n)) for t in TEMPERATURES}
    parts = _take_apart(run)
    rounds = [r for r in run.speculative(0.0, PARTS_DEPTH).rounds if r.num_draft_tokens == PARTS_DEPTH]
    aa = run.sessions[AGAIN].tokens_per_s / run.cloud(0.0).tokens_per_s
    loops = repeated_share([result.token_ids for result in run.cloud(0.0).results])
    measures = [
        judged(
            "main.vs_hf",
            "cloud-only : transformers generate, tokens/s",
            median_ratio(run.hf_s["transformers"], run.hf_s["ours"]),
            "ratio",
            at_least(1.0),
        ),
        judged(
            "main.speedup_greedy",
            f"speculative : cloud-only, temperature 0, draft length {best[0.0]} "
            f"(repeated 12-grams: {loops:.0%}; A/A {aa:.3f})",
            run.speedup(0.0, best[0.0]),
            "ratio",
            at_least(1.4),
        ),
        judged(
            "main.speedup_sampled",
            f"the same at temperature 0.8, draft length {best[0.8]}",
            run.speedup(0.8, best[0.8]),
            "ratio",
            at_least(1.3),
        ),
        judged(
            "main.colocated",
            f"co-located : speculative, tokens/s, temperature 0, n = {PARTS_DEPTH}",
            run.sessions[CO_LOCATED].tokens_per_s / run.speculative(0.0, PARTS_DEPTH).tokens_per_s,
            "ratio",
            at_least(1.0),
        ),
        judged(
            "main.efficiency",
            f"speed-up : E*t_target / (n*t_draft + t_verify), n = {PARTS_DEPTH}",
            parts["efficiency"],
            "ratio",
            at_least(0.8),
        ),
        judged(
            "main.bytes_up",
            "bytes up per drafted token, whole messages",
            statistics.fmean(r.bytes_up / r.num_draft_tokens for r in rounds),
            "bytes",
            at_most(40),
        ),
        Measure("main.aa", "cloud-only : cloud-only, tokens/s (A/A)", round(aa, 4), "ratio"),
    ]
    hf_rates = {name: round(1 / statistics.median(times), 1) for name, times in run.hf_s.items()}
    return measures, {
        "dtype": "float32",
        "cloud_only_tokens_per_s": {str(t): round(run.cloud(t).tokens_per_s, 1) for t in TEMPERATURES},
        "vs_hf_tokens_per_s": hf_rates,
        "edge_only_tokens_per_s": round(run.sessions[EDGE_ONLY].tokens_per_s, 1),
        "speedup": {str(t): {n: round(run.speedup(t, n), 3) for n in DEPTHS} for t in TEMPERATURES},
        "tokens_per_round": {
            str(t): {n: round(run.speculative(t, n).tokens_per_round, 3) for n in DEPTHS}
            for t in TEMPERATURES
        },
        "acceptance_per_position": {
            str(t): {n: acceptance_per_position(run.speculative(t, n).rounds) for n in (2, 4, 8)}
            for t in TEMPERATURES
        },
        "repeated_12grams_greedy": round(loops, 4),
        "parts_ms": {name: round(value, 4) for name, value in parts.items()},
        "bytes_per_token": _bytes_per_token(run.sessions),
        "first_token": {"process_s": round(run.process_s, 3), "request_ms": round(run.ttft_ms, 2)},
    }


def _bytes_per_token(sessions: dict[Case, Sessions]) -> dict[str, dict[str, float]]:
    found = {}
    for case in (
        Case(ExecutionMode.CLOUD_ONLY, 0.0),
        Case(ExecutionMode.SPECULATIVE, 0.0, 4),
        Case(ExecutionMode.SPECULATIVE, 0.8, 4),
    ):
        results = sessions[case].results
        num_tokens = sum(len(r.token_ids) for r in results)
        found[case.name] = {
            "up": round(sum(r.stats.bytes_up for r in results) / num_tokens, 1),
            "down": round(sum(r.stats.bytes_down for r in results) / num_tokens, 1),
        }
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help='other prompts: {"id", "prompt"} a line')
    parser.add_argument("--limit", type=int, default=12, help="prompts at most (default 12)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    prompts = load_prompts(arguments.prompts, arguments.limit)
    run = measure(prompts, arguments.max_new_tokens, arguments.num_threads)
    for case, found in run.sessions.items():
        if case.mode in (ExecutionMode.SPECULATIVE, ExecutionMode.CO_LOCATED):
            warn_of_other_texts(case.name, found.results, run.cloud(case.temperature).results)
    measures, details = report(run)
    write_results("main", measures, details)
    for name, value in details.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
