"""Coupled sampling: the target's own sample is always the answer (DESIGN §5).

The sample at index t is argmax over ids of (score + Gumbel noise keyed by (seed, t, id)); a draft token
stands where it equals that sample. The text is a function of target, parameters and seed alone,
so any draft, a hostile one too, changes the speed and nothing else. Gumbel-max: Maddison et al. 2014,
"A* Sampling", §2; coupling two models through common noise: Daliri et al. 2025, "Coupling without
Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

import math

from cloud_verifier.methods.base import Outcome, RoundInput
from cloud_verifier.methods.chain import mean_ratio
from common.stopping import first_stop
from common.types import CorrectionKind


class CoupledMethod:
    def verify(self, round_input: RoundInput) -> Outcome:
        rows, draft_tokens, draft_probs = round_input.rows, round_input.draft_tokens, round_input.draft_probs
        ratios: list[float] = []  # min(1, p/q) of the positions judged
        accepted_len = 0
        while True:
            sample = rows.own_sample(accepted_len)
            if accepted_len == len(draft_tokens):
                break
            drafted = draft_tokens[accepted_len]
            if draft_probs:
                (log_prob,) = rows.log_probs(accepted_len, (drafted,))
                ratios.append(min(1.0, math.exp(log_prob) / draft_probs[accepted_len]))
            if sample != drafted:
                break
            accepted_len += 1
        stop = first_stop(draft_tokens[:accepted_len], round_input.stop_ids)
        if stop is not None:  # nothing after it is accepted, and there is nothing to correct
            return Outcome(stop + 1, 0, CorrectionKind.NONE, mean_ratio(ratios[: stop + 1]))
        is_full = accepted_len == len(draft_tokens)
        kind = CorrectionKind.BONUS if is_full else CorrectionKind.CORRECTION
        return Outcome(accepted_len, sample, kind, mean_ratio(ratios))
