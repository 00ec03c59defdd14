"""Our paged attention, as transformers sees it: one function registered under `ATTENTION_NAME`.

transformers builds no mask for an attention name it has no mask function for, and hands the keyword
arguments of `model(...)` through to every layer. So the plan of a forward travels as `outrider_plan`, and
each layer writes its keys and values into the pool and attends over the pool through the plan's segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "outrider_paged"
MAX_FOLDED_QUERIES = 64  # beyond it the mask of folded heads costs more than repeating keys
# Keyword arguments by which models ask for something plain softmax attention does not do.
UNSUPPORTED_KWARGS = ("softcap", "s_aux", "sinks", "head_mask", "position_bias")


@dataclass(slots=True)
class Segment:
    """One sequence's rows of a packed forward.

    Rows start … stop−1 of the packed queries attend over the pool slots `kv` (a slice where the sequence is
    one run, else an index tensor) of `kv_length` tokens, the rows' own included.
    `mask` is additive: [num_groups * num_queries, kv_length] when heads are folded, [num_queries, kv_length]
    when not, None where every row sees everything it is given (or `is_causal` says the rest).
    """

    start: int
    stop: int
    kv: slice | torch.Tensor
    mask: torch.Tensor | None
    is_folded: bool
    is_causal: bool = False


@dataclass(slots=True)
class ForwardPlan:
    """What attention needs to know about one packed forward."""

    key_pools: list[torch.Tensor]  # per layer [num_slots, kv_heads, head_dim]
    value_pools: list[torch.Tensor]
    write: slice | torch.Tensor  # slots of the packed tokens
    segments: list[Segment]
    layers_seen: list[int] = field(default_factory=list)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    outrider_plan: ForwardPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, then attend over the pool.

    query [1, heads, num_rows, head_dim], key and value [1, kv_heads, num_rows, head_dim]; returns
    [1, num_rows, heads, head_dim]. `scaling` is the model's own.
    """
    plan = outrider_plan
    assert plan is not None, "the model does not hand keyword arguments to its attention"
    for name in UNSUPPORTED_KWARGS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention argument {name!r}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attend(plan, layer, query[0], key[0], value[0], scaling)[None], None


def attend(
    plan: ForwardPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """One layer's attention over the pool, the new keys and values written first.

    query [heads, rows, head_dim], key and value [kv_heads, rows, head_dim] → [rows, heads, head_dim].
    """
    plan.layers_seen.append(layer)
    key_pool, value_pool = plan.key_pools[layer], plan.value_pools[layer]
    _write(key_pool, plan.write, key.transpose(0, 1))
    _write(value_pool, plan.write, value.transpose(0, 1))
    if len(plan.segments) == 1:
        return _attend_segment(plan.segments[0], query, key_pool, value_pool, scaling)
    parts = [
        _attend_segment(segment, query[:, segment.start : segment.stop], key_pool, value_pool, scaling)
        for segment in plan.segments
    ]
    return torch.cat(parts)


def _write(pool: torch.Tensor, slots: slice | torch.Tensor, rows: torch.Tensor) -> None:
    if isinstance(slots, slice):
        pool[slots] = rows
    else:
        pool.index_copy_(0, slots, rows)


def _attend_segment(
    segment: Segment,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """query [heads, num_queries, head_dim] → [num_queries, heads, head_dim]."""
    kv = segment.kv
    keys = key_pool[kv] if isinstance(kv, slice) else key_pool.index_select(0, kv)
    values = value_pool[kv] if isinstance(kv, slice) else value_pool.index_select(0, kv)
    # [1, kv_heads, kv_length, head_dim]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    num_heads, num_queries, head_dim = query.shape
    if segment.is_folded:
        # The query heads that share a key head become rows of it: no copy of the keys, one matrix product.
        folded = query.reshape(1, keys.shape[1], -1, head_dim)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=segment.mask, scale=scaling)
        out = out.reshape(num_heads, num_queries, head_dim)
    else:
        out = scaled_dot_product_attention(
            query[None],
            keys,
            values,
            attn_mask=segment.mask,
            is_causal=segment.is_causal,
            scale=scaling,
            enable_gqa=num_heads != keys.shape[1],
        )[0]
    return out.transpose(0, 1)


class MaskStore:
    """Causal masks for rows that continue a sequence, cut out of one strip."""

    def __init__(self, max_context: int, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_groups = num_groups
        self._dtype = dtype
        self._device = device
        self._max_context = max_context
        # Row i sees columns up to max_context + i; a window of it is the mask of any (queries, length).
        columns = torch.arange(max_context + MAX_FOLDED_QUERIES, device=device)
        rows = torch.arange(MAX_FOLDED_QUERIES, device=device)[:, None]
        self._strip = self._additive(columns > max_context + rows)

    def segment(self, start: int, num_queries: int, kv: slice | torch.Tensor, kv_length: int) -> Segment:
        """The segment of `num_queries` rows from packed row `start`, the last of `kv_length` tokens."""
        stop, past = start + num_queries, kv_length - num_queries
        if num_queries == 1:
            return Segment(start, stop, kv, None, is_folded=True)
        if num_queries <= MAX_FOLDED_QUERIES:
            first = self._max_context - past
            mask = self._strip[:num_queries, first : first + kv_length]
            return Segment(start, stop, kv, mask.repeat(self._num_groups, 1), is_folded=True)
        if past == 0:
            return Segment(start, stop, kv, None, is_folded=False, is_causal=True)
        rows = torch.arange(past, kv_length, device=self._device)[:, None]
        mask = self._additive(torch.arange(kv_length, device=self._device) > rows)
        return Segment(start, stop, kv, mask, is_folded=False)

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
