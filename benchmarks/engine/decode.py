"""Cloud-only and co-located decoding against transformers' own, and against speculation from the edge."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.engine.setup import NUM_THREADS, Bench, Found, alternate, median_ratio
from outrider.edge_client.core.options import Mode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.load.cloud import CloudStream, decode_all
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED

NUM_TOGETHER = 8
DRAFT_LENGTH = 4
MAX_BATCH_S = 120.0
CLOUD_ONLY = Case(Mode.CLOUD_ONLY, 0.0)


class HfTarget:
    """The embedded target in transformers, float32, its own cache, on as many threads as the verifier."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from outrider.cloud_verifier.backends.loading import quiet_transformers

        torch.set_num_threads(NUM_THREADS)
        with quiet_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(
                EMBEDDED / "target", dtype=torch.float32, local_files_only=True
            ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Seconds of one static batch, left-padded, greedy, `num_new` tokens each."""
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        begin_s = time.perf_counter()
        self.model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=num_new, max_new_tokens=num_new
        )
        return time.perf_counter() - begin_s

    @contextlib.contextmanager
    def batching_continuously(self) -> Iterator[Callable[[Sequence[Sequence[int]], int], float]]:
        """Its continuous batching: `run(prompts, num_new)` gives seconds. Switches the model's attention."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        pool = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
        with self.model.continuous_batching_context_manager(
            generation, timeout=10.0, continuous_batching_config=pool
        ) as manager:

            def run(prompts: Sequence[Sequence[int]], num_new: int) -> float:
                begin_s = time.perf_counter()
                manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_new)
                lengths: list[int] = []
                while len(lengths) < len(prompts) and time.perf_counter() < begin_s + MAX_BATCH_S:
                    if (result := manager.get_result(timeout=1.0)) is not None and result.is_finished():
                        lengths.append(len(result.generated_tokens))
                if lengths != [num_new] * len(prompts):
                    raise RuntimeError(f"continuous batching gave texts of {lengths} tokens")
                return time.perf_counter() - begin_s

            yield run


@contextlib.contextmanager
def _decoding(bench: Bench) -> Iterator[Decoder]:
    """The embedded pair: the verifier in its own process, the edge here."""
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        yield Decoder(bench.verifier.address, draft, EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json"))


# ---------------------------------------------------------------------------------- against transformers


def measure_vs_hf(bench: Bench) -> Found:
    """One greedy session, after its first token, prompt by prompt in turn with `generate`."""
    prompts, num_new = load_prompts(limit=bench.pick(12, 2)), bench.pick(96, 16)
    target = HfTarget()
    with _decoding(bench) as decoder:
        seconds: dict[str, list[float]] = {"ours": [], "transformers": [], "again": []}
        for number, prompt in enumerate(prompts):
            ids = [decoder.tokenizer.encode(prompt.text)]
            if number == 0:
                decoder.decode(prompt.text, CLOUD_ONLY, 8)
                target.generate_s(ids, 2)
            seconds["ours"].append(_s_per_token(decoder.decode(prompt.text, CLOUD_ONLY, num_new)))
            whole_s, first_s = target.generate_s(ids, num_new), target.generate_s(ids, 1)
            seconds["transformers"].append((whole_s - first_s) / (num_new - 1))
            seconds["again"].append(_s_per_token(decoder.decode(prompt.text, CLOUD_ONLY, num_new)))
            bench.say(f"prompt {number + 1} of {len(prompts)}")
    aa = median_ratio(seconds["again"], seconds["ours"])
    measure = judged(
        "engine.vs_hf",
        f"cloud-only : transformers generate, tokens/s, {NUM_THREADS} threads, float32 (A/A {aa:.3f})",
        median_ratio(seconds["transformers"], seconds["ours"]),
        "ratio",
        at_least(1.2),
    )
    rates = {name: round(1 / statistics.median(times), 1) for name, times in seconds.items()}
    return Found([measure], {"tokens_per_s": rates, "aa": round(aa, 4)})


def measure_vs_hf_batch(bench: Bench) -> Found:
    """8 requests at once, from the first request to the last token, prompts included on both sides."""
    num_new = bench.pick(64, 16)
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(limit=NUM_TOGETHER)]
    heads, static = iter(range(1, 1000)), HfTarget()

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
            run = stack.enter_context(HfTarget().batching_continuously())
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
    return Found([measure], {"tokens_per_s": rates, "ratios": ratios, "new_tokens_each": num_new})


async def _decode_together(address: str, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    connection = await connect(address)
    seconds = await decode_all([CloudStream(connection, prompt) for prompt in prompts], num_new)
    connection.close()
    return seconds


def _s_per_token(result: SessionResult) -> float:
    times_ns = result.stats.token_times_ns
    return (times_ns[-1] - times_ns[0]) / 1e9 / (len(times_ns) - 1)


# ------------------------------------------------------------------------------------------ co-located


def measure_colocated(bench: Bench) -> Found:
    """Draft and target in the verifier against the draft at the edge, prompt by prompt in turn."""
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
    return Found([measure], found)


def _alternate_modes(
    bench: Bench, decoder: Decoder, prompts: Sequence[Prompt], temperature: float, num_new: int
) -> dict[str, list[float]]:
    edge = Case(Mode.SPECULATIVE, temperature, DRAFT_LENGTH)
    cases = {"edge": edge, "colocated": Case(Mode.CO_LOCATED, temperature, DRAFT_LENGTH), "again": edge}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        decoder.decode(prompts[0].text, case, 8)
    for number, prompt in enumerate(prompts):
        results = {name: decoder.decode(prompt.text, case, num_new) for name, case in cases.items()}
        assert results["colocated"].token_ids == results["edge"].token_ids, f"{prompt.id}: the texts differ"
        for name, result in results.items():
            seconds[name].append(_s_per_token(result))
        bench.say(f"temperature {temperature:g}, prompt {number + 1} of {len(prompts)}")
    return seconds
