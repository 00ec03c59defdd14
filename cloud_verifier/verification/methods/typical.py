"""Medusa's typical acceptance. Approximate: not the target's distribution.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", §2.3.1: a
draft token is accepted where p > min(ε, δ·exp(−H(p))), whatever q was. The defaults are those of Medusa's
code (`posterior_threshold` ε = 0.09, `posterior_alpha` δ = √ε = 0.3). Medusa accepts the first token of a
round unchecked, because its own model made it; a draft's first token is another model's and is judged like
the rest. The target's sample follows the accepted tokens. Of a tree the longest path of such tokens is accepted.
"""

from __future__ import annotations

import math

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.cloud_verifier.verification.methods.chain import conclude, row_of, target_prob
from outrider.cloud_verifier.verification.methods.tree import longest_accepted

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


class TypicalMethod(VerificationMethod):
    """Accepts tokens that are typical of p by its entropy, and corrects with the target's sample."""

    def verify(self, round_input: RoundInput) -> Outcome:
        params, rows = round_input.method_params, round_input.rows
        epsilon = TYPICAL_EPSILON if params.typical_epsilon is None else params.typical_epsilon
        delta = TYPICAL_DELTA if params.typical_delta is None else params.typical_delta

        def accepts(index: int) -> bool:
            prob = target_prob(round_input, index)
            # min(ε, δ e^−H) ≤ ε: above ε the entropy, a pass over the vocabulary, does not matter
            return prob > epsilon or prob > delta * math.exp(-rows.entropy(row_of(round_input, index)))

        return conclude(round_input, longest_accepted(round_input, accepts), (), rows.target_sample)
