"""`make bench-main`: what the main job costs and gains on the embedded pair over loopback.

Every ratio is of medians over prompts from one run in which the cases take turns prompt by prompt, so a
drift of the machine hits all of them; the A/A ratio of cloud-only against itself says how far to trust them.
No slow-down option is used. The verifier is a process of its own, its forwards on all cores, as served.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pair.draft import measure_draft
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, tokens_per_s
from outrider.edge_client.core.options import Mode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged, write_results
from outrider.models import EMBEDDED
from outrider.training.common.metrics import repeated_share

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
TEMPERATURES = (0.0, 0.8)
PARTS_DEPTH = 4  # the draft length whose parts are taken apart


@dataclass
class Samples:
    """Sessions of one case."""

    results: list[SessionResult] = field(default_factory=list)

    @property
    def ms_per_token(self) -> list[float]:
        """Per session, after its first token."""
        times = [r.stats.token_times_ns for r in self.results]
        return [(t[-1] - t[0]) / 1e6 / (len(t) - 1) for t in times]

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / statistics.median(self.ms_per_token)

    @property
    def rounds(self) -> list[Any]:
        return [record for r in self.results for record in r.stats.rounds if record.is_answered]

    def per_position(self) -> list[float]:
        rounds = [r for r in self.rounds if r.num_draft_tokens]
        depth = max((r.num_draft_tokens for r in rounds), default=0)
        by_position = ([r for r in rounds if r.num_draft_tokens > i] for i in range(depth))
        return [
            round(sum(r.num_accepted_tokens > i for r in having) / len(having), 3)
            for i, having in enumerate(by_position)
        ]


def run_cases(
    decoder: Decoder, prompts: Sequence[Prompt], cases: Sequence[Case], num_new: int
) -> dict[Case, Samples]:
    """All cases, prompt by prompt in turn, after one warm-up each."""
    samples = {case: Samples() for case in cases}
    for case in cases:
        decoder.decode(prompts[0].text, case, num_new=8)
    for number, prompt in enumerate(prompts):
        print(f"\rprompt {number + 1} of {len(prompts)}", end="", flush=True)
        shift = number % len(cases)
        for case in (*cases[shift:], *cases[:shift]):
            samples[case].results.append(decoder.decode(prompt.text, case, num_new))
    print()
    return samples


# ------------------------------------------------------------------------------------- the baseline


def measure_vs_hf(
    decoder: Decoder, prompts: Sequence[Prompt], num_new: int, num_threads: int
) -> tuple[float, float, float]:
    """Cloud-only : `transformers` generate (greedy, its cache, float32, as many threads), in turns.

    Returns the ratio of tokens/s, and both. Both are timed after the first token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.float32).eval()
    case = Case(Mode.CLOUD_ONLY, 0.0)

    def generate(prompt_ids: list[int], num_tokens: int) -> float:
        ids = torch.tensor([prompt_ids])
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    ours, theirs = [], []
    for prompt in prompts:
        ids = decoder.tokenizer.encode(prompt.text)
        generate(ids, 2)
        result = decoder.decode(prompt.text, case, num_new)
        times = result.stats.token_times_ns
        ours.append((times[-1] - times[0]) / 1e9 / (len(times) - 1))
        theirs.append((generate(ids, num_new) - generate(ids, 1)) / (num_new - 1))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return ratio, 1 / statistics.median(ours), 1 / statistics.median(theirs)


# ---------------------------------------------------------------------------------- parts of a round


def round_walls_ms(result: SessionResult) -> list[tuple[float, Any]]:
    """Per round after the first: wall time from the last round's tokens to this one's, and its record."""
    walls, index, last_ns = [], 1, result.stats.token_times_ns[0]
    for record in result.stats.rounds:
        index += record.num_accepted_tokens + 1
        if index > len(result.stats.token_times_ns):
            break
        now_ns = result.stats.token_times_ns[index - 1]
        walls.append(((now_ns - last_ns) / 1e6, record))
        last_ns = now_ns
    return walls[1:]


@dataclass(frozen=True)
class Parts:
    """Of rounds at PARTS_DEPTH, temperature 0; milliseconds."""

    tokens_per_round: float
    target_ms: float  # t_target: one cloud-only forward
    verify_ms: float  # t_verify(n): one round's forward
    draft_ms: float  # t_draft: one drafted token, as the bare onnxruntime run
    overhead_ms: float  # a round's wall time less n bare runs and its forward, median
    efficiency: float


