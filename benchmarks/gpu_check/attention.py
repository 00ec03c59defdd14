"""Attention over the paged pool in each way: its error, its time, and whether a row's bits depend on others."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_check.shape import SHAPE_7B, SHAPE_TOY, Shape
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import ATTENTIONS, Attention, NotHere
from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionRule
from outrider.experiments.shared.results import at_most
from outrider.kernels.kv_pool import KVPool

CASES = tuple(
    itertools.product((1, 5, 64), (128, 2048, 16_384), (1, 4, 16, 64))
)  # queries, context, sessions
TOY_CASES = ((1, 20, 1), (1, 300, 1), (5, 20, 4), (5, 300, 4))
SHOWN = (5, 2048, 16)  # of the cases, whose rate is in the table
TOY_SHOWN = (5, 300, 4)


@dataclass
class Pools:
    """Holds the keys and values of one layer, and the ids of its blocks in the order in which they are given out."""

    keys: KVPool
    values: KVPool
    block_ids: list[int]

    def sequences(self, num_sequences: int, num_queries: int, length: int) -> list[PackedSequence]:
        """Returns sequences of one length, in blocks from all over the pool."""
        num_blocks = -(-length // self.keys.block_size)
        return [
            PackedSequence(
                i * num_queries, num_queries, length, self.block_ids[i * num_blocks : (i + 1) * num_blocks]
            )
            for i in range(num_sequences)
        ]


def run(setting: Setting, report: Report) -> None:
    """Runs every case in every way."""
    _run_cases(setting, report)
    shape, dtype = setting.pick(SHAPE_7B, SHAPE_TOY), setting.dtype()
    bandwidth = setting.copy_gbps()
    for name, attention in ATTENTIONS.items():
        try:
            _run_variant(setting, report, shape, dtype, name, attention, bandwidth)
        except NotHere as reason:
            report.skip(name, str(reason))


def _run_cases(setting: Setting, report: Report) -> None:
    """Checks our kernel's values and bits: chains and trees in one batch, in every dtype."""
    if importlib.util.find_spec("triton") is None:
        report.skip("cases", "Triton is not installed")
        return
    from benchmarks.gpu_check.attention_cases import MAX_ERROR, Sizes, measure_kernel

    sizes, split_tokens = setting.pick((Sizes(28, 4, 128), 512), (Sizes(3, 1), 64))
    found = measure_kernel([sizes], sizes, setting.device, split_tokens, setting.pick(8, 1))
    report.note(cases=asdict(found))
    for dtype, bound in MAX_ERROR.items():
        name = str(dtype).removeprefix("torch.")
        what = "largest difference from float64, chains and trees"
        report.check(f"gpu.kernel_error.{name}", what, found.errors[name], "", at_most(bound))
    what = "rows whose bits change with neighbours, queries, blocks or a tree in place of the chain"
    report.check("gpu.kernel_bits", what, found.num_changed, "rows", NONE)


def _run_variant(
    setting: Setting,
    report: Report,
    shape: Shape,
    dtype: torch.dtype,
    name: str,
    attention: Attention,
    bandwidth: float,
) -> None:
    cases = setting.pick(CASES, TOY_CASES)
    most = max(context + queries for queries, context, _ in cases)
    planner, block_size = attention.make(shape, most, dtype, torch.device(setting.device))
    pools = make_pools(setting, shape, dtype, block_size, max(sessions for *_, sessions in cases) * most)
    found: list[dict[str, Any]] = []
    until_s = setting.seconds_left / 2
    for case in cases:
        if setting.seconds_left < until_s and name != list(ATTENTIONS)[-1]:
            report.skip(f"{name} from {case} on", "half of the stage's time is over")
            break
        found.append(_run_case(setting, shape, planner, pools, case))
    report.note(**{name: found})
    error = max(each["error"] for each in found)
    target = at_most(2e-2 if dtype == torch.bfloat16 else 1e-5)
    report.check(f"gpu.attention_error.{name}", "largest difference from float64", error, "", target)
    num_changed = sum(not (each["is_alone_equal"] and each["is_single_equal"]) for each in found)
    what = f"of {len(found)} cases, those where a row's bits change with neighbours or its number of queries"
    report.figure(
        f"gpu.attention_bits.{name}", what, num_changed, "cases", NONE if attention.has_exact_rows else None
    )
    shown = [each for each in found if each["case"] == list(setting.pick(SHOWN, TOY_SHOWN))]
    for each in shown:
        what = (
            f"{each['case'][2]} x {each['case'][0]} rows over {each['case'][1]} tokens : one read of their KV"
        )
        report.figure(f"gpu.attention.{name}", what, each["gbps"] and bandwidth / each["gbps"], "ratio")


