"""The target behind `TargetBackend`: any `Decoder` over a paged KV pool (CPU or CUDA)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import cast

import torch

from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule, ForwardPlan
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, KVSequence, Logits, TargetBackend
from outrider.cloud_verifier.backends.cuda.pool_changes import PoolChanges
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.cloud_verifier.backends.passes.feeds import Feed, split_feeds
from outrider.cloud_verifier.backends.passes.making import Pass, indices, pack_rows, prepare_pass, to_device
from outrider.cloud_verifier.backends.passes.partial import AheadToken, SkipsLayers
from outrider.cloud_verifier.backends.passes.pool_memory import PoolMemory
from outrider.cloud_verifier.backends.products.row_plan import RowPlan
from outrider.cloud_verifier.kv.blocks import BlockManager, BlockTable, BlockUsage
from outrider.cloud_verifier.verification.staging import Staging
from outrider.common.tree import Tree, is_chain

BLOCK_SIZE = 16


@dataclass(eq=False, slots=True)
class PagedSequence:
    """Holds one sequence's block table."""

    table: BlockTable = field(repr=False)
    num_reused: int = 0

    @property
    def length(self) -> int:
        """Returns the number of tokens in KV."""
        return self.table.length


class PagedBackend(TargetBackend):
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
        # What a step sends to the device, in one copy; None: nothing is sent.
        is_sent = decoder.writes_padding or facts.device != "cpu"
        self.inputs = Staging(torch.device(facts.device)) if is_sent else None
        # Of the layers that attended in the last forward, in order.
        self.rules_seen: dict[int, AttentionRule] = {}
        self.blocks = BlockManager(num_blocks, block_size)
        self.max_context = min(facts.max_context, num_blocks * block_size)
        self.has_trees = True  # trees have the bits of the chains that they stand for, where rows are exact
        self.decoder = decoder
        self.memory = PoolMemory(facts, num_blocks, block_size)
        self._changes = PoolChanges()
        dtype = getattr(torch, facts.dtype)
        num_groups = facts.num_heads // facts.num_kv_heads
        self.planner: AttentionPlanner = SdpaPlanner(
            block_size, self.max_context, num_groups, dtype, self.memory.device
        )

    def use_decoder(self, decoder: Decoder) -> None:
        """Runs the model through another implementation of the same function from now on."""
        self.decoder = decoder

    def clear_kv(self) -> None:
        """Allocates fresh memory for the pool: what was written before is never read again."""
        assert self.blocks.num_free == self.blocks.num_blocks, "the KV of open sequences would be lost"
        self._changes = PoolChanges()
        self.memory.renew()

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
                self._changes.stage(partial(to_device, self))
                self._changes.make(self.memory.tensors)
        self.blocks.truncate(table, length)

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
        self._changes.stage(partial(to_device, self))
        self._changes.make(self.memory.tensors)
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
        there. See `passes.partial`.
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
            rows = pack_rows(self, feeds)
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
            if len(table.block_ids) == num_blocks or not self.planner.reads_unwritten:
                continue
            new = table.block_ids[num_blocks:]
            if is_split:  # an earlier pass attends over blocks that a later one fills
                partly_new += new
            elif table.length % self.blocks.block_size:
                partly_new.append(new[-1])
        # Attention masks the slots that a sequence has not written to, but multiplies them by zero: NaN that the
        # block's last holder left there would pass. Our kernels do not read them.
        self._changes.clear(partly_new)
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
        prepared = deque(prepare_pass(self, part) for part in parts)
        self._changes.stage(partial(indices, self))
        if self.inputs is not None:
            self.inputs.send()
        self._changes.make(self.memory.tensors)
        done = []
        while prepared:  # each gives its attention's memory back before the next takes as much
            done.append(self._pass(prepared.popleft()))
        passes, features = zip(*done, strict=True)
        logits = passes[0] if len(passes) == 1 else torch.cat(passes)
        self.features = features[0]
        if len(features) > 1:
            self.features = {layer: torch.cat([each[layer] for each in features]) for layer in features[0]}
        return cast(Logits, logits) if self.has_device_logits else logits.cpu().numpy()

    def _pass(self, prepared: Pass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Returns float32 logits of one packed pass, and its features."""
        plan = prepared.plan
        logits = self.decoder(prepared.token_ids, prepared.positions, prepared.rows, plan)
        self.rules_seen = plan.rules_seen
        self._count(plan)
        # Copies: a graph leaves those of the next pass in the same memory.
        features = {layer: plan.features[layer][: prepared.num_fed].clone() for layer in self.feature_layers}
        return logits[: prepared.num_rows].float(), features

    def _count(self, plan: ForwardPlan) -> None:
        """Counts the KV that a run wrote, by layer."""
        for layer in plan.rules_seen:
            self.num_kv_rows[layer] += plan.num_rows
        if plan.entry is not None and plan.entry.below is not None:
            self._count(plan.entry.below.plan)


def _tree(parents: Sequence[int]) -> Tree | None:
    return None if is_chain(parents) else Tree(parents)


def _table(sequence: KVSequence) -> BlockTable:
    assert isinstance(sequence, PagedSequence), "a sequence of another backend"
    return sequence.table
