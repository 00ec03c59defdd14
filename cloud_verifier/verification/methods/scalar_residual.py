"""Accept with min(1, p/q), correct from p without the rejected token. Approximate: not the target's text.

A rejected token has q ≥ p, so the residual max(p − q, 0) never holds it; but that residual also leaves out,
or lowers, the other tokens the draft likes, which a scalar q does not name. Where q sits on one id (a draft
without chance) the residual is exactly this.
"""

from __future__ import annotations

import math

from outrider.cloud_verifier.verification.methods.base import NoiseKey, Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.chain import conclude, reject_in_order
from outrider.common.noise.draws import Purpose


class ScalarResidualMethod:
    def verify(self, round_input: RoundInput) -> Outcome:
        accepted_len, ratios = reject_in_order(round_input, round_input.draft_probs)

        def correct(row: int) -> int:
            key = NoiseKey(Purpose.RESIDUAL, round_input.position, row)
            return round_input.rows.sample(row, key, {round_input.draft_tokens[row]: -math.inf})

        return conclude(round_input, accepted_len, ratios, correct)
