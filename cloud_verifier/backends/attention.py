"""Our paged attention, as transformers sees it: one function registered under `ATTENTION_NAME`.

transformers builds no mask for an attention name it has no mask function for, and hands the keyword
arguments of `model(...)` through to every layer. So the plan of a forward travels as `outrider_plan`, and
each layer writes its keys and values into the pool and attends over the pool as the plan says. How that is
done is a planner's business: `backends.sdpa` anywhere, `backends.varlen` on CUDA where torch can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outrider.cloud_verifier.backends.packing import PackedSequence

ATTENTION_NAME = "outrider_paged"
# Keyword arguments by which models ask for something plain softmax attention does not do.
UNSUPPORTED_KWARGS = ("softcap", "s_aux", "sinks", "head_mask", "position_bias")


class PagedAttention(Protocol):
    """Attention of one packed forward, for any of its layers."""

    def __call__(
        self, query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """query [heads, rows, head_dim], pools [num_blocks, block_size, kv_heads, head_dim], the rows' own
        keys and values written → [rows, heads, head_dim]. `scaling` None is 1/√head_dim."""


class AttentionPlanner(Protocol):
    """One way to attend over the pool."""

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        """What can be prepared once for all layers of a forward."""


@dataclass(slots=True)
class ForwardPlan:
    """What a layer needs to know about one packed forward."""

    key_pools: list[torch.Tensor]  # per layer [num_blocks, block_size, kv_heads, head_dim]
    value_pools: list[torch.Tensor]
    write: slice | torch.Tensor  # slots of the packed tokens
    attention: PagedAttention
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
    return plan.attention(query, key_pool, value_pool, scaling)


def _write(pool: torch.Tensor, slots: slice | torch.Tensor, rows: torch.Tensor) -> None:
    pool = pool.flatten(0, 1)  # a view: [num_slots, kv_heads, head_dim]
    if isinstance(slots, slice):
        pool[slots] = rows
    else:
        pool.index_copy_(0, slots, rows)


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
