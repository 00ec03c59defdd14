"""Speculative sampling with the draft's truncated distribution (docs/design.md §5). Exact, given an honest q.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2) with q = w/Σw over at most 64 ids a
position: the draft is *sampled from* what it sends, so q is all of its distribution, 0 elsewhere. Token i is
accepted with probability min(1, p/q); the first rejected one is replaced by a sample ∝ max(p − q, 0) of that
same q. A deterministic draft has a support of one id with q = 1.

The children of a tree's node are drawn from its support without replacement, in their order, and judged in it: after
one is rejected p is the residual and q what is left without it (SpecInfer, Miao et al. 2023, arXiv:2305.09781;
without replacement: Sequoia, Chen et al. 2024, arXiv:2402.12374, and Jeon et al. 2024, arXiv:2402.14160). After the
last one the correction is a sample of that residual. Each child has a draw of its own, keyed by its index in the
draft. docs/trees.md has the proof.
"""

from __future__ import annotations

from functools import partial

from outrider.cloud_verifier.verification.methods.base import (
    Outcome,
    Resampling,
    RoundInput,
    VerificationMethod,
)
from outrider.cloud_verifier.verification.methods.chain import conclude, reject_in_order
from outrider.cloud_verifier.verification.methods.supports import Remainder, sample_residual
from outrider.cloud_verifier.verification.methods.tree import follow
from outrider.common.sampling.support import support_prob
from outrider.common.tree import Tree


class SparseMethod(VerificationMethod):
    """Accepts with min(1, p/q) and corrects from the residual."""

    resampling = Resampling.RESIDUAL

    def verify(self, round_input: RoundInput) -> Outcome:
        if (tree := round_input.tree) is not None:
            return _verify_tree(round_input, tree)
        draft_probs = list(map(support_prob, round_input.supports, round_input.draft_tokens))
        accepted, ratios = reject_in_order(round_input, draft_probs)
        return conclude(round_input, accepted, ratios, partial(sample_residual, round_input))


def _verify_tree(round_input: RoundInput, tree: Tree) -> Outcome:
    left: dict[int, Remainder] = {}  # by row, after its children were judged
    ratios: list[float] = []  # of first children: the positions judged

    def choose(node: int) -> int | None:
        children = tree.children(node)
        if not children:
            return None
        remainder = left[node + 1] = Remainder(round_input, node + 1)
        for child in children:
            token_id = round_input.draft_tokens[child]
            ratio = remainder.ratio(token_id)
            if child == children[0]:
                ratios.append(min(1.0, ratio))
            if round_input.draws.accepts(ratio, child):
                return child
            remainder.reject(token_id)
        return None

    accepted = follow(round_input, tree, choose)
    return conclude(round_input, accepted, ratios, lambda row: left[row].sample())
