"""A target whose forward takes virtual time and whose samples are known: the one text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, KVSequence
from outrider.cloud_verifier.kv.blocks import BlockUsage
from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import RawLogprobs, StepRound
from outrider.common.types import TokenIds
from outrider.experiments.simulator.parts import text
from outrider.experiments.simulator.parts.times import BusyMachine, VerifierTimes
from outrider.experiments.simulator.world.world import World

BLOCK_TOKENS = 16
UNLIMITED_BLOCKS = 1 << 40
_CERTAIN, _NEVER = (0.0,), (-math.inf,)


class KnownRows:
    """Holds rows of a target that is certain of the text: p is 1 at its token, for every method."""

    __slots__ = ("_positions", "judged")

    is_on_device, is_computed = False, True

    def __init__(self, step_round: StepRound) -> None:
        self._positions = step_round.row_positions
        self.judged = step_round  # a simulated text has no grammar that cuts a draft

    def target_sample(self, row: int) -> int:
        """Returns the text's token."""
        return text.TEXT[self._positions[row] & text.MASK]

    def log_probs(self, row: int, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns 0 for the text's token and −inf for others."""
        own = self.target_sample(row)
        if len(token_ids) == 1:
            return _CERTAIN if token_ids[0] == own else _NEVER
        return [0.0 if token_id == own else -math.inf for token_id in token_ids]

    def entropy(self, row: int) -> float:
        """Returns 0."""
        return 0.0

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        """Returns the text's token."""
        return self.target_sample(row)

    def raw_logprobs(self, row: int, token_id: int, num_top: int) -> RawLogprobs:
        """Raises `NotImplementedError`."""
        raise NotImplementedError("a simulated target has no logits: ask for no log-probabilities")

    def wait(self) -> None:
        """Does nothing: the text is known."""


@dataclass(frozen=True, slots=True)
class KnownLogits:
    """Is what a forward gives in place of logits; `SimulatedTarget.make_rows` reads it."""

    answers_s: float  # what verifying these rows takes


@dataclass(eq=False, slots=True)
class _SimulatedKV:
    length: int = 0
    num_reused: int = 0
    num_blocks: int = 0


class SimulatedTarget:
    """Implements `TargetBackend`: lengths in place of KV, in blocks, without a prefix cache."""

    num_tokens = text.NUM_TOKENS
    vocab_size = text.NUM_TOKENS
    max_context = 1 << 30
    max_tree_nodes = 1 << 30
    dtype = "simulated"
    kv_dtype = "simulated"
    device = "simulated"
    model_id = "simulated"
    fingerprint = text.FINGERPRINT
    tokenizer_fingerprint = text.FINGERPRINT
    eos_token_ids: tuple[int, ...] = ()
    is_reproducible = True
    quantisation = ""
    num_weight_bytes = num_kv_bytes = 0
    staging = None

    def __init__(self, world: World, times: VerifierTimes, kv_tokens: int = 0, seed: str = "") -> None:
        """Makes a pool of `kv_tokens`; 0 is one that is never full. `seed` is that of the times that vary."""
        self.times = times
        self._busy = BusyMachine(times, seed) if times.drift or times.jitter else None
        self._world = world
        self.num_forwards = 0
        self.num_query_rows = 0
        self.forward_s = 0.0  # in all
        self.most_used_tokens = 0  # of the pool, at once
        self._num_blocks = kv_tokens // BLOCK_TOKENS or UNLIMITED_BLOCKS
        self._num_used = 0

    @property
    def num_free_tokens(self) -> int:
        """Returns the tokens that the pool has room for."""
        return (self._num_blocks - self._num_used) * BLOCK_TOKENS

    @property
    def kv_usage(self) -> BlockUsage:
        """Returns the pool's blocks by use."""
        num_peak, num_empty = self.most_used_tokens // BLOCK_TOKENS, self._num_blocks - self._num_used
        return BlockUsage(BLOCK_TOKENS, self._num_used, 0, num_empty, 0, num_peak)

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> _SimulatedKV:
        """Returns an empty sequence."""
        return _SimulatedKV()

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Does nothing: no prefix is found again."""

    def forward(self, items: Sequence[ForwardItem]) -> Any:
        """Returns `KnownLogits`, after the time that the step takes."""
        num_tokens, num_context, num_ending, num_nodes = 0, 0, 0, 0
        self._make_room(items)
        for item in items:
            kv, num_fed = item.sequence, len(item.token_ids)
            num_context += kv.length
            kv.length += num_fed  # type: ignore[misc]
            num_tokens += num_fed
            num_ending += item.num_logit_rows > 0
            num_nodes += len(item.parents)
        self.num_forwards += 1
        self.num_query_rows += num_tokens
        step_s = self.times.step_s(len(items), num_tokens, num_context, num_nodes)
        if self._busy is not None:
            step_s *= self._busy.factor(self._world.now_s)
        self.forward_s += step_s
        self._world.sleep(step_s)
        return KnownLogits(num_ending * self.times.answer_ms / 1e3)

    def make_rows(
        self, logits: Any, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
    ) -> list[Any]:
        """Returns the `KnownRows` of each round, after the time of the answers."""
        assert isinstance(logits, KnownLogits)
        if logits.answers_s:
            self._world.sleep(logits.answers_s)
        return [KnownRows(each) for each in rounds]

    def _make_room(self, items: Sequence[ForwardItem]) -> None:
        wanted = [-(-(item.sequence.length + len(item.token_ids)) // BLOCK_TOKENS) for item in items]
        held = [item.sequence.num_blocks for item in items]  # type: ignore[attr-defined]
        num_used = self._num_used + sum(wanted) - sum(held)
        if num_used > self._num_blocks:
            free = self._num_blocks - self._num_used
            raise KVExhausted(f"{num_used - self._num_used} blocks needed, {free} free")
        for num_blocks, item in zip(wanted, items, strict=True):
            item.sequence.num_blocks = num_blocks  # type: ignore[attr-defined]
        self._num_used = num_used
        self.most_used_tokens = max(self.most_used_tokens, num_used * BLOCK_TOKENS)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drops what is past `length`."""
        assert isinstance(sequence, _SimulatedKV)
        sequence.length = length
        self._hold(sequence, -(-length // BLOCK_TOKENS))

    def keep(self, sequence: KVSequence, start: int, nodes: Sequence[int]) -> None:
        """Keeps the first `start` tokens and as many after them as there are nodes."""
        self.truncate(sequence, start + len(nodes))

    def close(self, sequence: KVSequence, *, is_wrong: bool = False) -> None:
        """Frees the sequence's blocks."""
        assert isinstance(sequence, _SimulatedKV)
        sequence.length = 0
        self._hold(sequence, 0)

    def _hold(self, kv: _SimulatedKV, num_blocks: int) -> None:
        self._num_used += num_blocks - kv.num_blocks
        kv.num_blocks = num_blocks

    def check_integrity(self) -> None:
        """Asserts that the blocks add up."""
        assert 0 <= self._num_used <= self._num_blocks, "blocks are counted wrongly"
