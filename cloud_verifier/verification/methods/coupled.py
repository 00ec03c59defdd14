"""Coupled sampling: every committed token is the target's sample (docs/design.md §5). Exact.

The sample at index t is argmax over ids of (score + Gumbel noise keyed by (seed, t, id)); a draft token is
accepted where it equals that sample. The sequence is a function of target, parameters and seed alone, so any
draft, a hostile one too, changes only the speed. Gumbel-max: Maddison et al. 2014, "A* Sampling", §2;
coupling two models through common noise: Daliri et al. 2025, "Coupling without Communication and
Drafter-Invariant Speculative Decoding".

A tree is as exact: the sample after the sequence is computed, the child that holds it is followed, and so on. Siblings
share their position's noise, but at each position one node alone is visited.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.cloud_verifier.verification.methods.chain import conclude, judge_in_order, target_prob
from outrider.cloud_verifier.verification.methods.tree import follow_sample


class CoupledMethod(VerificationMethod):
    """Accepts drafted tokens that equal the target's sample, which is also the correction."""

    def verify(self, round_input: RoundInput) -> Outcome:
        rows, draft_tokens, draft_probs = round_input.rows, round_input.draft_tokens, round_input.draft_probs
        ratios: list[float] = []  # min(1, p/q) of the positions judged

        def accepts(index: int) -> bool:
            sampled = rows.target_sample(index)  # before p: the same pass over the row computes its sum
            if draft_probs:
                ratios.append(min(1.0, target_prob(round_input, index) / draft_probs[index]))
            return sampled == draft_tokens[index]

        if (tree := round_input.tree) is None:
            accepted: Sequence[int] = judge_in_order(round_input, accepts)
        else:
            accepted = follow_sample(round_input, tree)
        # A pipelined round that follows is checked against the bonus, so there always is one.
        return conclude(round_input, accepted, ratios, rows.target_sample, has_always_bonus=True)
