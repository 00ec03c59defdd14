"""Batches of chains and trees over a paged pool, for a planner's error and for the bits of its rows.

What a token's key, value and query are follows from its text and position alone, so that the same token can be
laid out in other ways: in other blocks, alone or among others, in a chain or on a path through a tree. What no
token was written to is NaN, and would be seen if it were read.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.trees.keep import random_tree
from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.paged import PagedPlanner
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule, PagedAttention
from outrider.common.tree import Tree
from outrider.kernels import reference
from outrider.kernels.kv_pool import KVPool
from outrider.kernels.paged_attention import KEYS, early_tokens

PLAIN = AttentionRule()
RULES = (
    PLAIN,
    AttentionRule(0.3, window=37),
    AttentionRule(softcap=4.0),
    AttentionRule(window=70, softcap=20.0),
)
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
MAX_QUERIES = 5
MAX_PATH = 12  # tokens: a tree of twice as many nodes does not fit a tile of `Sizes`


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of one layer's attention."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    is_fp8: bool = False  # keys and values are kept so

    def planner(self, device: str, split_tokens: int) -> PagedPlanner:
        """Returns the planner of our kernel."""
        num_groups = self.num_heads // self.num_kv_heads
        return PagedPlanner(self.block_size, num_groups, torch.device(device), split_tokens)


@dataclass(frozen=True)
class Text:
    """Holds the tokens of a text: what they write to the pool, and what they ask."""

    keys: torch.Tensor  # [num_tokens, kv_heads, head_dim]
    values: torch.Tensor
    queries: torch.Tensor  # [heads, num_tokens, head_dim]


def make_text(sizes: Sizes, num_tokens: int, seed: int) -> Text:
    """Returns random float32 tokens."""
    generator = torch.Generator().manual_seed(seed)
    kv = num_tokens, sizes.num_kv_heads, sizes.head_dim
    query = sizes.num_heads, num_tokens, sizes.head_dim
    return Text(*(torch.randn(shape, generator=generator) for shape in (kv, kv, query)))


@dataclass(frozen=True)
class Part:
    """Describes one sequence of a batch: the last `num_queries` of `length` tokens of a text.

    With a tree its nodes come last. Those of `path` are the text's own tokens, at their positions; the others are
    of another text.
    """

    text: Text
    num_queries: int
    length: int
    tree: Tree | None = None
    path: Sequence[int] = ()


class Batch:
    """Holds sequences laid out in a pool; `order` says which blocks they get."""

    def __init__(
        self, sizes: Sizes, parts: Sequence[Part], dtype: torch.dtype, device: str, order: int = 0
    ) -> None:
        self.sizes, self.parts = sizes, parts
        num_blocks = [-(-part.length // sizes.block_size) for part in parts]
        free = list(range(1, sum(num_blocks) + 3))
        random.Random(order).shuffle(free)
        pool = len(free) + 1, sizes.block_size, sizes.num_kv_heads, sizes.head_dim
        keys, values = torch.full(pool, torch.nan), torch.full(pool, torch.nan)
        self.sequences: list[PackedSequence] = []
        queries, start = [], 0
        for part, count in zip(parts, num_blocks, strict=True):
            block_ids, free = free[:count], free[count:]
            sequence = PackedSequence(start, part.num_queries, part.length, block_ids, tree=part.tree)
            self.sequences.append(sequence)
            start = sequence.stop
            text, slots = self._tokens(part, sequence), self._slots(sequence, range(part.length))
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = text.keys, text.values
            queries.append(text.queries[:, sequence.past :])
        self.query, keys, values = (
            each.to(device=device, dtype=dtype) for each in (torch.cat(queries, 1), keys, values)
        )
        self.keys, self.values = (KVPool.holding(each, is_fp8=sizes.is_fp8) for each in (keys, values))

    def _tokens(self, part: Part, sequence: PackedSequence) -> Text:
        """Returns the tokens of a sequence in the order of its slots."""
        if part.tree is None:
            text, end = part.text, part.length
            return Text(text.keys[:end], text.values[:end], text.queries[:, :end])
        other = make_text(self.sizes, part.length, seed=part.length)
        root = sequence.root
        positions = [*range(root), *(root + depth for depth in part.tree.depths)]
        is_own = torch.tensor([True] * root + [node in part.path for node in range(len(part.tree))])
        keys, values = (
            torch.where(is_own[:, None, None], mine[positions], others)
            for mine, others in ((part.text.keys, other.keys), (part.text.values, other.values))
        )
        queries = torch.where(is_own[:, None], part.text.queries[:, positions], other.queries)
        return Text(keys, values, queries)

    def _slots(self, sequence: PackedSequence, places: Sequence[int]) -> list[int]:
        size = self.sizes.block_size
        return [sequence.block_ids[place // size] * size + place % size for place in places]

    def attend(self, planner: AttentionPlanner, rule: AttentionRule = PLAIN) -> torch.Tensor:
        """Returns the attention of all rows [num_rows, heads, head_dim]."""
        attention: PagedAttention = planner.plan(self.sequences)
        return attention(self.query, self.keys, self.values, rule)

    def error(self, planner: AttentionPlanner, rule: AttentionRule = PLAIN) -> float:
        """Returns the largest difference from attention in float64."""
        shape = -1, self.sizes.block_size, self.sizes.num_kv_heads, self.sizes.head_dim
        kept = [pool.read(slice(None)).view(shape) for pool in (self.keys, self.values)]
        query, keys, values = (each.float().cpu().numpy() for each in (self.query, *kept))
        seen = [
            self._slots(each, places[-(rule.window or len(places)) :])
            for each in self.sequences
            for places in _seen(each)
        ]
        scaling = self.sizes.head_dim**-0.5 if rule.scaling is None else rule.scaling
        expected = reference.paged_attention(query, keys, values, seen, scaling, rule.softcap)
        error = (self.attend(planner, rule).cpu().double() - torch.from_numpy(expected)).abs().max()
        return float(error.nan_to_num(torch.inf))


def _seen(sequence: PackedSequence) -> Iterator[list[int]]:
    """Yields the places in the sequence that each of its queries sees."""
    for place in range(sequence.past, sequence.root):
        yield list(range(place + 1))
    if sequence.tree is not None:
        for node in range(len(sequence.tree)):
            yield [*range(sequence.root), *(sequence.root + each for each in sequence.tree.path(node))]


def random_batch(
    sizes: Sizes, dtype: torch.dtype, device: str, seed: int, longest: int = 160, num_parts: int = 4
) -> Batch:
    """Returns a batch of chains and trees: 1 to 64 queries a sequence, some of whole texts."""
    chance, shapes, parts = random.Random(seed), np.random.default_rng(seed), list[Part]()
    for number in range(num_parts):
        num_queries = chance.choice((1, 1, 5, 17, 64))
        length = num_queries + chance.choice((0, chance.randrange(longest - 64)))
        tree = random_tree(shapes, chance.randint(1, num_queries)) if chance.random() < 0.5 else None
        path = tree.path(len(tree) - 1) if tree is not None else ()
        parts.append(Part(make_text(sizes, length, 100 * seed + number), num_queries, length, tree, path))
    return Batch(sizes, parts, dtype, device, order=seed)


# ------------------------------------------------------------------------------- bits


@dataclass
class Comparison:
    """Compares rows of a text, however it is laid out, with the same rows attending alone."""

    planner: AttentionPlanner
    sizes: Sizes
    dtype: torch.dtype
    device: str
    rule: AttentionRule
    text: Text
    ends: Sequence[int]  # lengths at which a row is compared

    def __post_init__(self) -> None:
        self._alone = {end - 1: self.attend([Part(self.text, 1, end)], order=end)[0] for end in self.ends}
        self.num_changed: dict[str, int] = {}

    def attend(self, parts: Sequence[Part], order: int = 3) -> torch.Tensor:
        """Returns the attention of a batch."""
        return Batch(self.sizes, parts, self.dtype, self.device, order).attend(self.planner, self.rule)

    def compare(self, way: str, out: torch.Tensor, positions: Iterable[int]) -> None:
        """Counts the rows of `out` that differ from those alone, by the position of each."""
        alone = self._alone
        pairs = [(row, alone[each]) for row, each in zip(out, positions, strict=True) if each in alone]
        assert pairs, f"{way}: no row to compare"
        num_changed = sum(not torch.equal(row, alone) for row, alone in pairs)
        self.num_changed[way] = self.num_changed.get(way, 0) + num_changed

    def compare_chains(self, others: Sequence[Part]) -> None:
        """Compares single queries in other blocks, several, all of the text, and some beside others."""
        parts = [Part(self.text, min(MAX_QUERIES, end), end) for end in self.ends]
        positions = [range(end - part.num_queries, end) for end, part in zip(self.ends, parts, strict=True)]
        for end, part, its_positions in zip(self.ends, parts, positions, strict=True):
            self.compare("other blocks", self.attend([Part(self.text, 1, end)]), [end - 1])
            self.compare("several queries", self.attend([part], order=end), its_positions)
        last = parts[-1].length
        self.compare("all queries", self.attend([Part(self.text, last, last)]), range(last))
        out, row = self.attend([others[0], *parts, *others[1:]]), others[0].num_queries
        for its_positions in positions:
            self.compare("beside others", out[row : row + len(its_positions)], its_positions)
            row += len(its_positions)

    def compare_trees(self, others: Sequence[Part]) -> None:
        """Compares a path through a tree whose other nodes come first, after some queries of the chain, beside
        others."""
        parts, rows, positions, row = list(others), list[int](), list[int](), 0
        row = sum(part.num_queries for part in others)
        for end in self.ends[-2:]:
            length = min(MAX_PATH, end)
            root, path = end - length, range(1, 2 * length, 2)
            tree = Tree([2 * (node // 2) - 1 for node in range(2 * length)])
            num_before = min(2, root)
            parts.append(Part(self.text, num_before + len(tree), root + len(tree), tree, path))
            rows += [*range(row, row + num_before), *(row + num_before + node for node in path)]
            positions += range(root - num_before, end)
            row += num_before + len(tree)
        self.compare("a path of a tree", self.attend(parts)[rows], positions)


def changed_rows(
    planner: AttentionPlanner,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    split_tokens: int,
    rule: AttentionRule = PLAIN,
) -> dict[str, int]:
    """Returns how many rows of a text have other bits than alone, for each way to lay it out.

    They are around the ends of products and of splits, of which the first are shorter.
    """
    early = early_tokens(split_tokens)
    ends = (1, early + 1, split_tokens, split_tokens + 1, 2 * split_tokens - 3, 2 * split_tokens + 9)
    text = make_text(sizes, ends[-1], seed=1)
    comparison = Comparison(planner, sizes, dtype, device, rule, text, ends)
    longer, tree = 3 * split_tokens + 3, random_tree(np.random.default_rng(0), 9)
    others = [
        Part(make_text(sizes, longer, seed=2), 2, longer),
        Part(make_text(sizes, KEYS + 20, seed=3), 11, KEYS + 20, tree, tree.path(8)),
    ]
    comparison.compare_chains(others)
    comparison.compare_trees(others)
    return comparison.num_changed


@dataclass(frozen=True)
class KernelFigures:
    """Holds what the cases found, by dtype."""

    errors: dict[str, float]  # the largest of all batches
    changed: dict[str, dict[str, int]]  # rows by the way in which they are laid out

    @property
    def num_changed(self) -> int:
        """Returns the rows whose bits change."""
        return sum(sum(ways.values()) for ways in self.changed.values())


def measure_kernel(
    error_sizes: Sequence[Sizes], bit_sizes: Sizes, device: str, split_tokens: int, num_batches: int
) -> KernelFigures:
    """Returns the errors of `num_batches` batches of each size, and the rows that change, in every dtype."""
    errors, changed = dict[str, float](), dict[str, dict[str, int]]()
    for dtype in MAX_ERROR:
        name = str(dtype).removeprefix("torch.")
        errors[name] = max(
            random_batch(sizes, dtype, device, seed).error(
                sizes.planner(device, split_tokens), RULES[seed % len(RULES)]
            )
            for sizes in error_sizes
            for seed in range(num_batches)
        )
        planner = bit_sizes.planner(device, split_tokens)
        changed[name] = changed_rows(planner, bit_sizes, dtype, device, split_tokens)
    return KernelFigures(errors, changed)


class LengthSplits(AttentionPlanner):
    """Has a fault planted in it: how tokens are split depends on the longest sequence of a forward."""

    def __init__(self, sizes: Sizes, device: str, split_tokens: int) -> None:
        self._split_tokens = split_tokens
        self._planners = [sizes.planner(device, split) for split in (split_tokens, 8 * split_tokens)]

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        is_long = max(each.length for each in sequences) > 2 * self._split_tokens
        return self._planners[is_long].plan(sequences)
