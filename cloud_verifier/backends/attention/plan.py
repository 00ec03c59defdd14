"""Our paged attention as a transformers attention function, registered under `ATTENTION_NAME`.

transformers builds no mask for an attention name without a mask function, and passes the keyword arguments of
`model(...)` to every layer. So the plan of a forward is passed as `outrider_plan`; each layer writes its keys
and values into the pool and attends over the pool by that plan. A planner decides how: `attention.sdpa`
anywhere, `attention.paged` on CUDA; where rows must not depend on others, on a CPU, `attention.host` in float32 and
`attention.tiled` else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.common.models.attention_arguments import unsupported_argument
from outrider.kernels.kv_pool import KVPool

ATTENTION_NAME = "outrider_paged"


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Says how one layer attends, beside softmax over what comes before."""

    scaling: float | None = None  # of scores; None is 1/√head_dim
    window: int | None = None  # keys that a row sees, its own the last of them; None: all before it
    softcap: float | None = None  # c: a score s counts as c · tanh(s / c) (Gemma 2, 2408.00118, section 2)


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: AttentionRule,
    mask: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Returns attention [..., heads, rows, head_dim] of queries of that shape over keys and values [..., kv_heads,
    tokens, head_dim], whose heads are repeated for several query heads; `mask` is additive. `rule.window` is the
    mask's business."""
    num_groups = query.shape[-3] // keys.shape[-3]
    if rule.softcap is None:
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=rule.scaling,
            enable_gqa=num_groups > 1,
        )
    if num_groups > 1:
        keys, values = (each.repeat_interleave(num_groups, dim=-3) for each in (keys, values))
    scaling = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
    scores = (query @ keys.transpose(-1, -2)).mul_(scaling)
    scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


class PagedAttention(Protocol):
    """Computes the attention of one packed forward, for any of its layers."""

    def __call__(
        self, query: torch.Tensor, key_pool: KVPool, value_pool: KVPool, rule: AttentionRule
    ) -> torch.Tensor:
        """Returns [rows, heads, head_dim] for queries [heads, rows, head_dim].

        The pools have the rows' own keys and values. Raises NotImplementedError for a rule that it cannot follow.
        """


@runtime_checkable
class FixedAttention(PagedAttention, Protocol):
    """Declares an attention whose numbers are read on the device: a graph of it is right for other forwards too."""

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """Returns what must be equal in those: its grid and its addresses; None where it is not one such."""

    def again(self) -> FixedAttention:
        """Returns the same for another run of the layers."""


class AttentionPlanner(Protocol):
    """Prepares attention over the pool in one way."""

    # Whether it reads slots that no token of the sequence was written to, and multiplies them by zero.
    reads_unwritten: bool = True

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        """Returns the attention of a forward, with everything prepared that its layers share."""


@dataclass(slots=True)
class ForwardPlan:
    """Holds what every layer needs of one packed forward."""

    key_pools: list[KVPool]  # per layer
    value_pools: list[KVPool]
    write: torch.Tensor  # slots of the packed tokens: int64, or int32 where the decoder writes padding
    attention: PagedAttention
    num_rows: int  # rows after these only pad a product: they have no KV and their answers are dropped
    is_fixed: bool = False  # its tensors, and those beside it, are where those of other such plans are
    # Of the layers that attended, in order.
    rules_seen: dict[int, AttentionRule] = field(default_factory=dict)
    feature_layers: tuple[int, ...] = ()  # whose states are kept (`PagedBackend.feature_layers`)
    features: dict[int, torch.Tensor] = field(default_factory=dict)  # kept, each [rows, hidden_size]
    entry: Entry | None = None  # of rows that enter above the first layers


@dataclass(slots=True)
class PackedRows:
    """Holds rows of a decoder's run: token ids and positions, int64 [num_rows], and their plan."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: ForwardPlan


@dataclass(slots=True)
class Entry:
    """Holds a forward's rows by where they enter: those whose states after the first layers are known, and those that
    run through these layers first."""

    num_layers: int  # the first ones
    known: torch.Tensor  # [n] int64: rows of the forward
    states: torch.Tensor  # [n, hidden_size], after these layers
    others: torch.Tensor  # [m] int64: rows of the forward
    below: PackedRows | None  # of the others, in their order; None where there is none


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    outrider_plan: ForwardPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the new keys and values, then attends over the pool.

    query [1, heads, num_rows, head_dim], key and value [1, kv_heads, num_rows, head_dim]; returns [1,
    num_rows, heads, head_dim]. `scaling`, `sliding_window` and `softcap` are the model's own. Raises
    NotImplementedError for other attention kinds, a mask and attention that is not causal among them.
    """
    plan = outrider_plan
    assert plan is not None, "the model does not hand keyword arguments to its attention"
    if name := unsupported_argument(module, attention_mask, kwargs):
        raise NotImplementedError(f"attention argument {name}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rule = AttentionRule(scaling, sliding_window, softcap)
    write(plan, layer, key[0], value[0])
    return attend(plan, layer, query[0], rule)[None], None


def write(plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes one layer's keys and values [kv_heads, rows, head_dim] of what is no padding to the pool."""
    for pool, each in ((plan.key_pools[layer], key), (plan.value_pools[layer], value)):
        pool.write(plan.write, each[:, : plan.num_rows].transpose(0, 1))


def attend(plan: ForwardPlan, layer: int, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Returns one layer's attention [rows, heads, head_dim] over the pool, for queries [heads, rows, head_dim] whose
    keys and values are there."""
    assert layer not in plan.rules_seen, "a layer attends once"
    plan.rules_seen[layer] = rule
    num_padding = query.shape[1] - plan.num_rows
    if num_padding:
        query = query[:, : plan.num_rows]
    out = plan.attention(query, plan.key_pools[layer], plan.value_pools[layer], rule)
    return pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out


def register_attention() -> None:
    """Registers `ATTENTION_NAME` with transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
