"""Measures over loopback what long prompts cost, and eight texts at once against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.setup import NUM_THREADS, Bench
from benchmarks.hf_target import HfTarget
from benchmarks.results_file import Found
from benchmarks.timing import alternate, median_ratio
from outrider.common.types import TokenIds
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.load.cloud import CloudStream, Opening, decode_all, open_and_close
from outrider.experiments.load.command import LoadPlan, open_streams, run_closed
from outrider.experiments.load.report import Tally, percentile_ms
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_least, at_most, judged
from outrider.models import EMBEDDED

REOPENED_TOKENS, STALLING_TOKENS = 1000, 2000
NUM_BESIDE, THINK_S = 4, 0.005
NUM_TOGETHER = 8
VOCAB = 8000  # ids below it exist in the embedded tokenizer


# ---------------------------------------------------------------------------------------- prefix_ttft


def measure_prefix_ttft(bench: Bench) -> Found:
    """Opens a prompt of 1,000 tokens, closes it, and opens it again by another session of the same tenant."""
    return asyncio.run(_measure_prefix_ttft(bench, bench.verifier.address))


async def _measure_prefix_ttft(bench: Bench, address: str) -> Found:
    connection = await connect(address)
    cold, again, other = [], [], []
    for turn in range(bench.pick(12, 3) + 1):
        prompt, stranger = _random_ids(REOPENED_TOKENS, 2 * turn), _random_ids(REOPENED_TOKENS, 2 * turn + 1)
        first = await open_and_close(connection, prompt)
        second = await open_and_close(connection, prompt)
        third = await open_and_close(connection, stranger)
        assert first.opened.first_token == second.opened.first_token, "the reopened text differs"
        if turn:  # the first turn warms up
            cold.append(first.ttft_s)
            again.append(second.ttft_s)
            other.append(third.ttft_s)
    connection.close()
    aa = median_ratio(other, cold)
    measure = judged(
        "engine.prefix_ttft",
        f"TTFT of a reopened 1,000-token prompt : cold (another cold one : cold, A/A {aa:.3f})",
        median_ratio(again, cold),
        "ratio",
        at_most(0.2),
    )
    details = {
        "cold_ms": round(1e3 * statistics.median(cold), 2),
        "reopened_ms": round(1e3 * statistics.median(again), 2),
        "aa": round(aa, 4),
    }
    return ([measure], details)


def _random_ids(num_tokens: int, seed: int) -> TokenIds:
    numbers = random.Random(seed)
    return tuple(numbers.randrange(1, VOCAB) for _ in range(num_tokens))


# -------------------------------------------------------------------------------------- prefill_stall


@dataclass
class _StallSamples:
    """Holds latencies of rounds that ended while nothing else ran, and while a prompt prefilled; seconds."""

    idle: list[float]
    idle_again: list[float]
    stalled: list[float]
    openings: list[Opening]
    num_refused: int


def measure_prefill_stall(bench: Bench) -> Found:
    """Runs 4 sessions of rounds, 5 ms between them; every so often a prompt of 2,000 tokens beside them."""
    samples = asyncio.run(_sample_stalls(bench, bench.verifier.address))
    idle_ms, stalled_ms = (percentile_ms(sorted(s), 0.99) for s in (samples.idle, samples.stalled))
    chunk_ms = 1e3 * statistics.median(
        o.opened.metrics.forward_ns / 1e9 / o.num_chunks for o in samples.openings
    )
    aa = percentile_ms(sorted(samples.idle_again), 0.99) / idle_ms
    measure = judged(
        "engine.prefill_stall",
        f"(others' p99 while 2,000 tokens prefill - one chunk of {chunk_ms:.0f} ms) : idle (A/A {aa:.2f}; "
        f"{samples.num_refused} of their rounds refused)",
        (stalled_ms - chunk_ms) / idle_ms,
        "ratio",
        ("<= 2", lambda ratio: ratio <= 2 and samples.num_refused == 0),
    )
    details: dict[str, Any] = {
        "idle_p99_ms": idle_ms,
        "idle_p50_ms": percentile_ms(sorted(samples.idle), 0.5),
        "stalled_p99_ms": stalled_ms,
        "stalled_p50_ms": percentile_ms(sorted(samples.stalled), 0.5),
        "chunk_ms": round(chunk_ms, 2),
        "chunks_a_prompt": statistics.median(o.num_chunks for o in samples.openings),
        "prefill_ttft_ms": round(1e3 * statistics.median(o.ttft_s for o in samples.openings), 1),
        "rounds": {"idle": len(samples.idle), "stalled": len(samples.stalled)},
        "refused": samples.num_refused,
        "aa": round(aa, 4),
    }
    return ([measure], details)


async def _sample_stalls(bench: Bench, address: str) -> _StallSamples:
    tally, idle_s, num_turns = Tally(), bench.pick(0.8, 0.4), bench.pick(20, 3)
    plan = LoadPlan(NUM_BESIDE, think_s=THINK_S)
    windows: dict[str, list[tuple[float, float]]] = {"idle": [], "again": [], "stalled": []}
    openings = []
    connection, is_over = await connect(address), asyncio.Event()
    async with open_streams(address, bench.recording, plan, tally) as streams:
        rounds = [asyncio.create_task(run_closed(s, THINK_S, tally, is_over.is_set)) for s in streams]
        await asyncio.sleep(idle_s)
        for turn in range(num_turns):
            for name in ("idle", "again"):
                begin_s = time.perf_counter()
                await asyncio.sleep(idle_s)
                windows[name].append((begin_s, time.perf_counter()))
            openings.append(await open_and_close(connection, _random_ids(STALLING_TOKENS, 1000 + turn)))
            windows["stalled"].append((openings[-1].begin_s, openings[-1].end_s))
        is_over.set()
        await asyncio.gather(*rounds)
    connection.close()
    assert not tally.errors and not tally.num_mismatches, (tally.errors, tally.mismatches)

    def within(name: str) -> list[float]:
        return [r.latency_s for r in tally.rounds if any(a <= r.end_s < b for a, b in windows[name])]

    return _StallSamples(within("idle"), within("again"), within("stalled"), openings, len(tally.refusals))


# ---------------------------------------------------------------------------------------- vs_hf_batch


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