def take_apart(cloud: Samples, speculative: Samples, bare_run_ms: float) -> Parts:
    n = PARTS_DEPTH
    target_ms = statistics.median(ms for r in cloud.results for ms in r.stats.generate_forward_ms)
    full = [record for record in speculative.rounds if record.num_draft_tokens == n]
    verify_ms = statistics.median(record.forward_ms for record in full)
    committed = sum(record.num_accepted_tokens + 1 for record in full) / len(full)
    walls = [wall for r in speculative.results for wall in round_walls_ms(r)]
    overheads = [
        wall_ms - record.num_draft_tokens * bare_run_ms - record.forward_ms
        for wall_ms, record in walls
        if record.num_draft_tokens == n
    ]
    measured = speculative.tokens_per_s / cloud.tokens_per_s
    # The cost model's own speed-up on a link that costs nothing: E t_target / (n t_draft + t_verify(n)).
    models = ModelCosts(bare_run_ms / 1e3, target_ms / 1e3, verify_ms / 1e3)
    acceptance = conditional_acceptance(full, n)
    predicted = tokens_per_s(acceptance, n, models, LinkCosts(rtt_s=0.0)) * models.target_token_s
    return Parts(
        committed, target_ms, verify_ms, bare_run_ms, statistics.median(overheads), measured / predicted
    )


def conditional_acceptance(rounds: Sequence[Any], num_draft_tokens: int) -> list[float]:
    """Per position: how often it stood, of the rounds in which all before it did."""
    reached = [sum(r.num_accepted_tokens >= i for r in rounds) for i in range(num_draft_tokens + 1)]
    return [after / before if before else 0.0 for before, after in itertools.pairwise(reached)]


def measure_start(address: str, prompt: Prompt) -> tuple[float, float]:
    """Median seconds of a whole `edge-client run` of one token, and ms from request to first token."""
    import json

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


