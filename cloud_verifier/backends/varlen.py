"""Paged attention by torch's own variable-length kernel, through a block table. CUDA only.

`find_page_size` compares the kernel with plain attention before it is used: which page sizes it takes, and
whether it takes a block table at all, depends on torch, on its flash-attention and on the GPU. One KV split
always: split over several, torch 2.13's flash-attention 2 writes rows of a ragged batch to the wrong place
(pytorch issue 194167), and with one a sequence's numbers do not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch

from outrider.cloud_verifier.backends.attention import AttentionPlanner, AttentionRule, PagedAttention
from outrider.cloud_verifier.backends.packing import PackedSequence, make_varlen_index
from outrider.cloud_verifier.backends.sdpa import SdpaPlanner

logger = logging.getLogger(__name__)

VarlenKernel = Callable[..., torch.Tensor]
NEEDED_ARGUMENTS = {"block_table", "enable_gqa", "num_splits", "seqused_k"}  # torch 2.11 has none of them
PAGE_SIZES = (16, 256)  # flash-attention 3 takes any, 2 takes multiples of 256
MAX_PROBE_ERROR = 2e-2  # bfloat16 rounds at 2^-8 of values below about 3


@functools.cache
def find_kernel() -> VarlenKernel | None:
    """Returns torch's variable-length attention; None, with one warning, where the installed torch has none
    that reads a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        missing = {"varlen_attn"}
    else:
        missing = NEEDED_ARGUMENTS - inspect.signature(varlen_attn).parameters.keys()
        if not missing:
            return cast(VarlenKernel, varlen_attn)  # a pair only where `return_aux` asks for one
    logger.warning(
        "variable-length attention is not used (gathered blocks instead): torch %s lacks %s; torch 2.12 has them",
        torch.__version__,
        ", ".join(sorted(missing)),
    )
    return None


class VarlenPlanner(AttentionPlanner):
    """Implements `AttentionPlanner` with one kernel call a layer, for any lengths; for trees, which the kernel does
    not know, with another planner."""

    def __init__(self, kernel: VarlenKernel, device: torch.device, trees: AttentionPlanner) -> None:
        self._kernel = kernel
        self._device = device
        self._trees = trees

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        chains = [each for each in sequences if each.tree is None]
        if len(chains) == len(sequences):
            return self._plan_chains(sequences)
        branching = [each for each in sequences if each.tree is not None]
        parts = [(self._rows(branching), self._trees.plan(_repacked(branching)))]
        if chains:
            parts.append((self._rows(chains), self._plan_chains(_repacked(chains))))

        def attend(
            query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, rule: AttentionRule
        ) -> torch.Tensor:
            out = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
            for rows, attention in parts:
                out[rows] = attention(query[:, rows], key_pool, value_pool, rule)
            return out

        return attend

    def _rows(self, sequences: Sequence[PackedSequence]) -> torch.Tensor:
        rows = [row for each in sequences for row in each.rows]
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _plan_chains(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        index = make_varlen_index(sequences)
        cu_seq_q, cu_seq_k = self._tensor(index.cu_seq_q), self._tensor(index.cu_seq_k)
        seqused_k, block_table = self._tensor(index.seqused_k), self._tensor(index.block_table)

        def attend(
            query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, rule: AttentionRule
        ) -> torch.Tensor:
            if rule.softcap is not None:
                raise NotImplementedError("soft-capped scores")
            return self._kernel(
                query.transpose(0, 1).contiguous(),
                key_pool,
                value_pool,
                cu_seq_q,
                cu_seq_k,
                index.max_q,
                index.max_k,
                scale=rule.scaling,
                window_size=(-1 if rule.window is None else rule.window - 1, 0),  # causal
                enable_gqa=query.shape[0] != key_pool.shape[2],
                seqused_k=seqused_k,
                block_table=block_table,
                num_splits=1,
            )

        return attend

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def find_page_size(
    kernel: VarlenKernel,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> int | None:
    """Returns the first page size with which `kernel` agrees with plain attention.

    Where there is none, it logs a warning and returns None.
    """
    reason = ""
    for page_size in page_sizes:
        try:
            error = _probe_error(kernel, page_size, num_heads, num_kv_heads, head_dim, dtype, device)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as failure:
            reason = str(failure).splitlines()[0]
            continue
        if error <= MAX_PROBE_ERROR:
            logger.info("attention: varlen_attn of torch %s, blocks of %d", torch.__version__, page_size)
            return page_size
        reason = f"its result is off by {error:.1e}"
    logger.warning("variable-length attention is not used (gathered blocks instead): %s", reason)
    return None


def _probe_error(
    kernel: VarlenKernel,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    lengths, num_queries = (3 * page_size + 5, 2 * page_size, 40, 1), (1, 5, 40, 1)
    num_blocks = [-(-length // page_size) for length in lengths]
    free = list(range(sum(num_blocks), 0, -1))  # block 0 is nobody's: garbage, were it read
    sequences, start = [], 0
    for length, count, blocks in zip(lengths, num_queries, num_blocks, strict=True):
        sequences.append(PackedSequence(start, count, length, [free.pop() for _ in range(blocks)]))
        start += count
    sequences[0], sequences[1] = _exchange_blocks(sequences[0], sequences[1])
    generator = torch.Generator(device="cpu").manual_seed(0)
    pool_shape = (sum(num_blocks) + 1, page_size, num_kv_heads, head_dim)
    key_pool, value_pool, query = (
        torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        for shape in (pool_shape, pool_shape, (num_heads, start, head_dim))
    )
    plain = SdpaPlanner(page_size, max(lengths), num_heads // num_kv_heads, dtype, device)
    expected = plain.plan(sequences)(query, key_pool, value_pool, AttentionRule())
    found = VarlenPlanner(kernel, device, plain).plan(sequences)(query, key_pool, value_pool, AttentionRule())
    if found.shape != expected.shape:
        raise ValueError(f"it returns {tuple(found.shape)}, not {tuple(expected.shape)}")
    error = float((found.float() - expected.float()).abs().max())
    return error if error == error else float("inf")  # NaN compares with nothing


def _repacked(sequences: Sequence[PackedSequence]) -> list[PackedSequence]:
    """Returns the sequences as if they were alone: packed from row 0 on."""
    repacked, start = list[PackedSequence](), 0
    for sequence in sequences:
        repacked.append(dataclasses.replace(sequence, start=start))
        start += sequence.num_queries
    return repacked


def _exchange_blocks(first: PackedSequence, second: PackedSequence) -> tuple[PackedSequence, PackedSequence]:
    """Returns the two with their first blocks exchanged, so that neither is one run."""
    mine, yours = list(first.block_ids), list(second.block_ids)
    mine[0], yours[0] = yours[0], mine[0]
    return (
        PackedSequence(first.start, first.num_queries, first.length, mine),
        PackedSequence(second.start, second.num_queries, second.length, yours),
    )
