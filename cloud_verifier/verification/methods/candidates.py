"""Speculative sampling where only the edge has all of q (docs/design.md §5). Exact, given an honest q.

The verifier judges with the scalar q of each drafted token, as `sparse` does. At the first rejection it sends
`num_candidates` samples of p with their p. The edge, which kept its support, takes the first y with u <
max(0, 1 − q(y)/p(y)), which is a sample ∝ max(p − q, 0) by rejection (von Neumann 1951), and commits it with
its next round. Where none passes it requests the next ones (`candidates_from`); taking the last instead would
be a sample of p, and biased. Candidate j for the token at index t is keyed (seed, t, CANDIDATE, j), so that
no two are the same draw, whichever round contains them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from outrider.cloud_verifier.verification.methods.base import (
    NoiseKey,
    Outcome,
    Resampling,
    RoundInput,
    VerificationMethod,
)
from outrider.cloud_verifier.verification.methods.chain import conclude, ending, mean_ratio, reject_in_order
from outrider.cloud_verifier.verification.methods.supports import sample_residual
from outrider.common.noise.draws import Purpose
from outrider.common.sampling.support import choose_candidate
from outrider.common.types import Candidate, CorrectionKind, MethodParams

NUM_CANDIDATES = 4
MAX_HERE = 64


class CandidatesMethod(VerificationMethod):
    """Accepts with min(1, p/q) and sends candidates for the correction."""

    resampling = Resampling.CANDIDATES

    def verify(self, round_input: RoundInput) -> Outcome:
        if round_input.candidates_from:
            more = sample_candidates(round_input, 0, round_input.candidates_from)
            return Outcome(0, 0, CorrectionKind.NONE, math.nan, candidates=more)
        accepted, ratios = reject_in_order(round_input, round_input.draft_probs)
        if ending(round_input, accepted) is CorrectionKind.CORRECTION:
            candidates = sample_candidates(round_input, len(accepted), 0)
            return Outcome(len(accepted), 0, CorrectionKind.NONE, mean_ratio(ratios), candidates=candidates)
        return conclude(round_input, accepted, ratios, round_input.rows.target_sample)


def choose_here(round_input: RoundInput, outcome: Outcome, seed: int) -> Outcome:
    """Returns `outcome` with the correction that the edge would choose, for a co-located draft with supports.

    Where none of the first `MAX_HERE` passes (draft and target nearly equal), the residual is sampled
    directly: choosing among samples of p does the same without q, and here q is known.
    """
    row = outcome.accepted_len
    support, position = round_input.supports[row], round_input.position + row
    candidates = outcome.candidates
    token_id = choose_candidate(support, candidates, seed, position, 0)
    num_seen = len(candidates)
    while token_id is None and num_seen < MAX_HERE:
        candidates = sample_candidates(round_input, row, num_seen)
        token_id = choose_candidate(support, candidates, seed, position, num_seen)
        num_seen += len(candidates)
    if token_id is None:
        unused = NoiseKey(Purpose.RESIDUAL, position, num_seen)  # no draw had this key yet
        token_id = sample_residual(round_input, row, key=unused)
    return replace(outcome, correction=token_id, correction_kind=CorrectionKind.CORRECTION, candidates=())


def candidate_indices(params: MethodParams, first_index: int) -> range:
    """Returns the indices of the samples that one answer has, from `first_index` on."""
    return range(first_index, first_index + (params.num_candidates or NUM_CANDIDATES))


def sample_candidates(round_input: RoundInput, row: int, first_index: int) -> tuple[Candidate, ...]:
    """Returns the next samples of p at `row`, from `first_index` on, each with its p."""
    position = round_input.position + row
    token_ids = [
        round_input.rows.sample(row, NoiseKey(Purpose.CANDIDATE, position, index))
        for index in candidate_indices(round_input.method_params, first_index)
    ]
    log_probs = round_input.rows.log_probs(row, token_ids)
    return tuple(Candidate(t, math.exp(lp)) for t, lp in zip(token_ids, log_probs, strict=True))
