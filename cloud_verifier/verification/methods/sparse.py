"""Speculative sampling with the draft's truncated distribution (docs/design.md §5). Exact, given an honest q.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2) with q = w/Σw over at most 64 ids a
position: the draft is *sampled from* what it sends, so q is all of its distribution, 0 elsewhere. Token i is
accepted with probability min(1, p/q); the first rejected one is replaced by a sample ∝ max(p − q, 0) of that
same q. A deterministic draft has a support of one id with q = 1.
"""

from __future__ import annotations

from functools import partial

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.cloud_verifier.verification.methods.chain import conclude, reject_in_order
from outrider.cloud_verifier.verification.methods.supports import sample_residual
from outrider.common.sampling.support import support_prob


class SparseMethod(VerificationMethod):
    """Accepts with min(1, p/q) and corrects from the residual."""

    def verify(self, round_input: RoundInput) -> Outcome:
        draft_probs = list(map(support_prob, round_input.supports, round_input.draft_tokens))
        accepted, ratios = reject_in_order(round_input, draft_probs)
        return conclude(round_input, accepted, ratios, partial(sample_residual, round_input))
