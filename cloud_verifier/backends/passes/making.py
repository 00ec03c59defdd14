"""Makes passes of feeds: packed rows, padded as products and graphs need it, and the plan of their attention."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, Entry, ForwardPlan, PackedRows
from outrider.cloud_verifier.backends.cuda.graphs import graph_rows
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.passes.feeds import Feed
from outrider.cloud_verifier.backends.passes.partial import entry_of
from outrider.cloud_verifier.backends.passes.pool_memory import PoolMemory
from outrider.cloud_verifier.backends.products.row_plan import RowPlan, padded_rows
from outrider.cloud_verifier.kv.blocks import BlockManager, BlockTable
from outrider.cloud_verifier.verification.staging import Staging


class PassSource(Protocol):
    """Says what of a backend a pass is made with."""

    decoder: Decoder
    planner: AttentionPlanner
    row_plan: RowPlan | None
    inputs: Staging | None
    blocks: BlockManager
    memory: PoolMemory
    entry_layer: int
    feature_layers: tuple[int, ...]


@dataclass(slots=True)
class Pass:
    """Holds the rows that a decoder is given at once."""

    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows]
    rows: torch.Tensor | None  # whose logits are computed; None: all
    plan: ForwardPlan
    num_rows: int  # of logits that are wanted, the first
    num_fed: int  # tokens, the first rows


def prepare_pass(source: PassSource, feeds: Sequence[Feed]) -> Pass:
    """Returns a packed pass. Its tensors have their values once the step's inputs are sent."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for feed in feeds:
        token_ids.extend(feed.token_ids)
        positions.extend(feed.positions)
        rows.extend(range(len(token_ids) - feed.num_logit_rows, len(token_ids)))
    num_rows, num_fed = len(rows), len(token_ids)
    num_padding, num_scored = _fit(source, num_fed) - num_fed, _fit(source, num_rows, is_head=True)
    num_packed = num_fed + num_padding
    is_every_row = num_rows == num_fed and num_scored == num_packed
    if num_padding and source.decoder.writes_padding:
        feeds = [*feeds, _padding(source, num_padding)]
    token_ids.extend([0] * num_padding)
    positions.extend(range(num_padding))
    rows.extend([rows[-1] if rows else 0] * (num_scored - num_rows))
    if source.inputs is not None:
        source.inputs.start_pass()
    packed = _integers(source, token_ids), _integers(source, positions)
    plan = _plan(source, feeds, num_packed if source.decoder.writes_padding else num_fed)
    selected = None if is_every_row else _integers(source, rows)
    plan.entry = _entry(source, feeds)
    return Pass(*packed, selected, plan, num_rows, num_fed)


def _entry(source: PassSource, feeds: Sequence[Feed]) -> Entry | None:
    """Returns how the rows of a pass enter; None where all begin with the first layer."""
    states = [feed.states for feed in feeds]
    if all(each is None for each in states):
        return None
    below = [feed.below for feed in feeds if len(feed.below.token_ids)]
    packed = pack_rows(source, below) if below else None
    return entry_of([len(feed.token_ids) for feed in feeds], states, source.entry_layer, packed)


def pack_rows(source: PassSource, feeds: Sequence[Feed]) -> PackedRows:
    """Returns the rows of a run of some layers. For decoders that write no padding."""
    token_ids = [token_id for feed in feeds for token_id in feed.token_ids]
    positions = [position for feed in feeds for position in feed.positions]
    plan, num_padding = _plan(source, feeds, len(token_ids)), _fit(source, len(token_ids)) - len(token_ids)
    token_ids += [0] * num_padding
    positions += range(num_padding)
    return PackedRows(to_device(source, token_ids), to_device(source, positions), plan)


def _fit(source: PassSource, num_rows: int, *, is_head: bool = False) -> int:
    """Returns the rows with which products of `num_rows` rows are run: here alone a step is padded."""
    if source.row_plan is not None and num_rows:
        return source.row_plan.fit(num_rows)
    if source.decoder.writes_padding:
        return num_rows if is_head else graph_rows(num_rows)
    return padded_rows(num_rows) if source.memory.device.type == "cpu" else num_rows


def _padding(source: PassSource, num_rows: int) -> Feed:
    """Returns rows of a sequence whose blocks are all the spare one."""
    num_blocks = -(-num_rows // source.blocks.block_size)
    table = BlockTable(block_ids=array("i", [source.blocks.num_blocks]) * num_blocks, length=num_rows)
    return Feed(table, 0, [0] * num_rows, 0)


def _plan(source: PassSource, feeds: Sequence[Feed], num_rows: int) -> ForwardPlan:
    sequences, start = [], 0
    slots: list[int] = []
    for feed in feeds:
        table, num_fed = feed.table, len(feed.token_ids)
        length = feed.past + num_fed
        slots.extend(source.blocks.slots(table, feed.past, length))
        sequences.append(
            PackedSequence(start, num_fed, length, table.block_ids, table.is_contiguous, feed.tree)
        )
        start += num_fed
    write = _integers(source, slots)
    attention = source.planner.plan(sequences)
    is_fixed = source.inputs is not None and source.inputs.is_fixed
    pools = source.memory.key_pools, source.memory.value_pools
    return ForwardPlan(*pools, write, attention, num_rows, is_fixed, feature_layers=source.feature_layers)


def _integers(source: PassSource, values: Sequence[int]) -> torch.Tensor:
    """Returns integers that a decoder reads: int64, or int32 where it writes padding."""
    if source.inputs is not None and source.decoder.writes_padding:
        return source.inputs.add(np.array(values, np.int32))
    return indices(source, values)


def indices(source: PassSource, values: Sequence[int]) -> torch.Tensor:
    """Returns int64 of a step on the device, once its inputs are sent."""
    return (
        to_device(source, values) if source.inputs is None else source.inputs.add(np.array(values, np.int64))
    )


def to_device(source: PassSource, values: Any) -> torch.Tensor:
    """Returns int64 on the device, at once."""
    return torch.from_numpy(np.array(values, np.int64)).to(source.memory.device)
