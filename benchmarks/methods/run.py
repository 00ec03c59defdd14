"""`make bench-methods`: every verification method, with the embedded pair, on the held-out prompts.

Texts are decoded through the product's own edge and a verifier in another process; their bytes are the
link's own count. Tokens a second at a round trip of 50 ms are computed: the measured wall time of the same
texts, plus 50 ms for each round trip (rounds are synchronous). Whether a method is exact is asked of
`tests/exactness`. `--quick` is a smoke test and writes no file.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.methods.kernels import measure_cpu_verify
from benchmarks.results_file import ROOT, write_results
from outrider.common.methods import MAX_SUPPORT_SIZE
from outrider.common.types import Method
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged, print_table
from outrider.models import EMBEDDED


def ask_tests(*, is_quick: bool) -> tuple[Measure, dict[str, Any]]:
    """Returns how many exact methods pass every test that names them.

    None of them counts where a test fails that names no method: a control that was not detected, an oracle.
    """
    results = _run_tests(is_quick)
    exact = [str(method) for method in Method if method.is_exact]
    failed = sorted(name for name, is_passed in results.items() if not is_passed)
    are_controls_right = all(_names(name, exact) for name in failed)
    passed = [
        method
        for method in exact
        if are_controls_right
        and any(_names(name, [method]) for name in results)
        and not any(_names(name, [method]) for name in failed)
    ]
    names = ", ".join(passed) or "none"
    measure = judged(
        "methods.exact",
        f"exact methods that pass enumeration and statistics, controls detected: {names}",
        len(passed),
        "methods",
        at_least(len(exact)),
    )
    return measure, {"num_tests": len(results), "failed": failed}


def _run_tests(is_quick: bool) -> dict[str, bool]:
    marks = () if is_quick else ("-m", "slow or not slow", "--timeout", "1800")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/exactness", *marks, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    return {
        f"{case.get('classname')}::{case.get('name')}": not any(
            child.tag in ("failure", "error") for child in case
        )
        for case in cases
    }


def _names(test: str, methods: Collection[str]) -> bool:
    return not set(test.partition("[")[2].rstrip("]").split("-")).isdisjoint(methods)


DRAFT_LENGTH = 4
RTT_S = 0.05
SETTINGS = ((0.0, 1.0), (0.7, 1.0), (0.7, 0.9), (1.0, 1.0), (1.0, 0.9))  # temperature, top-p
SUPPORT_SIZES = (8, 16, 32, MAX_SUPPORT_SIZE)
SHIPPED = Case(ExecutionMode.SPECULATIVE, 0.7, DRAFT_LENGTH)


@dataclass(frozen=True)
class Plan:
    """Says how much is measured."""

    num_prompts: int = 8  # of the grid over all methods and settings
    num_new: int = 96
    num_compared_prompts: int = 24  # of the two ratios between methods, which are close to 1
    num_compared_new: int = 128
    num_seeds: int = 3
    num_repeats: int = 15  # of what is timed in this process


QUICK = Plan(
    num_prompts=1, num_new=24, num_compared_prompts=2, num_compared_new=48, num_seeds=1, num_repeats=3
)


def _figures_of(results: Sequence[SessionResult]) -> dict[str, float]:
    rounds = [r for result in results for r in result.stats.rounds if r.is_answered]
    num_drafted = sum(r.num_draft_tokens for r in rounds)
    num_tokens = sum(len(result.token_ids) for result in results)
    in_rounds = num_tokens - len(results)  # the first of each came with its opening
    wall_s = sum(r.stats.token_times_ns[-1] - r.stats.token_times_ns[0] for r in results) / 1e9
    return {
        "acceptance_rate": _ratio(sum(r.num_accepted_tokens for r in rounds), num_drafted),
        "tokens_per_round": _ratio(in_rounds, len(rounds)),
        "bytes_up_per_draft_token": _ratio(sum(r.bytes_up for r in rounds), num_drafted),
        "bytes_up_per_token": _ratio(sum(result.stats.bytes_up for result in results), num_tokens),
        "bytes_down_per_token": _ratio(sum(result.stats.bytes_down for result in results), num_tokens),
        "verifier_ms": round(statistics.median(r.verifier_ms for r in rounds), 3),
        "tokens_per_s": _ratio(in_rounds, wall_s),
        "tokens_per_s_at_rtt": _ratio(in_rounds, wall_s + RTT_S * len(rounds)),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4)


# ------------------------------------------------------------------------------------------ texts


def _decode_all(decoder: Decoder, cases: Iterable[Case], prompts: Sequence[Prompt], plan: Plan) -> list[Any]:
    """Returns one row a case; the cases take turns prompt by prompt, so that no hour is one method's own."""
    cases = list(cases)
    results: dict[Case, list[SessionResult]] = {case: [] for case in cases}
    for number, prompt in enumerate(prompts, start=1):
        for case in cases:
            results[case].append(decoder.decode(prompt.text, case, plan.num_new, seed=number))
        print(f"  prompt {number} of {len(prompts)}", flush=True)
    return [{**_facts(case), **_figures_of(found)} for case, found in results.items()]