# --------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help='other prompts: {"id", "prompt"} a line')
    parser.add_argument("--limit", type=int, default=12, help="prompts at most (default 12)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    prompts = load_prompts(arguments.prompts, arguments.limit)
    num_new = arguments.max_new_tokens

    cases = [Case(Mode.CLOUD_ONLY, t) for t in TEMPERATURES] + [
        Case(Mode.SPECULATIVE, t, n) for t in TEMPERATURES for n in DEPTHS
    ]
    # Against itself, for the A/A ratio: equal cases would be one key, so it differs by an unused depth.
    again = Case(Mode.CLOUD_ONLY, 0.0, 1)
    edge_only = Case(Mode.EDGE_ONLY, 0.0, PARTS_DEPTH)
    draft_report = measure_draft(EMBEDDED / "draft")
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    with (
        running_verifier("--num-threads", str(arguments.num_threads), "--log-level", "warning") as verifier,
        OnnxDraftModel.open(EMBEDDED / "draft") as draft,
    ):
        decoder = Decoder(verifier.address, draft, tokenizer)
        samples = run_cases(decoder, prompts, [*cases, again, edge_only], num_new)
        vs_hf, cloud_tps, hf_tps = measure_vs_hf(decoder, prompts[:6], num_new, arguments.num_threads)
        process_s, ttft_ms = measure_start(verifier.address, prompts[0])

    from benchmarks.pair.target import measure_target

    forwards = measure_target(EMBEDDED / "target", num_threads=arguments.num_threads)
    check_same(samples)
    report(samples, again, edge_only, draft_report, vs_hf, cloud_tps, hf_tps, process_s, ttft_ms, forwards)


def check_same(samples: dict[Case, Samples]) -> None:
    """A speed-up of another text is none: speculative and cloud-only ids must agree (ties are printed)."""
    for case, found in samples.items():
        if case.mode is not Mode.SPECULATIVE:
            continue
        reference = samples[Case(Mode.CLOUD_ONLY, case.temperature)]
        pairs = zip(found.results, reference.results, strict=True)
        differing = sum(a.token_ids != b.token_ids for a, b in pairs)
        if differing:
            print(f"WARNING {case.name}: {differing} of {len(found.results)} texts differ from cloud-only")


def report(
    samples: dict[Case, Samples],
    again: Case,
    edge_only: Case,
    draft_report: Any,
    vs_hf: float,
    cloud_tps: float,
    hf_tps: float,
    process_s: float,
    ttft_ms: float,
    forwards: dict[str, Any],
) -> None:
    cloud = {t: samples[Case(Mode.CLOUD_ONLY, t)] for t in TEMPERATURES}

    def speedup(t: float, n: int) -> float:
        return samples[Case(Mode.SPECULATIVE, t, n)].tokens_per_s / cloud[t].tokens_per_s

    best = {t: max(DEPTHS, key=lambda n: speedup(t, n)) for t in TEMPERATURES}
    speculative = samples[Case(Mode.SPECULATIVE, 0.0, PARTS_DEPTH)]
    parts = take_apart(cloud[0.0], speculative, draft_report.greedy.run_ms)
    rounds = [r for r in speculative.rounds if r.num_draft_tokens == PARTS_DEPTH]
    bytes_up = statistics.fmean(r.bytes_up / r.num_draft_tokens for r in rounds)
    aa = samples[again].tokens_per_s / cloud[0.0].tokens_per_s
    loops = repeated_share([result.token_ids for result in cloud[0.0].results])
    measures = [
        judged("main.vs_hf", "cloud-only : transformers generate, tokens/s", vs_hf, "ratio", at_least(1.0)),
        judged(
            "main.speedup_greedy",
            f"speculative : cloud-only, temperature 0, draft length {best[0.0]} "
            f"(repeated 12-grams: {loops:.0%}; A/A {aa:.3f})",
            speedup(0.0, best[0.0]),
            "ratio",
            at_least(1.4),
        ),
        judged(
            "main.speedup_sampled",
            f"the same at temperature 0.8, draft length {best[0.8]}",
            speedup(0.8, best[0.8]),
            "ratio",
            at_least(1.3),
        ),
        judged(
            "main.efficiency",
            f"speed-up : E*t_target / (n*t_draft + t_verify), n = {PARTS_DEPTH}",
            parts.efficiency,
            "ratio",
            at_least(0.8),
        ),
        judged(
            "main.overhead_ms",
            "a round beyond the two models' own time, median",
            parts.overhead_ms,
            "ms",
            at_most(1.5),
        ),
        judged("main.bytes_up", "bytes up per drafted token, whole messages", bytes_up, "bytes", at_most(40)),
        judged(
            "main.draft_ms",
            f"drafted token : bare onnxruntime run, sampled (greedy {draft_report.greedy.ratio:.2f})",
            draft_report.sampled.ratio,
            "ratio",
            at_most(1.5),
        ),
        Measure("main.aa", "cloud-only : cloud-only, tokens/s (A/A)", round(aa, 4), "ratio"),
    ]
    details = {
        "dtype": "float32",
        "cloud_only_tokens_per_s": {str(t): round(cloud[t].tokens_per_s, 1) for t in TEMPERATURES},
        "vs_hf_tokens_per_s": {"ours": round(cloud_tps, 1), "transformers": round(hf_tps, 1)},
        "edge_only_tokens_per_s": round(samples[edge_only].tokens_per_s, 1),
        "speedup": {str(t): {n: round(speedup(t, n), 3) for n in DEPTHS} for t in TEMPERATURES},
        "tokens_per_round": {
            str(t): {n: _tokens_per_round(samples[Case(Mode.SPECULATIVE, t, n)]) for n in DEPTHS}
            for t in TEMPERATURES
        },
        "acceptance_per_position": {
            str(t): {n: samples[Case(Mode.SPECULATIVE, t, n)].per_position() for n in (2, 4, 8)}
            for t in TEMPERATURES
        },
        "repeated_12grams_greedy": round(loops, 4),
        "parts_ms": {name: round(getattr(parts, name), 4) for name in parts.__dataclass_fields__},
        "bytes_per_token": _bytes_per_token(samples),
        "first_token": {"process_s": round(process_s, 3), "request_ms": round(ttft_ms, 2)},
        "draft_sample_us": {
            "greedy": round(draft_report.greedy.sample_us, 1),
            "sampled": round(draft_report.sampled.sample_us, 1),
        },
        "forwards": forwards,
    }
    write_results("main", measures, details)
    for name, value in details.items():
        print(f"{name}: {value}")


def _tokens_per_round(samples: Samples) -> float:
    rounds = samples.rounds
    num_committed: int = sum(r.num_accepted_tokens + 1 for r in rounds)
    return round(num_committed / len(rounds), 3)


def _bytes_per_token(samples: dict[Case, Samples]) -> dict[str, dict[str, float]]:
    found = {}
    for case in (Case(Mode.CLOUD_ONLY, 0.0), Case(Mode.SPECULATIVE, 0.0, 4), Case(Mode.SPECULATIVE, 0.8, 4)):
        results = samples[case].results
        num_tokens = sum(len(r.token_ids) for r in results)
        found[case.name] = {
            "up": round(sum(r.stats.bytes_up for r in results) / num_tokens, 1),
            "down": round(sum(r.stats.bytes_down for r in results) / num_tokens, 1),
        }
    return found


if __name__ == "__main__":
    main()
