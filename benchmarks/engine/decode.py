"""Cloud-only and co-located decoding against transformers' own, and against speculation from the edge."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.engine.setup import NUM_THREADS, Bench
from benchmarks.hf_target import HfTarget, compare_with_generate
from benchmarks.results_file import Found
from benchmarks.sessions import tpot_s
from benchmarks.timing import alternate, median_ratio
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.load.cloud import CloudStream, decode_all
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED

NUM_TOGETHER = 8
DRAFT_LENGTH = 4


@contextlib.contextmanager
def _decoding(bench: Bench) -> Iterator[Decoder]:
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        yield Decoder(bench.verifier.address, draft, EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json"))


# ---------------------------------------------------------------------------------- against transformers


def measure_vs_hf(bench: Bench) -> Found:
    """Decodes one greedy session a prompt, in turn with `generate`; compared after the first token."""
    with _decoding(bench) as decoder:
        seconds = compare_with_generate(
            decoder, load_prompts(limit=bench.pick(12, 2)), bench.pick(96, 16), NUM_THREADS
        )
    aa = median_ratio(seconds["again"], seconds["ours"])
    measure = judged(
        "engine.vs_hf",
        f"cloud-only : transformers generate, tokens/s, {NUM_THREADS} threads, float32 (A/A {aa:.3f})",
        median_ratio(seconds["transformers"], seconds["ours"]),
        "ratio",
        at_least(1.2),
    )
    rates = {name: round(1 / statistics.median(times), 1) for name, times in seconds.items()}
    return ([measure], {"tokens_per_s": rates, "aa": round(aa, 4)})


def measure_vs_hf_batch(bench: Bench) -> Found:
    """Decodes 8 requests at once, from the first request to the last token, prompts included on both
    sides."""
    num_new = bench.pick(64, 16)
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(limit=NUM_TOGETHER)]
    heads, static = iter(range(1, 1000)), HfTarget(NUM_THREADS)

    def prompts() -> list[list[int]]:
        """Each turn begins with another token, so that no prefix is found again."""
        head = next(heads)
        return [[head, *ids] for ids in texts]

    with contextlib.ExitStack() as stack:

        def ours() -> float:
            return asyncio.run(_decode_together(bench.verifier.address, prompts(), num_new))

        cases: dict[str, Callable[[], float]] = {"ours": ours, "again": ours}
        cases["static"] = lambda: static.generate_s(prompts(), num_new)
        try:
            run = stack.enter_context(HfTarget(NUM_THREADS).batching_continuously())
            run(prompts(), 4)
            cases["continuous"] = lambda: run(prompts(), num_new)
        except Exception as error:  # it is written for GPUs, and says so in many ways
            bench.say(f"continuous batching does not run here: {type(error).__name__}: {error}")
        seconds = alternate(cases, bench.pick(7, 1), lambda turn: bench.say(f"turn {turn + 1}"))
    rival = "continuous" if "continuous" in cases else "static"
    ratios = {name: median_ratio(times, seconds["ours"]) for name, times in seconds.items()}
    measure = judged(
        "engine.vs_hf_batch",
        f"cloud-only, 8 sessions : transformers {rival} batching, tokens/s "
        f"(static {ratios['static']:.2f}; A/A {ratios['again']:.3f})",
        ratios[rival],
        "ratio",
        at_least(1.0),
    )
    total = NUM_TOGETHER * num_new
    rates = {name: round(total / statistics.median(times), 1) for name, times in seconds.items()}
    return ([measure], {"tokens_per_s": rates, "ratios": ratios, "new_tokens_each": num_new})


async def _decode_together(address: str, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    connection = await connect(address)
    seconds = await decode_all([CloudStream(connection, prompt) for prompt in prompts], num_new)
    connection.close()
    return seconds


# ------------------------------------------------------------------------------------------ co-located


def measure_colocated(bench: Bench) -> Found:
    """Compares draft and target in the verifier with the draft at the edge, prompt by prompt in turn."""
    prompts, num_new = load_prompts(limit=bench.pick(12, 2)), bench.pick(96, 16)
    found: dict[str, Any] = {}
    ratios: dict[float, float] = {}
    with _decoding(bench) as decoder:
        for temperature in (0.0, 0.8):
            seconds = _alternate_modes(bench, decoder, prompts, temperature, num_new)
            ratios[temperature] = median_ratio(seconds["edge"], seconds["colocated"])
            found[f"temperature {temperature:g}"] = {
                "tokens_per_s": {name: round(1 / statistics.median(t), 1) for name, t in seconds.items()},
                "ratio": round(ratios[temperature], 4),
                "aa": round(median_ratio(seconds["edge"], seconds["again"]), 4),
            }
    aa = found["temperature 0"]["aa"]
    measure = judged(
        "engine.colocated",
        f"co-located : edge-cloud speculation over loopback, tokens/s, n = {DRAFT_LENGTH}, temperature 0 "
        f"(0.8: {ratios[0.8]:.2f}; A/A {aa:.3f})",
        ratios[0.0],
        "ratio",
        at_least(1.0),
    )
    return ([measure], found)


def _alternate_modes(
    bench: Bench, decoder: Decoder, prompts: Sequence[Prompt], temperature: float, num_new: int
) -> dict[str, list[float]]:
    edge = Case(ExecutionMode.SPECULATIVE, temperature, DRAFT_LENGTH)
    cases = {
        "edge": edge,
        "colocated": Case(ExecutionMode.CO_LOCATED, temperature, DRAFT_LENGTH),
        "again": edge,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        decoder.decode(prompts[0].text, case, 8)
    for number, prompt in enumerate(prompts):
        results = {name: decoder.decode(prompt.text, case, num_new) for name, case in cases.items()}
        assert results["colocated"].token_ids == results["edge"].token_ids, f"{prompt.id}: the texts differ"
        for name, result in results.items():
            seconds[name].append(tpot_s(result))
        bench.say(f"temperature {temperature:g}, prompt {number + 1} of {len(prompts)}")
    return seconds