def _facts(case: Case) -> dict[str, Any]:
    return {
        "method": str(case.method),
        "temperature": case.temperature,
        "top_p": case.top_p,
        "support_size": case.support_size,
    }


@dataclass(frozen=True)
class _Compared:
    """Holds two methods' means of one figure over the same prompts and seeds, and the ratio's standard
    error."""

    upper: float
    lower: float
    ratio: float
    standard_error: float
    num_rounds: int


def _compare(
    decoder: Decoder, upper: Case, lower: Case, prompts: Sequence[Prompt], plan: Plan, *, is_acceptance: bool
) -> _Compared:
    """Compares acceptance rate, or tokens a round, of `upper` and `lower`; the error is by texts."""
    parts: list[tuple[float, float, float, float]] = []  # of each text: part and whole, upper and lower
    num_rounds = 0
    for seed in range(1, plan.num_seeds + 1):
        for number, prompt in enumerate(prompts):
            pair = []
            for case in (upper, lower):
                result = decoder.decode(prompt.text, case, plan.num_compared_new, seed=1000 * seed + number)
                rounds = [r for r in result.stats.rounds if r.is_answered]
                num_rounds += len(rounds)
                if is_acceptance:
                    pair.append(float(sum(r.num_accepted_tokens for r in rounds)))
                    pair.append(float(sum(r.num_draft_tokens for r in rounds)))
                else:
                    pair.append(len(result.token_ids) - 1.0)  # the first came with the opening
                    pair.append(float(len(rounds)))
            parts.append((pair[0], pair[1], pair[2], pair[3]))
    sums = [sum(column) for column in zip(*parts, strict=True)]
    mean_upper, mean_lower = sums[0] / sums[1], sums[2] / sums[3]
    errors = [  # linearised: of a ratio of ratios of sums
        (part - mean_upper * whole) / sums[0] - (low_part - mean_lower * low_whole) / sums[2]
        for part, whole, low_part, low_whole in parts
    ]
    ratio = mean_upper / mean_lower
    standard_error = ratio * math.sqrt(sum(error * error for error in errors))
    return _Compared(
        round(mean_upper, 4), round(mean_lower, 4), round(ratio, 4), round(standard_error, 4), num_rounds
    )


# -------------------------------------------------------------------------------------------- main


