"""The draft's attention, registered with transformers under `ATTENTION_NAME`: over the sequence's own KV buffer.

transformers builds no mask for an attention name without a mask function, and passes the keyword arguments of
`model(...)` to every layer. So what a forward attends to is passed as `outrider_run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.common.errors import ModelError
from outrider.common.models.attention_arguments import unsupported_argument
from outrider.edge_client.drafting.pytorch.kv import KvBuffer

ATTENTION_NAME = "outrider_draft"


class Run:
    """Says where the n tokens of one forward go in the KV buffer, and which slots each of them sees."""

    def __init__(
        self,
        kv: KvBuffer,
        start: int,
        positions: Sequence[int],
        slot_positions: NDArray[np.int64],
        device: torch.device,
        visible: NDArray[np.bool_] | None = None,
    ) -> None:
        """The tokens have the slots from `start` on; `slot_positions` [start + n] are the positions of all slots. A
        token sees its own slot and those before it, but of the last m only what `visible` [n, m] says."""
        self.kv, self.start = kv, start
        self._positions, self._slot_positions = np.array(positions, np.int64), slot_positions
        self._visible = visible
        self._device = device
        self._masks: dict[tuple[int | None, int], torch.Tensor | None] = {}

    def mask(self, window: int | None, num_groups: int) -> torch.Tensor | None:
        """Returns which slots the queries see [num_groups · n, slots], where a token sees none that is `window`
        positions or more before it; None where all see all."""
        key = (window, num_groups)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, num_groups)
        return self._masks[key]

    def _make_mask(self, window: int | None, num_groups: int) -> torch.Tensor | None:
        reach = int(self._positions.max() - self._slot_positions.min())
        window = None if window is None or reach < window else window
        hides = self._visible is not None and not self._visible.all()
        if len(self._positions) == 1 and window is None and not hides:
            return None
        slots = torch.arange(len(self._slot_positions), device=self._device)
        visible = slots[None] <= slots[self.start :, None]
        if self._visible is not None:
            visible[:, -self._visible.shape[1] :] = torch.from_numpy(self._visible).to(self._device)
        if window is not None:
            ours, theirs = (
                torch.from_numpy(each).to(self._device) for each in (self._positions, self._slot_positions)
            )
            visible &= ours[:, None] - theirs[None] < window
        return visible.repeat(num_groups, 1)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    outrider_run: Run | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the new keys and values, then attends over the buffer.

    query [1, heads, n, head_dim], key and value [1, kv_heads, n, head_dim]; returns [1, n, heads, head_dim].
    Raises `ModelError` for other kinds of attention.
    """
    if outrider_run is None:
        raise ModelError("this architecture does not hand keyword arguments to its attention")
    if name := unsupported_argument(module, attention_mask, kwargs):
        raise ModelError(f"this architecture's attention has {name}, which the torch draft does not compute")
    run = outrider_run
    keys, values = run.kv.append(int(module.layer_idx), key[0], value[0], run.start)  # type: ignore[arg-type]
    _, num_heads, num_tokens, head_dim = query.shape
    # The query heads that share a KV head are rows of one product: [kv_heads, groups · n, head_dim].
    num_groups = num_heads // keys.shape[0]
    rows = query[0].reshape(keys.shape[0], num_groups * num_tokens, head_dim)
    mask = run.mask(sliding_window, num_groups)
    out = _softmax_attention(rows, keys, values, mask, scaling, softcap)
    out = out.reshape(num_heads, num_tokens, values.shape[-1])
    return out.transpose(0, 1)[None].contiguous(), None


def _softmax_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Its masks are boolean and its groups folded, and it scales in one product, where the verifier's
    `softmax_attention` adds masks and keeps the order that its exact rows are checked with: other last digits."""
    if softcap is None:
        return scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=scaling)[0]
    scaling = rows.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(rows @ keys.transpose(-1, -2) * (scaling / softcap))  # Gemma 2, section 2
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def register_attention() -> None:
    """Registers `ATTENTION_NAME` with transformers (idempotent)."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
