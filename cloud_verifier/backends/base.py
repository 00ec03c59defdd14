"""The target-backend protocol: one packed ragged forward for prefill, verification and decoding.

Every backend keeps its KV in sequences. A sequence's length is the number of tokens whose keys and values it
holds; `forward` feeds the tokens that follow. KV invariant (docs/design.md §4): length ≤ position − 1, so
every forward feeds at least one token of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.kv.blocks import BlockUsage
from outrider.common.errors import OutriderError

if TYPE_CHECKING:
    from outrider.cloud_verifier.verification.staging import Staging

Logits = NDArray[
    np.float32
]  # [num_rows, vocab_size]; a torch tensor on CUDA where outrider.kernels.device works


class KVExhausted(OutriderError):
    """The KV pool has too few free blocks for this forward; nothing was changed."""


class KVSequence(Protocol):
    """Identifies one sequence's KV; made by `new_sequence`, ended by `close`."""

    @property
    def length(self) -> int:
        """Returns the number of tokens whose keys and values are held."""

    @property
    def num_reused(self) -> int:
        """Returns the number of tokens that came from the prefix cache when the sequence was made."""


@dataclass(slots=True)
class ForwardItem:
    """Holds one sequence's part of a forward.

    `token_ids` follow the sequence's `length` tokens; the logits after the last `num_logit_rows` of them are
    returned (0: a prefill chunk whose logits are not needed). With `parents` the last tokens are a tree
    (`outrider.common.tree`): each follows those on its path alone, at the position that it has on it. With `states`, a
    tensor [n, hidden_size], and no tree the first n tokens enter above the first layers, which they were run through
    before (`passes.partial`).
    """

    sequence: KVSequence
    token_ids: Sequence[int]
    num_logit_rows: int
    parents: Sequence[int] = ()
    states: Any = None


class TargetBackend(Protocol):
    """Runs a loaded target. Used by one thread at a time, not always the same."""

    num_tokens: int  # ids the tokenizer has
    vocab_size: int  # columns of the logits, ≥ num_tokens where the vocabulary is padded
    max_context: int  # tokens a sequence may hold
    dtype: str  # "float32" | "bfloat16"
    device: str
    model_id: str
    fingerprint: str  # of the configuration and the weights
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]
    kv_dtype: str  # of keys and values: the target's, or "fp8"
    quantisation: str  # of the weights: "nf4", "fp4" or "fp8"; "": none
    is_reproducible: bool  # a row's logits have the same bits whatever shares its forward
    num_forwards: int  # counters, only rise
    num_query_rows: int  # tokens fed, over all forwards: packed, so equal to the sum of the items' tokens

    @property
    def max_tree_nodes(self) -> int:
        """Returns the most nodes of the tree that an item may end with; 0: none."""

    @property
    def staging(self) -> Staging | None:
        """Returns what sends arrays of others with the next forward's inputs, where logits stay on a device; None
        where they come to the host."""

    @property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of the weights."""

    @property
    def num_kv_bytes(self) -> int:
        """Returns the bytes of the whole KV pool."""

    @property
    def num_free_tokens(self) -> int:
        """Returns the number of token slots that can be taken: in empty blocks and in idle cached ones."""

    @property
    def kv_usage(self) -> BlockUsage:
        """Returns block counts; read by scrapes, from any thread."""

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> KVSequence:
        """Returns a sequence that begins with the tenant's longest cached prefix of `token_ids`.

        The prefix has at most all but the last token: that one is fed, so that its logits can be read.
        """

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Lets later sequences of the same tenant begin with this one's KV of `token_ids`.

        The KV must be of these tokens; either may be longer than the other.
        """

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        """Runs all items in one packed pass and advances their lengths.

        Returns float32 [Σ num_logit_rows, vocab_size], in item order; row r of an item with n rows scores the
        token after its token n_fed − n + r. An array is only valid until the next forward; a tensor, which may not be
        computed yet, is a new one, as the next forward may be run before it is read. Raises
        `KVExhausted`, with nothing changed, when blocks run out. Feeding a sequence twice in one forward,
        past `max_context`, or nothing at all is a bug (AssertionError). NaN in one item's KV or rows, or in
        blocks that nobody holds, reaches no row of another item.
        """

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Keeps the first `length` tokens: changes the length and frees blocks."""

    def keep(self, sequence: KVSequence, start: int, nodes: Sequence[int]) -> None:
        """Keeps the first `start` tokens and, after them, those of `nodes`: a path of the tree that was fed at
        `start` last. To be called before anything else is done with the sequence."""

    def close(self, sequence: KVSequence, *, is_wrong: bool = False) -> None:
        """Releases a sequence's blocks. Closing twice does nothing.

        Of KV that may be wrong nothing stays in the prefix cache, what was published before included.
        """

    def check_integrity(self) -> None:
        """Raises AssertionError when the KV bookkeeping contradicts itself."""


@contextmanager
def open_sequence(backend: TargetBackend) -> Iterator[KVSequence]:
    """Gives an empty sequence, whose blocks are released whatever happens."""
    sequence = backend.new_sequence()
    try:
        yield sequence
    finally:
        backend.close(sequence)