def _measure_texts(plan: Plan, prompts: Sequence[Prompt]) -> tuple[list[Measure], dict[str, Any]]:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    threads = ("--num-threads", str(os.cpu_count() or 1))
    with (
        running_verifier("--log-level", "error", *threads) as verifier,
        create_draft_model("model", EMBEDDED / "draft") as draft,
    ):
        decoder = Decoder(verifier.address, draft, tokenizer)
        grid = [
            replace(SHIPPED, method=method, temperature=temperature, top_p=top_p)
            for temperature, top_p in SETTINGS
            for method in Method
        ]
        sizes = [
            replace(SHIPPED, method=Method.SPARSE, support_size=size, temperature=temperature)
            for temperature in (0.7, 1.0)
            for size in SUPPORT_SIZES
        ]
        decoder.decode(prompts[0].text, SHIPPED, plan.num_new)  # warms both sides up
        rows = _decode_all(decoder, grid, prompts[: plan.num_prompts], plan)
        size_rows = _decode_all(decoder, sizes, prompts[: plan.num_prompts], plan)
        compared = prompts[: plan.num_compared_prompts]
        sparse = replace(SHIPPED, method=Method.SPARSE)
        loss = _compare(decoder, SHIPPED, sparse, compared, plan, is_acceptance=True)
        print(f"  coupled : sparse {loss}", flush=True)
        hot = replace(sparse, temperature=1.0)
        gain = _compare(decoder, replace(hot, method=Method.BLOCK), hot, compared, plan, is_acceptance=False)
        print(f"  block : sparse {gain}", flush=True)
    most = max(rows, key=lambda row: row["bytes_up_per_draft_token"])
    measures = [
        judged(
            "methods.coupled_loss",
            f"acceptance, temperature 0.7: coupled {loss.upper:.3f} : sparse {loss.lower:.3f} "
            f"(standard error of the ratio {loss.standard_error:.3f})",
            loss.ratio,
            "ratio",
            at_least(0.95),
        ),
        judged(
            "methods.block_gain",
            f"tokens a round, temperature 1: block {gain.upper:.3f} : sparse {gain.lower:.3f} "
            f"(standard error of the ratio {gain.standard_error:.3f})",
            gain.ratio,
            "ratio",
            at_least(1.0),
        ),
        judged(
            "methods.bytes_up",
            f"bytes up per drafted token, the most of all methods and settings: {most['method']} at "
            f"temperature {most['temperature']:g}",
            most["bytes_up_per_draft_token"],
            "bytes",
            at_most(100),
        ),
    ]
    details = {
        "texts": rows,
        "sparse_by_support_size": size_rows,
        "coupled_loss": asdict(loss),
        "block_gain": asdict(gain),
    }
    return measures, details


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'method':<17}{'T':>5}{'top-p':>6}{'ids':>5}{'accept':>8}{'tok/round':>10}{'up/token':>9}", end=""
    )
    print(f"{'down/token':>11}{'tok/s':>8}{f'at {RTT_S * 1e3:.0f} ms':>9}")
    for row in rows:
        print(
            f"{row['method']:<17}{row['temperature']:>5g}{row['top_p']:>6g}{row['support_size']:>5}"
            f"{row['acceptance_rate']:>8.3f}{row['tokens_per_round']:>10.2f}{row['bytes_up_per_token']:>9.1f}"
            f"{row['bytes_down_per_token']:>11.1f}{row['tokens_per_s']:>8.0f}{row['tokens_per_s_at_rtt']:>9.1f}"
        )


def _judge_cpu_verify(figures: dict[str, float]) -> Measure:
    return judged(
        "methods.cpu_verify",
        f"16 sessions x 5 positions x 152,064 logits, temperature 0.8: coupled {figures['coupled_ms']:.1f} "
        f"ms : one torch.logsumexp of them {figures['logsumexp_ms']:.1f} ms (sparse "
        f"{figures['sparse_ratio']:.2f}, A/A {figures['aa']:.2f})",
        figures["coupled_ratio"],
        "ratio",
        at_most(1.5),
    )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="other prompts than the embedded ones")
    parser.add_argument("--quick", action="store_true", help="everything shortened")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    prompts = load_prompts(arguments.prompts)
    print("verification alone", flush=True)
    cpu_verify = measure_cpu_verify(plan.num_repeats)
    print("texts", flush=True)
    measures, details = _measure_texts(plan, prompts)
    print("exactness: the tests", flush=True)
    exact, exact_details = ask_tests(is_quick=arguments.quick)
    measures = [exact, *measures, _judge_cpu_verify(cpu_verify)]
    details = {
        "num_draft_tokens": DRAFT_LENGTH,
        "dtype": "float32",
        **details,
        "cpu_verify": cpu_verify,
        "exact": exact_details,
        "gpu_verify": "not measured: no GPU at hand",
    }
    _print_rows([*details["texts"], *details["sparse_by_support_size"]])
    if arguments.quick:
        print_table(measures)
    else:
        write_results("methods", measures, details)
    return 0


if __name__ == "__main__":
    run_command("bench_methods", main)
