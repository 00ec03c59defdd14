"""Accept with min(1, p/q), correct from p without the rejected token. Approximate: not the target's
distribution.

A rejected token has q ≥ p, so the residual max(p − q, 0) is 0 there; but the residual is also lower at the
other tokens that the draft likes, which a scalar q does not name. Where q is 1 at one id (a deterministic
draft) the residual is exactly this.
"""

from __future__ import annotations

import math

from outrider.cloud_verifier.verification.methods.base import (
    NoiseKey,
    Outcome,
    Resampling,
    RoundInput,
    VerificationMethod,
)
from outrider.cloud_verifier.verification.methods.chain import conclude, reject_in_order
from outrider.common.noise.draws import Purpose


class ScalarResidualMethod(VerificationMethod):
    """Accepts with min(1, p/q) and corrects from p without the rejected token."""

    resampling = Resampling.WITHOUT_DRAFTED

    def verify(self, round_input: RoundInput) -> Outcome:
        accepted, ratios = reject_in_order(round_input, round_input.draft_probs)

        def correct(row: int) -> int:
            key = NoiseKey(Purpose.RESIDUAL, round_input.position, row)
            return round_input.rows.sample(row, key, {round_input.draft_tokens[row]: -math.inf})

        return conclude(round_input, accepted, ratios, correct)
