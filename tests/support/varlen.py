"""What `torch.nn.attention.varlen.varlen_attn` promises, in plain torch, for a machine without its kernel."""

from __future__ import annotations

import torch


def reference_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """query [rows, heads, head_dim], key and value [pages, page_size, kv_heads, head_dim]; causal to the
    lower right. Refuses what the kernel refuses, and what we must never ask of it."""
    assert seqused_k is not None and block_table is not None and cu_seq_k is not None
    for index in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert index.dtype == torch.int32 and index.is_contiguous()
    assert window_size[0] >= -1 and window_size[1] == 0 and num_splits == 1 and query.is_contiguous()
    num_rows, num_heads, head_dim = query.shape
    num_sequences = seqused_k.shape[0]
    assert block_table.shape[0] == num_sequences == cu_seq_q.shape[0] - 1 == cu_seq_k.shape[0] - 1
    assert enable_gqa == (key.shape[2] != num_heads)
    counts, lengths = cu_seq_q.diff(), cu_seq_k.diff()
    assert torch.equal(lengths, seqused_k) and max_q == counts.max() and max_k == lengths.max()
    assert cu_seq_q[0] == 0 and cu_seq_q[-1] == num_rows
    out = torch.full_like(query, float("nan"))
    for i in range(num_sequences):
        start, stop, length = int(cu_seq_q[i]), int(cu_seq_q[i + 1]), int(seqused_k[i])
        pages = block_table[i, : -(-length // key.shape[1])].long()
        # [heads, length, head_dim]
        keys, values = (
            pool[pages]
            .flatten(0, 1)[:length]
            .transpose(0, 1)
            .float()
            .repeat_interleave(num_heads // pool.shape[2], 0)
            for pool in (key, value)
        )
        scores = query[start:stop].transpose(0, 1).float() @ keys.transpose(1, 2)
        scores *= head_dim**-0.5 if scale is None else scale
        last_seen = torch.arange(length - (stop - start), length)[:, None]
        scores.masked_fill_(torch.arange(length) > last_seen, float("-inf"))
        if window_size[0] >= 0:
            scores.masked_fill_(torch.arange(length) < last_seen - window_size[0], float("-inf"))
        out[start:stop] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    return out
