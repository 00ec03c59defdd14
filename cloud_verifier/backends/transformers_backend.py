"""The target behind `TargetBackend`: a transformers decoder over a paged KV pool (CPU or CUDA)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch

from outrider.cloud_verifier.backends.attention.packing import PackedSequence, row_positions
from outrider.cloud_verifier.backends.attention.plan import (
    AttentionPlanner,
    AttentionRule,
    Entry,
    ForwardPlan,
    PackedRows,
)
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, KVSequence, Logits, TargetBackend
from outrider.cloud_verifier.backends.cuda.graphs import graph_rows
from outrider.cloud_verifier.backends.cuda.pool_changes import PoolChanges
from outrider.cloud_verifier.backends.partial import AheadToken, SkipsLayers, entry_of
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, RowPlan, padded_rows
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.kv.blocks import BlockManager, BlockTable, BlockUsage
from outrider.cloud_verifier.verification.staging import Staging
from outrider.common.models.memory import kv_token_bytes
from outrider.common.tree import Tree, is_chain
from outrider.kernels.kv_pool import KVPool

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Holds what is known of a loaded model: its sizes, limits and identity."""

    num_tokens: int
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    model_id: str
    fingerprint: str
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer: tokens that it attends over, None: all
    files_fingerprint: str  # of the directory; `fingerprint` is equal where the text is
    quantisation: str = ""  # "nf4", "fp4" or "fp8": of the weights, or of their files; "": none
    has_fp8_kv: bool = False  # keys and values are kept in FP8 (`kernels.fp8`), else in `dtype`

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values over all layers."""
        number_bytes = None if self.has_fp8_kv else int(getattr(torch, self.dtype).itemsize)
        return kv_token_bytes(self.num_layers, self.num_kv_heads, self.head_dim, number_bytes)


@dataclass(eq=False, slots=True)
class PagedSequence:
    """Holds one sequence's block table."""

    table: BlockTable = field(repr=False)
    num_reused: int = 0

    @property
    def length(self) -> int:
        """Returns the number of tokens in KV."""
        return self.table.length


@dataclass(slots=True)
class Feed:
    """Holds tokens of one sequence that a pass feeds, after `past` tokens of it."""

    table: BlockTable
    past: int
    token_ids: Sequence[int]
    num_logit_rows: int
    tree: Tree | None = None  # the last tokens, where they are one
    states: torch.Tensor | None = None  # of the first tokens, where they enter above the first layers

    @property
    def below(self) -> Feed:
        """Returns those of its tokens that run through the first layers too."""
        num_known = 0 if self.states is None else len(self.states)
        return Feed(self.table, self.past + num_known, self.token_ids[num_known:], 0, self.tree)

    @property
    def positions(self) -> list[int]:
        """Returns the position of each token: of a node that on its path."""
        return row_positions(self.past, len(self.token_ids), self.tree)


@dataclass(slots=True)
class Pass:
    """Holds the rows that a decoder is given at once."""

    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows]
    rows: torch.Tensor | None  # whose logits are computed; None: all
    plan: ForwardPlan
    num_rows: int  # of logits that are wanted, the first
    num_fed: int  # tokens, the first rows


