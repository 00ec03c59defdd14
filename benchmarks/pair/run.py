"""`make bench-pair`: how good the embedded pair is as a pair, and what its trained draft is worth.

The target's own figures are on the held-out files, as this installation of Python and the packages has them.
The draft's are those of real sessions against a verifier of its own process, with the verification method
`coupled`, on the embedded prompts; texts end where the target ends them. The speed-up is measured as
`make bench-main` measures it, texts of one length.

`--prompts FILE` measures other prompts too. Their figures have the same ids and are kept apart, under
`details.other_prompts`: `measures` is always the embedded prompts'.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pair.drafts import (
    DRAFT_LENGTH,
    LOOKUP,
    TRAINED,
    open_strategies,
    sample_strategies,
    strategy_figures,
)
from benchmarks.results_file import write_results
from benchmarks.sessions import run_cases, warn_of_other_texts
from outrider.common.types import FinishReason
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged, print_table
from outrider.models import EMBEDDED
from outrider.training.common.metrics import overlap, repeated_share
from outrider.training.data.corpus import read_held_out
from outrider.training.data.functions import first_function, is_python
from outrider.training.data.streams import Tokens
from outrider.training.judge.evaluate import EvaluationConfig, Evaluator


def held_out_figures(evaluator: Evaluator, max_files: int | None = None) -> dict[str, Any]:
    """Returns teacher-forced figures on the held-out files as this installation has them, at most
    `max_files`."""
    paths = sysconfig.get_paths()
    texts = dict(list(read_held_out(Path(paths["stdlib"]), Path(paths["purelib"])).items())[:max_files])
    files: dict[str, Tokens] = {}
    bytes_per_token = {}
    for name, text in texts.items():
        ids = evaluator.tokenizer.encode(text).ids
        files[name] = np.asarray([0, *ids], np.uint16)  # behind the separator, as in training
        bytes_per_token[name] = len(text.encode()) / len(ids)
    return {"num_files": len(files), **evaluator.held_out(files, bytes_per_token)}


def sampled_overlap(
    evaluator: Evaluator,
    prompts_ids: Sequence[Sequence[int]],
    texts: Sequence[SessionResult],
    temperature: float,
) -> float:
    """Returns the mean Σ min(target, draft) over the tokens of texts that the target wrote at
    `temperature`."""
    means, lengths = [], []
    for prompt_ids, text in zip(prompts_ids, texts, strict=True):
        count = len(text.token_ids)
        ids = np.asarray([*prompt_ids, *text.token_ids[:-1]], np.int64)
        target, draft = evaluator.target_logits(ids)[-count:], evaluator.draft.logits(ids)[-count:]
        means.append(overlap(target, draft, temperature))
        lengths.append(count)
    return float(np.average(means, weights=lengths))


@dataclass(frozen=True, slots=True)
class _ParseFigures:
    num_parsed: int
    num_cut_off: int  # the function did not end within the tokens there were
    num_prompts: int


def parse_figures(prompts: Sequence[str], texts: Sequence[SessionResult]) -> _ParseFigures:
    """Counts functions that parse with their prompt, and those that were cut off."""
    functions = [first_function(text.text) for text in texts]
    are_cut_off = (
        function == text.text and text.finish_reason is FinishReason.LENGTH
        for function, text in zip(functions, texts, strict=True)
    )
    parsed = map(is_python, prompts, functions)
    return _ParseFigures(sum(parsed), sum(are_cut_off), len(prompts))


TEMPERATURE = 0.8
EXCERPT = 400  # characters of a greedy text that are printed, for a person to judge


@dataclass(frozen=True)
class Plan:
    """Says how much is measured."""

    num_prompts: int | None = None  # of each set; None: all
    num_speed_prompts: int = 12
    num_new: int = 128
    num_new_greedy: int = 256
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    first_layers: tuple[int, ...] = (1, 2, 3)
    max_files: int | None = None


QUICK = Plan(
    num_prompts=4,
    num_speed_prompts=3,
    num_new=48,
    num_new_greedy=96,
    depths=(3, 5),
    first_layers=(1,),
    max_files=2,
)


@dataclass
class Bench:
    """Holds what all prompt sets share."""

    plan: Plan
    address: str
    strategies: dict[str, DraftModel]
    tokenizer: EdgeTokenizer
    evaluator: Evaluator

    def measure(self, prompts: Sequence[Prompt]) -> tuple[list[Measure], dict[str, Any]]:
        """Measures the figures that depend on prompts."""
        sampled, sampled_details = self._measure_drafts(prompts)
        greedy, greedy_details = self._measure_greedy(prompts)
        speed, speed_details = self._measure_speed(prompts[: self.plan.num_speed_prompts])
        details = {"num_prompts": len(prompts), **sampled_details, **greedy_details, **speed_details}
        return [*sampled, *greedy, *speed], details

    def _measure_drafts(self, prompts: Sequence[Prompt]) -> tuple[list[Measure], dict[str, Any]]:
        num_new = self.plan.num_new
        found, alone = sample_strategies(
            self.address, self.strategies, self.tokenizer, prompts, TEMPERATURE, num_new
        )
        prompts_ids = [self.tokenizer.encode(prompt.text) for prompt in prompts]
        overlap = sampled_overlap(self.evaluator, prompts_ids, alone, TEMPERATURE)
        trained, lookup = found[TRAINED], found[LOOKUP]
        ratio = trained.tokens_per_round / lookup.tokens_per_round
        figures = {name: strategy_figures(sessions) for name, sessions in found.items()}
        at = f"temperature {TEMPERATURE:g}"
        measures = [
            judged(
                "pair.overlap",
                f"mean of sum min(p, q), {at}, on text sampled from the target",
                overlap,
                "share",
                at_least(0.75),
            ),
            judged(
                "pair.accept4",
                f"accepted : drafted, draft length {DRAFT_LENGTH}, coupled, {at}, up to {num_new} new tokens",
                trained.acceptance_rate,
                "share",
                at_least(0.5),
            ),
            judged(
                "pair.vs_lookup",
                f"tokens a round, trained draft {trained.tokens_per_round:.2f} : prompt lookup "
                f"{lookup.tokens_per_round:.2f}, draft length {DRAFT_LENGTH}, {at}",
                ratio,
                "ratio",
                at_least(1.4),
            ),
        ]
        for name, values in figures.items():
            if name not in (TRAINED, LOOKUP):
                number = name.split()[1]
                measures.append(
                    Measure(
                        f"pair.first{number}",
                        f"tokens a round, target's {name} as the draft, draft length {DRAFT_LENGTH}, {at} "
                        f"({values['draft_ms_per_token']:.2f} ms a drafted token)",
                        values["tokens_per_round"],
                        "tokens",
                    )
                )
        return measures, {
            "num_sampled_tokens": sum(len(text.token_ids) for text in alone),
            "drafts": figures,
        }

    def _measure_greedy(self, prompts: Sequence[Prompt]) -> tuple[list[Measure], dict[str, Any]]:
        num_new = self.plan.num_new_greedy
        decoder = Decoder(self.address, self.strategies[TRAINED], self.tokenizer)
        texts = []
        for number, prompt in enumerate(prompts):
            print(f"\rgreedy: prompt {number + 1} of {len(prompts)}", end="", flush=True)
            case = Case(ExecutionMode.CLOUD_ONLY, 0.0)
            texts.append(decoder.decode(prompt.text, case, num_new, ignore_eos=False))
        print()
        parsed = parse_figures([prompt.text for prompt in prompts], texts)
        measures = [
            judged(
                "pair.loops",
                f"share of repeated 12-grams, greedy, up to {num_new} new tokens",
                repeated_share([text.token_ids for text in texts]),
                "share",
                at_most(0.3),
            ),
            judged(
                "pair.parse",
                f"greedy functions that parse with their prompt, {parsed.num_parsed} of {parsed.num_prompts}",
                parsed.num_parsed / parsed.num_prompts,
                "share",
                at_least(0.6),
            ),
        ]
        return measures, {
            "num_greedy_tokens": sum(len(text.token_ids) for text in texts),
            "parse": asdict(parsed),
            "first_greedy_text": texts[0].text[:EXCERPT],
        }

    def _measure_speed(self, prompts: Sequence[Prompt]) -> tuple[list[Measure], dict[str, Any]]:
        decoder = Decoder(self.address, self.strategies[TRAINED], self.tokenizer)
        cloud, again = (Case(ExecutionMode.CLOUD_ONLY, TEMPERATURE, n) for n in (0, 1))  # the depth is unused
        drafted = [Case(ExecutionMode.SPECULATIVE, TEMPERATURE, n) for n in self.plan.depths]
        samples = run_cases(decoder, prompts, [cloud, again, *drafted], self.plan.num_new)
        for case in drafted:
            warn_of_other_texts(case.name, samples[case].results, samples[cloud].results)
        base = samples[cloud].tokens_per_s
        speedups = {case.num_speculative_tokens: samples[case].tokens_per_s / base for case in drafted}
        best = max(speedups, key=speedups.__getitem__)
        aa = samples[again].tokens_per_s / base
        measure = judged(
            "pair.speedup",
            f"tokens/s speculative : cloud-only over loopback, temperature {TEMPERATURE:g}, "
            f"draft length {best} (A/A {aa:.3f})",
            speedups[best],
            "ratio",
            at_least(1.8),
        )
        return [measure], {
            "speedup": {str(n): round(value, 3) for n, value in speedups.items()},
            "cloud_only_tokens_per_s": round(base, 1),
        }


def _held_out_measures(figures: dict[str, Any]) -> list[Measure]:
    what = f"{figures['num_files']} held-out files, {figures['num_tokens']} tokens"
    return [
        judged(
            "pair.target_bpb",
            f"target on {what}, bits per byte",
            figures["target_bits_per_byte"],
            "bits",
            at_most(1.0),
        ),
        judged(
            "pair.agree",
            f"argmax of the INT4 draft = the target's, teacher-forced, {what}",
            figures["argmax_agreement"],
            "share",
            at_least(0.68),
        ),
    ]


def run(pair: Path, other_prompts: Path | None, plan: Plan, num_threads: int, is_kept: bool) -> None:
    """Measures a pair and writes or prints the results."""
    embedded = load_prompts(pair / "prompts.jsonl", plan.num_prompts)
    others = load_prompts(other_prompts, plan.num_prompts) if other_prompts else []
    evaluator = Evaluator(pair, replace(EvaluationConfig(), temperature=TEMPERATURE, num_threads=num_threads))
    print("held-out files, teacher-forced ...", flush=True)
    held_out = held_out_figures(evaluator, plan.max_files)
    details: dict[str, Any] = {"plan": asdict(plan), "dtype": "float32", "held_out": held_out}
    flags = ("--num-threads", str(num_threads), "--log-level", "warning")
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_strategies(pair, Path(scratch), plan.first_layers) as strategies,
        running_verifier(*flags, target=pair / "target") as verifier,
    ):
        tokenizer = EdgeTokenizer(pair / "draft" / "tokenizer.json")
        bench = Bench(plan, verifier.address, strategies, tokenizer, evaluator)
        measures, found = bench.measure(embedded)
        details |= found
        other_measures: list[Measure] = []
        if other_prompts is not None:
            print(f"{other_prompts.name}:")
            other_measures, found = bench.measure(others)
            judgements = [asdict(measure) for measure in other_measures]
            details["other_prompts"] = {"file": other_prompts.name, "measures": judgements, **found}
    num_mb = sum(path.stat().st_size for path in pair.rglob("*") if path.is_file()) / 1e6
    size = judged("pair.size", "everything in the pair's directory", num_mb, "MB", at_most(60))
    measures = [*_held_out_measures(held_out), *measures, size]
    if is_kept:
        write_results("pair", measures, details)
    else:
        print_table(measures)
    for name, value in details.items():
        print(f"{name}: {value}")
    if other_prompts is not None:
        print(f"\n{other_prompts.name}, {len(others)} prompts:")
        print_table(other_measures)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=EMBEDDED, help="another pair's directory")
    parser.add_argument("--prompts", type=Path, help='also these prompts: {"id", "prompt"} a line')
    parser.add_argument("--limit", type=int, help="prompts of each set at most (default: all)")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute; writes no results")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    if arguments.limit:
        plan = replace(plan, num_prompts=arguments.limit)
    is_kept = not arguments.quick and arguments.pair.resolve() == EMBEDDED
    run(arguments.pair, arguments.prompts, plan, arguments.num_threads, is_kept)
    return 0


if __name__ == "__main__":
    run_command("bench_pair", main)
