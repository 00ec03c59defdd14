"""Accept where p ≥ T_pass or p/q ≥ T_ratio, correct from p. Approximate: not the target's distribution.

Acceptance is deterministic: a draft token likely enough for the target is accepted however much likelier it
is for the draft. T_pass = 1 with T_ratio above 1 accepts less than `shortcut` does; lower ones accept more
and are further from the target. The defaults (p ≥ 0.3, or half of q) are our own choice. Of a tree the longest path of
such tokens is accepted.
"""

from __future__ import annotations

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.cloud_verifier.verification.methods.chain import conclude, target_prob
from outrider.cloud_verifier.verification.methods.tree import longest_accepted

THRESHOLD_PASS = 0.3
THRESHOLD_RATIO = 0.5


class ThresholdMethod(VerificationMethod):
    """Accepts by fixed limits on p and p/q, and corrects with the target's sample."""

    def verify(self, round_input: RoundInput) -> Outcome:
        params = round_input.method_params
        least = THRESHOLD_PASS if params.threshold_pass is None else params.threshold_pass
        least_ratio = THRESHOLD_RATIO if params.threshold_ratio is None else params.threshold_ratio
        ratios: list[float] = []

        def accepts(index: int) -> bool:
            prob = target_prob(round_input, index)
            ratio = prob / round_input.draft_probs[index]
            ratios.append(min(1.0, ratio))
            return prob >= least or ratio >= least_ratio

        accepted = longest_accepted(round_input, accepts)
        return conclude(round_input, accepted, ratios, round_input.rows.target_sample)
