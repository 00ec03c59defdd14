"""Lookahead decoding: n-grams that the target itself finds by Jacobi iteration (Fu et al. 2024, arXiv 2402.02057).

A step feeds a window of guesses beside the n-grams that are verified, as one tree:

    the last committed token ┬ candidate n-grams that begin with it ...
                             └ a0 ─ a1 ─ a2      the window's first level, guesses of the next tokens
                               │    │    └ b2    its second level: what the target chose after a2 last time
                               │    └ b1
                               └ b0

What the target chooses after the last level makes one n-gram a column, (a, b, choice), for the pool, and the levels
move up. With the noise of `coupled` the choice at a position is a function of the text before it, so the iteration has
the same fixed point as decoding; and a node of the window that is right is accepted like any other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.common.types import LOOKAHEAD, Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft, depth_first

_LONG_FROM = 32  # nodes, from which on the n-grams are longer
_SHORT, _LONG = 3, 5  # tokens of an n-gram
_MAX_KEYS, _MAX_GRAMS = 4096, 8  # of the pool: first tokens, and n-grams of each


class Lookahead:
    """Implements `DraftSource` without weights."""

    name = LOOKAHEAD
    signal_names = ()

    def __init__(self, backend: TargetBackend) -> None:
        self.num_tokens, self.max_context = backend.num_tokens, backend.max_context
        self.eos_token_ids = backend.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = LOOKAHEAD, backend.tokenizer_fingerprint

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> LookaheadSequence:
        """Returns a new, empty sequence. It has no supports (`check_open`)."""
        assert not num_support, "a guess is no sample"
        return LookaheadSequence(self.num_tokens)

    def close(self) -> None:
        """Has nothing to free."""

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LookaheadSequence:
    """Holds the window and the pool of one text."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._text: list[int] = []
        self._columns: list[TokenIds] = []  # of the window: the tokens of its levels
        self._paths: dict[TokenIds, int] = {}  # nodes of the last tree, by their tokens
        self._pool: OrderedDict[int, deque[TokenIds]] = OrderedDict()  # by first token, what followed it

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return len(self._text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids, whose n-grams enter the pool."""
        start = len(self._text)
        self._text.extend(token_ids)
        size = _LONG
        for first in range(max(0, start - size + 1), len(self._text) - size + 1):
            self._keep(tuple(self._text[first : first + size]))

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens."""
        del self._text[position:]

    def read_choices(self, choices: Sequence[int]) -> None:
        """Moves the window on by what the target chose after each node of the last tree."""
        if not self._paths or not choices:
            return
        columns = []
        for number, column in enumerate(self._columns):
            path = (*(first for first, *_ in self._columns[:number]), *column)
            gram = (*column, choices[self._paths[path] + 1])
            self._keep(gram)
            columns.append(gram[1:])
        self._columns, self._paths = columns, {}

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Proposes the newest n-gram after the last token. A chain has no room for a window."""
        gram = next(iter(self._grams()), ())
        return Draft(gram[:num_draft_tokens], ())

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """Proposes n-grams and the window, half of the nodes each. `values` and `rule` have no say."""
        depth = budget.max_depth
        size = min(_LONG if budget.num_nodes >= _LONG_FROM else _SHORT, depth)
        width = budget.num_nodes // (2 * max(1, size - 1))
        if size < 2 or not width:
            return TreeDraft((), ())
        self._fit(min(width, depth - size + 2), size - 1)
        paths = [gram[: size - 1] for gram in self._grams()[:width]]
        paths += [
            (*(first for first, *_ in self._columns[:number]), *column)
            for number, column in enumerate(self._columns)
        ]
        return self._tree(paths)

    def close(self) -> None:
        """Frees the pool."""
        self._pool.clear()

    def check_integrity(self) -> None:
        """Asserts that the window is a rectangle."""
        assert len({len(column) for column in self._columns}) <= 1, "columns of several lengths"

    def _grams(self) -> list[TokenIds]:
        """Returns what followed the last token before, the newest first."""
        return list(reversed(self._pool.get(self._text[-1], ())))

    def _keep(self, gram: TokenIds) -> None:
        known = self._pool.setdefault(gram[0], deque(maxlen=_MAX_GRAMS))
        self._pool.move_to_end(gram[0])
        if gram[1:] in known:
            known.remove(gram[1:])
        known.append(gram[1:])
        while len(self._pool) > _MAX_KEYS:
            self._pool.popitem(last=False)

    def _fit(self, width: int, num_levels: int) -> None:
        """Has the window so many columns and levels; what it lacks begins as copies of the text's last tokens."""
        if len(self._columns) != width or len(self._columns[0]) != num_levels:
            needed = width + num_levels
            guesses = (self._text[-needed:] * needed)[:needed]
            self._columns = [tuple(guesses[first : first + num_levels]) for first in range(width)]

    def _tree(self, paths: Sequence[TokenIds]) -> TreeDraft:
        root: TokenIds = ()
        children: dict[TokenIds, list[TokenIds]] = {root: []}
        for path in paths:
            for end in range(1, len(path) + 1):
                if path[:end] not in children:
                    children[path[:end]] = []
                    children[path[: end - 1]].append(path[:end])
        nodes, parents = depth_first(root, children.__getitem__)
        self._paths = {path: node for node, path in enumerate(nodes)}
        return TreeDraft(tuple(path[-1] for path in nodes), (), parents=tuple(parents))