def split_feeds(feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
    """Yields passes of at most `most` tokens, in packed order: earlier tokens of a sequence come first. A tree, of
    at most so many nodes, stays whole."""
    passed: list[Feed] = []
    room = most
    for feed in feeds:
        start, num_nodes = 0, len(feed.tree or ())
        while (num_left := len(feed.token_ids) - start) > 0:
            count = min(room, num_left)
            if num_left - count < num_nodes and count < num_left:
                count = min(room, num_left - num_nodes)
            part = feed.token_ids[start : start + count]
            num_left -= count
            if part:
                num_logit_rows = min(count, max(0, feed.num_logit_rows - num_left))
                tree = None if num_left else feed.tree
                states = None if feed.states is None else feed.states[start : start + count]
                passed.append(Feed(feed.table, feed.past + start, part, num_logit_rows, tree, states))
            start += count
            room -= count
            if room == 0 or not part:
                yield passed
                passed, room = [], most
    if passed:
        yield passed


class Decoder(Protocol):
    """Computes the model itself: packed tokens in, logits out."""

    is_of_transformers: bool  # its code is transformers', not ours
    writes_padding: bool  # rows that pad a step are a sequence like others, whose KV is in the spare block

    @property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of all weights."""

    def matrix_kinds(self) -> list[MatrixKind]:
        """Returns every kind of matrix whose product a forward takes, each once.

        Raises `ModelError` where a parameter is multiplied in a way that is not known.
        """

    def use_exact_rows(self) -> None:
        """Leaves out, from now on, what gives a row other bits by its place or the number of rows."""

    def use_linear(self, linear: Linear) -> None:
        """Multiplies all matrices by `linear` from now on, those of `matrix_kinds` too; what is kept of other products
        or settings of the library (captured graphs) is dropped.

        Raises `ModelError` where a matrix is multiplied by other code. With torch's own `linear` all is as at first.
        """

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        """Returns logits [rows, vocab_size] of the selected rows, all where `rows` is None.

        `token_ids` and `positions` are int64 [num_rows], or int32 where the decoder writes padding. Keeps in
        `plan.features` what `plan.feature_layers` ask for.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input embeddings [n, hidden_size] of ids [n]."""

    def score(self, features: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocab_size] of states after the final norm [n, hidden_size]."""


class TransformersBackend(TargetBackend):
    """Implements `TargetBackend`. Made by `backends.loading.load_target`."""

    def __init__(
        self, decoder: Decoder, facts: TargetFacts, *, num_blocks: int, block_size: int = BLOCK_SIZE
    ) -> None:
        self.facts = facts
        self.num_tokens, self.vocab_size = facts.num_tokens, facts.vocab_size
        self.dtype, self.device = facts.dtype, facts.device
        self.kv_dtype = "fp8" if facts.has_fp8_kv else facts.dtype
        self.model_id, self.fingerprint = facts.model_id, facts.fingerprint
        self.tokenizer_fingerprint, self.quantisation = facts.tokenizer_fingerprint, facts.quantisation
        self.eos_token_ids = facts.eos_token_ids
        self.num_forwards = 0
        self.num_query_rows = 0
        self.num_kv_rows = [0] * facts.num_layers  # written so far, by layer: the same, and tokens run ahead
        self.entry_layer = 0  # where rows enter whose states are known
        self.has_device_logits = False  # `forward` returns a tensor, left where it was computed
        self.has_paged_kernel = False  # attention is our own kernel's (CUDA)
        self.row_plan: RowPlan | None = None  # counts with which products are run; None: any
        self.is_reproducible = False
        self.product_way = ""  # how matrices are multiplied where rows are exact (`products.ways`)
        # What a forward keeps of every token fed, for heads that draft from it: the states after these layers; that
        # after the final norm has the number of layers as its index.
        self.feature_layers: tuple[int, ...] = ()
        # Of the last forward, by layer, each [tokens fed, hidden_size].
        self.features: dict[int, torch.Tensor] = {}
        # Of all layers, [layers, num_blocks, block_size, kv_heads, ...]: rows of keys and of values, and their scales.
        self._pools: list[torch.Tensor] = []
        self._key_pools: list[KVPool] = []  # views of them, per layer
        self._value_pools: list[KVPool] = []
        # What a step sends to the device, in one copy; None: nothing is sent.
        is_sent = decoder.writes_padding or facts.device != "cpu"
        self.inputs = Staging(torch.device(facts.device)) if is_sent else None
        # Of the layers that attended in the last forward, in order.
        self.rules_seen: dict[int, AttentionRule] = {}
        self.blocks = BlockManager(num_blocks, block_size)
        self.max_context = min(facts.max_context, num_blocks * block_size)
        self.has_trees = True  # trees have the bits of the chains that they stand for, where rows are exact
        self.decoder = decoder
        self._device = torch.device(facts.device)
        dtype = getattr(torch, facts.dtype)
        self.clear_kv()
        num_groups = facts.num_heads // facts.num_kv_heads
        self.planner: AttentionPlanner = SdpaPlanner(
            block_size, self.max_context, num_groups, dtype, self._device
        )

    def use_decoder(self, decoder: Decoder) -> None:
        """Runs the model through another implementation of the same function from now on."""
        self.decoder = decoder

    def clear_kv(self) -> None:
        """Allocates fresh memory for the pool: what was written before is never read again."""
        facts, blocks = self.facts, self.blocks
        assert blocks.num_free == blocks.num_blocks, "the KV of open sequences would be lost"
        num_blocks = blocks.num_blocks + 1  # the last is the spare one
        heads = (facts.num_layers, num_blocks, blocks.block_size, facts.num_kv_heads)
        shape, dtype = (*heads, facts.head_dim), getattr(torch, facts.dtype)
        self._changes = PoolChanges()
        self._pools, self._key_pools, self._value_pools = [], [], []  # the old go before the new ones come
        for pools in (self._key_pools, self._value_pools):
            rows = _zeros(shape, torch.uint8 if facts.has_fp8_kv else dtype, self._device)
            scales = _zeros(heads, torch.float16, self._device) if facts.has_fp8_kv else None
            self._pools += [rows] if scales is None else [rows, scales]
            for layer in range(facts.num_layers):
                pools.append(KVPool(rows[layer], None if scales is None else scales[layer], dtype))

    @property
    def num_kv_tokens(self) -> int:
        """Returns the number of token slots of the whole pool."""
        return self.blocks.num_blocks * self.blocks.block_size

    @property
    def num_kv_bytes(self) -> int:
        """Returns the bytes of these."""
        return self.num_kv_tokens * self.facts.kv_bytes_per_token

    @cached_property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of the weights, as they are after the first forward."""
        return self.decoder.num_weight_bytes

    @property
    def rules(self) -> list[AttentionRule]:
        """Returns the different rules by which the layers attended, a plain one before the first forward."""
        return [*dict.fromkeys(self.rules_seen.values())] or [AttentionRule()]

    @property
    def max_tree_nodes(self) -> int:
        if not self.has_trees:
            return 0
        return self.max_context if self.row_plan is None else self.row_plan.most

    @property
    def staging(self) -> Staging | None:
        return self.inputs if self.has_device_logits else None

    @property
    def num_free_tokens(self) -> int:
        return self.blocks.num_free * self.blocks.block_size

    @property
    def kv_usage(self) -> BlockUsage:
        return self.blocks.usage

    # ------------------------------------------------------------------------------ sequences

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> PagedSequence:
        table = self.blocks.new_table(tenant, token_ids)
        return PagedSequence(table, num_reused=table.length)

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        self.blocks.publish(_table(sequence), token_ids)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        self.blocks.truncate(_table(sequence), length)

    @torch.inference_mode()
    def keep(self, sequence: KVSequence, start: int, nodes: Sequence[int]) -> None:
        table, length = _table(sequence), start + len(nodes)
        if list(nodes) != list(range(len(nodes))):
            fed = list(self.blocks.slots(table, start, table.length))
            self._changes.move(self.blocks.slots(table, start, length), [fed[node] for node in nodes])
            if self.inputs is None:  # else with the next forward, before anybody writes or reads there
                self._changes.stage(self._tensor)
                self._changes.make(self._pools)
        self.blocks.truncate(table, length)

    def fork(self, sequence: KVSequence) -> PagedSequence:
        return PagedSequence(self.blocks.fork(_table(sequence)))

    def close(self, sequence: KVSequence, *, is_wrong: bool = False) -> None:
        if is_wrong:
            self.blocks.unpublish(_table(sequence))
        self.blocks.free(_table(sequence))

    def check_integrity(self) -> None:
        self.blocks.check_integrity()

    # ------------------------------------------------------------------------------ ahead of a forward

    def reserve(self, sequence: KVSequence, num_tokens: int) -> bool:
        """Holds the slots of the next `num_tokens` tokens of a sequence until it is fed, truncated or closed; returns
        whether there were blocks for them."""
        table = _table(sequence)
        if self.blocks.num_blocks_needed(table, num_tokens) > self.blocks.num_free:
            return False
        num_blocks = len(table.block_ids)
        self._changes.copy(self.blocks.reserve(table, num_tokens))
        self._changes.clear(table.block_ids[num_blocks:])
        self._changes.stage(self._tensor)
        self._changes.make(self._pools)
        return True

    def release_reserved(self, sequence: KVSequence) -> None:
        """Gives back what is reserved of a sequence; does nothing for one that is closed."""
        self.blocks.release_reserved(_table(sequence))

    @torch.inference_mode()
    def run_ahead(
        self, tokens: Sequence[AheadToken], layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs tokens of different sequences through some layers, and writes their KV to reserved slots.

        Returns the states [tokens, hidden_size] after those of the layers that are below `entry_layer`, and logits
        [tokens, vocab_size] after all of them. The KV of the tokens before each of them, in the layers given, must be
        there. See `backends.partial`.
        """
        decoder = cast(SkipsLayers, self.decoder)  # `heads.early_exit` is made for no other
        most = len(tokens) if self.row_plan is None else self.row_plan.most
        found = []
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            feeds = [
                Feed(_table(each.sequence), each.sequence.length + each.offset, [each.token_id], 1)
                for each in part
            ]
            rows = self._pack(feeds)
            run = decoder.run_some(rows, layers, self.entry_layer)
            self._count(rows.plan)
            found.append([each[: len(part)] for each in run])
        states, logits = (torch.cat(each) for each in zip(*found, strict=True))
        return states, logits.float()

    # ------------------------------------------------------------------------------ forward

    @torch.inference_mode()
    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        lengths = self._reserve(items)
        try:
            logits = self._run(items, lengths)
        except BaseException:
            for item, length in zip(items, lengths, strict=True):
                self.blocks.truncate(_table(item.sequence), length)
            raise
        self.num_forwards += 1
        self.num_query_rows += sum(len(item.token_ids) for item in items)
        return logits

    def _reserve(self, items: Sequence[ForwardItem]) -> list[int]:
        num_needed = 0
        for item in items:
            num_fed = len(item.token_ids)
            table = _table(item.sequence)
            assert num_fed > 0, "a forward feeds at least one token a sequence"
            assert 0 <= item.num_logit_rows <= num_fed, "more logit rows than tokens fed"
            assert table.length + num_fed <= self.max_context, "past the context limit"
            assert len(item.parents) <= min(num_fed, self.max_tree_nodes), "too large a tree"
            assert item.states is None or (len(item.states) < num_fed and is_chain(item.parents)), (
                "strange states"
            )
            num_needed += self.blocks.num_blocks_needed(table, num_fed)
        assert items, "an empty forward"
        assert len(items) == 1 or len({id(item.sequence) for item in items}) == len(items), "a sequence twice"
        if num_needed > self.blocks.num_free:
            raise KVExhausted(f"{num_needed} KV blocks needed, {self.blocks.num_free} free")
        lengths = [item.sequence.length for item in items]
        num_fed = sum(len(item.token_ids) for item in items)
        is_split = self.row_plan is not None and num_fed > self.row_plan.most
        partly_new: list[int] = []
        for item in items:
            table = _table(item.sequence)
            num_blocks = len(table.block_ids)
            self._changes.copy(self.blocks.append(table, len(item.token_ids)))
            new = table.block_ids[num_blocks:]
            if is_split:  # an earlier pass attends over blocks that a later one fills
                partly_new += new
            elif new and table.length % self.blocks.block_size:
                partly_new.append(new[-1])
        # Attention masks the slots that a sequence has not written to, but multiplies them by zero: NaN that the
        # block's last holder left there would pass. Our kernel does not read them.
        self._changes.clear([] if self.has_paged_kernel else partly_new)
        return lengths

    def _run(self, items: Sequence[ForwardItem], lengths: Sequence[int]) -> Logits:
        feeds = [
            Feed(
                _table(item.sequence),
                length,
                item.token_ids,
                item.num_logit_rows,
                _tree(item.parents),
                item.states,
            )
            for item, length in zip(items, lengths, strict=True)
        ]
        parts = [feeds] if self.row_plan is None else split_feeds(feeds, self.row_plan.most)
        if self.inputs is not None:
            self.inputs.start()
        prepared = [self._prepare(part) for part in parts]
        self._changes.stage(self._indices)
        if self.inputs is not None:
            self.inputs.send()
        self._changes.make(self._pools)
        passes, features = zip(*map(self._pass, prepared), strict=True)
        logits = passes[0] if len(passes) == 1 else torch.cat(passes)
        self.features = features[0]
        if len(features) > 1:
            self.features = {layer: torch.cat([each[layer] for each in features]) for layer in features[0]}
        return cast(Logits, logits) if self.has_device_logits else logits.cpu().numpy()

    def _prepare(self, feeds: Sequence[Feed]) -> Pass:
        """Returns a packed pass. Its tensors have their values once the step's inputs are sent."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for feed in feeds:
            token_ids.extend(feed.token_ids)
            positions.extend(feed.positions)
            rows.extend(range(len(token_ids) - feed.num_logit_rows, len(token_ids)))
        num_rows, num_fed = len(rows), len(token_ids)
        num_padding, num_scored = self._fit(num_fed) - num_fed, self._fit(num_rows, is_head=True)
        num_packed = num_fed + num_padding
        is_every_row = num_rows == num_fed and num_scored == num_packed
        if num_padding and self.decoder.writes_padding:
            feeds = [*feeds, self._padding(num_padding)]
        token_ids.extend([0] * num_padding)
        positions.extend(range(num_padding))
        rows.extend([rows[-1] if rows else 0] * (num_scored - num_rows))
        if self.inputs is not None:
            self.inputs.start_pass()
        packed = self._integers(token_ids), self._integers(positions)
        plan = self._plan(feeds, num_packed if self.decoder.writes_padding else num_fed)
        selected = None if is_every_row else self._integers(rows)
        plan.entry = self._entry(feeds)
        return Pass(*packed, selected, plan, num_rows, num_fed)

    def _pass(self, prepared: Pass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Returns float32 logits of one packed pass, and its features."""
        plan = prepared.plan
        logits = self.decoder(prepared.token_ids, prepared.positions, prepared.rows, plan)
        self.rules_seen = plan.rules_seen
        self._count(plan)
        # Copies: a graph leaves those of the next pass in the same memory.
        features = {layer: plan.features[layer][: prepared.num_fed].clone() for layer in self.feature_layers}
        return logits[: prepared.num_rows].float(), features

    def _entry(self, feeds: Sequence[Feed]) -> Entry | None:
        """Returns how the rows of a pass enter; None where all begin with the first layer."""
        states = [feed.states for feed in feeds]
        if all(each is None for each in states):
            return None
        below = [feed.below for feed in feeds if len(feed.below.token_ids)]
        packed = self._pack(below) if below else None
        return entry_of([len(feed.token_ids) for feed in feeds], states, self.entry_layer, packed)

    def _pack(self, feeds: Sequence[Feed]) -> PackedRows:
        """Returns the rows of a run of some layers. For decoders that write no padding."""
        token_ids = [token_id for feed in feeds for token_id in feed.token_ids]
        positions = [position for feed in feeds for position in feed.positions]
        plan, num_padding = self._plan(feeds, len(token_ids)), self._fit(len(token_ids)) - len(token_ids)
        token_ids += [0] * num_padding
        positions += range(num_padding)
        return PackedRows(self._tensor(token_ids), self._tensor(positions), plan)

    def _count(self, plan: ForwardPlan) -> None:
        """Counts the KV that a run wrote, by layer."""
        for layer in plan.rules_seen:
            self.num_kv_rows[layer] += plan.num_rows
        if plan.entry is not None and plan.entry.below is not None:
            self._count(plan.entry.below.plan)

    def _fit(self, num_rows: int, *, is_head: bool = False) -> int:
        """Returns the rows with which products of `num_rows` rows are run: here alone a step is padded."""
        if self.row_plan is not None and num_rows:
            return self.row_plan.fit(num_rows)
        if self.decoder.writes_padding:
            return num_rows if is_head else graph_rows(num_rows)
        return padded_rows(num_rows) if self._device.type == "cpu" else num_rows

    def _padding(self, num_rows: int) -> Feed:
        """Returns rows of a sequence whose blocks are all the spare one."""
        num_blocks = -(-num_rows // self.blocks.block_size)
        table = BlockTable(block_ids=[self.blocks.num_blocks] * num_blocks, length=num_rows)
        return Feed(table, 0, [0] * num_rows, 0)

    def _plan(self, feeds: Sequence[Feed], num_rows: int) -> ForwardPlan:
        sequences, start = [], 0
        writes: list[Iterable[int]] = []
        for feed in feeds:
            table, num_fed = feed.table, len(feed.token_ids)
            length = feed.past + num_fed
            writes.append(self.blocks.slots(table, feed.past, length))
            sequences.append(
                PackedSequence(start, num_fed, length, table.block_ids, table.is_contiguous, feed.tree)
            )
            start += num_fed
        write = writes[0] if len(writes) == 1 else [slot for slots in writes for slot in slots]
        slots = self._slots(write)
        attention = self.planner.plan(sequences)
        is_fixed = self.inputs is not None and self.inputs.is_fixed
        pools = self._key_pools, self._value_pools
        return ForwardPlan(*pools, slots, attention, num_rows, is_fixed, feature_layers=self.feature_layers)

    def _slots(self, slots: Iterable[int]) -> slice | torch.Tensor:
        if isinstance(slots, range) and not self.decoder.writes_padding:
            return slice(slots.start, slots.stop)
        return self._integers(list(slots))

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        """Returns integers that a decoder reads: int64, or int32 where it writes padding."""
        if self.inputs is not None and self.decoder.writes_padding:
            return self.inputs.add(np.array(values, np.int32))
        return self._indices(values)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        """Returns int64 of a step on the device, once its inputs are sent."""
        return self._tensor(values) if self.inputs is None else self.inputs.add(np.array(values, np.int64))

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On a CPU they come from the operating system, page by page as they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def _tree(parents: Sequence[int]) -> Tree | None:
    return None if is_chain(parents) else Tree(parents)


def _table(sequence: KVSequence) -> BlockTable:
    assert isinstance(sequence, PagedSequence), "a sequence of another backend"
    return sequence.table
