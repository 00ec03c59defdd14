"""Accept with min(1, p/q), correct from p. Approximate: not the target's distribution.

An exact correction is sampled from max(p − q, 0), for which the scalar q on the wire does not suffice.
Sampled from p, tokens that the draft likes have two chances: one token's distribution becomes min(p, q) + (1
− Σ min(p, q)) p, too close to q by as much as was rejected.
"""

from __future__ import annotations

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.cloud_verifier.verification.methods.chain import conclude, reject_in_order


class ShortcutMethod(VerificationMethod):
    """Accepts with min(1, p/q) and corrects with the target's sample."""

    def verify(self, round_input: RoundInput) -> Outcome:
        accepted, ratios = reject_in_order(round_input, round_input.draft_probs)
        return conclude(round_input, accepted, ratios, round_input.rows.target_sample)