def make_pools(setting: Setting, shape: Shape, dtype: torch.dtype, block_size: int, num_tokens: int) -> Pools:
    """Returns random pools with room for `num_tokens`; block 0 is given to nobody."""
    num_blocks = num_tokens // block_size + 65
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator(setting.device).manual_seed(0)
    keys, values = (
        torch.randn(size, dtype=dtype, device=setting.device, generator=generator) for _ in range(2)
    )
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0))
    return Pools(KVPool(keys), KVPool(values), (order + 1).tolist())


def _run_case(
    setting: Setting, shape: Shape, planner: Any, pools: Pools, case: tuple[int, int, int]
) -> dict[str, Any]:
    num_queries, context, num_sessions = case
    length = context + num_queries
    sequences = pools.sequences(num_sessions, num_queries, length)
    generator = torch.Generator(setting.device).manual_seed(1)
    size = (shape.num_heads, num_sessions * num_queries, shape.head_dim)
    query = torch.randn(size, dtype=pools.keys.dtype, device=setting.device, generator=generator)

    def attend(queries: torch.Tensor, of: Sequence[PackedSequence]) -> torch.Tensor:
        out: torch.Tensor = planner.plan(of)(queries, pools.keys, pools.values, AttentionRule())
        return out

    out = attend(query, sequences)
    last = sequences[-1]
    alone = PackedSequence(0, num_queries, length, last.block_ids)
    single = PackedSequence(0, 1, length, last.block_ids)
    plan = planner.plan(sequences)
    attend_ms = setting.device_ms(lambda: plan(query, pools.keys, pools.values, AttentionRule()), num_turns=5)
    num_bytes = 2 * num_sessions * length * shape.num_kv_heads * shape.head_dim * query.element_size()
    expected = plain_attention(query[:, last.start : last.stop], pools, last)
    return {
        "case": list(case),
        "ms": attend_ms,
        "gbps": num_bytes / 1e6 / attend_ms,
        "error": float((out[last.start : last.stop].double() - expected).abs().max()),
        "is_alone_equal": torch.equal(
            attend(query[:, last.start : last.stop], [alone]), out[last.start : last.stop]
        ),
        "is_single_equal": torch.equal(attend(query[:, -1:], [single])[0], out[-1]),
    }


def plain_attention(query: torch.Tensor, pools: Pools, sequence: PackedSequence) -> torch.Tensor:
    """Returns [queries, heads, head_dim] in float64 for queries [heads, queries, head_dim] of one sequence."""
    blocks = torch.tensor(sequence.block_ids, device=query.device)
    num_groups = query.shape[0] // pools.keys.num_kv_heads
    keys, values = (
        pool.rows[blocks]
        .flatten(0, 1)[: sequence.length]
        .transpose(0, 1)
        .double()
        .repeat_interleave(num_groups, 0)
        for pool in (pools.keys, pools.values)
    )
    scores = query.double() @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
    last_seen = torch.arange(sequence.past, sequence.length, device=query.device)[:, None]
    scores.masked_fill_(torch.arange(sequence.length, device=query.device) > last_seen, -torch.inf)
    out: torch.Tensor = (scores.softmax(-1) @ values).transpose(0, 1)
    return out
