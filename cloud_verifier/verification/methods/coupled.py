"""Coupled sampling: the target's own sample is always the answer (DESIGN §5).

The sample at index t is argmax over ids of (score + Gumbel noise keyed by (seed, t, id)); a draft token
stands where it equals that sample. The text is a function of target, parameters and seed alone,
so any draft, a hostile one too, changes the speed and nothing else. Gumbel-max: Maddison et al. 2014,
"A* Sampling", §2; coupling two models through common noise: Daliri et al. 2025, "Coupling without
Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.chain import conclude, judge_in_order, target_prob


class CoupledMethod:
    def verify(self, round_input: RoundInput) -> Outcome:
        rows, draft_tokens, draft_probs = round_input.rows, round_input.draft_tokens, round_input.draft_probs
        ratios: list[float] = []  # min(1, p/q) of the positions judged

        def accepts(index: int) -> bool:
            own = rows.own_sample(index)  # before its p: the pass over the row that finds it sums p too
            if draft_probs:
                ratios.append(min(1.0, target_prob(round_input, index) / draft_probs[index]))
            return own == draft_tokens[index]

        accepted_len = judge_in_order(round_input, accepts)
        # The next round, if on its way, is checked against the bonus: it is always there.
        return conclude(round_input, accepted_len, ratios, rows.own_sample, has_always_bonus=True)
