"""Drafts copies for one sequence: chains and trees of what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.errors import InvalidFieldError
from outrider.common.sampling.support import certain
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, ended
from outrider.edge_client.drafting.copying.contexts import MAX_MATCH, Contexts, GrowingContexts, TokenText
from outrider.edge_client.drafting.copying.expander import CopyExpander, CopySupports
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder, make_draw
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft


@dataclass(frozen=True, slots=True)
class CopyRules:
    """Holds how one strategy copies."""

    name: str  # of its sources in `NodeValues`
    max_match: int = MAX_MATCH
    reads_own_text: bool = True
    chain_places: int = 64  # that a chain's counts are of
    tree_places: int = 64
    # Of a chain, which ends before a token that is reached with a smaller chance: 0 is never. SuffixDecoding's rule is
    # the same with ratios of counts (2411.04975, §3.2); here the chances by length of the run are learned.
    min_chance: float = 0.1
    tokens_a_match: float = 4.0  # a chain's at most, for each token of the run; SuffixDecoding's alpha


class CopySequence:
    """Proposes copies of earlier tokens, of this text or others. Without a match it proposes nothing, and the target
    samples alone."""

    def __init__(
        self,
        rules: CopyRules,
        num_tokens: int,
        sampling: SamplingParams,
        has_supports: bool = False,
        others: Sequence[Contexts] = (),
    ) -> None:
        self._rules = rules
        self._num_tokens = num_tokens
        self._sampling = sampling
        self._has_supports = has_supports
        self._text = GrowingContexts(rules.max_match) if rules.reads_own_text else TokenText()
        own = (self._text,) if isinstance(self._text, GrowingContexts) else ()
        self._searched: tuple[Contexts, ...] = (*own, *others)
        self._values = NodeValues()

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return len(self._text.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Returns the committed ids."""
        return self._text.token_ids

    def use_values(self, values: NodeValues) -> None:
        """See `UsesValues.use_values`."""
        self._values = values

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids. Raises `InvalidFieldError` for ids >= `num_tokens`."""
        for token_id in token_ids:
            if not 0 <= token_id < self._num_tokens:
                raise InvalidFieldError(
                    "token_ids", f"{token_id} is not below the tokenizer's {self._num_tokens} tokens"
                )
        self._text.extend(token_ids)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens."""
        assert 0 <= position <= self.position, f"cannot truncate {self.position} tokens to {position}"
        self._text.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Returns the likeliest copy as a draft, which is a `TreeDraft` of one path. A copy that reaches the end of the
        sequence continues with itself, so a repetition is proposed as often as it fits. Each probability is 1, since
        the draft had no other choice."""
        return ended(self.copy(num_draft_tokens)[0], should_stop)

    def copy(
        self, num_draft_tokens: int, after: TokenIds = (), min_chance: float | None = None
    ) -> tuple[TreeDraft, float]:
        """Returns the likeliest copy after the text and the tokens `after`, and how many of its tokens are expected to
        be right. `min_chance` replaces the rules'."""
        assert self._text.token_ids, "a draft needs at least one committed token"
        rules, expander = self._rules, self.expander(self._rules.chain_places)
        least = rules.min_chance if min_chance is None else min_chance
        path: TokenIds = ()
        told, expected, chance, limit = list[Continuations](), 0.0, 1.0, num_draft_tokens
        while len(path) < limit:
            found = expander.tell((*after, *path))
            if not found.token_ids:
                break
            chance *= self._values.chances(found)[0]
            if chance < least:
                break
            if not path and least:
                limit = min(limit, int(rules.tokens_a_match * expander.count(after)[0]))
            path = (*path, found.token_ids[0])
            told.append(found)
            expected += chance
        supports = tuple(map(certain, path)) if self._has_supports else ()
        continuations = (*((each,) for each in told), ())
        return TreeDraft(path, (1.0,) * len(path), supports=supports, continuations=continuations), expected

    def expander(self, num_places: int | None = None, min_match: int = 1) -> CopyExpander:
        """Returns the source of one tree; what followed a run of less than `min_match` tokens is left out."""
        most = num_places or self._rules.tree_places
        return CopyExpander(self._text, self._searched, self._rules.name, most, min_match, self._num_tokens)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. There is no rule, since a copy has no signals."""
        assert rule is None, "a rule needs signals"
        assert self._text.token_ids, "a draft needs at least one committed token"
        if self._has_supports:
            draw = make_draw(self._sampling, self.position)
            return DrawnTreeBuilder(draw, values.draws, budget).build(CopySupports(self.expander()))
        return TreeBuilder(values, budget).build([self.expander()])

    def remember(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """See `Remembers.remember`; does nothing where no other text is searched."""

    def close(self) -> None:
        """Frees the index."""
        self._text = TokenText()
        self._searched = ()

    def check_integrity(self) -> None:
        """Asserts that index and sequence agree."""
        self._text.check_integrity()
