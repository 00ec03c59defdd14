"""Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2).

Exact, given an honest q, as `sparse` is, and accepts at least as many tokens on average. A prefix of i
drafted tokens has c₀ = 1, cᵢ = min(1, cᵢ₋₁ p(xᵢ)/q(xᵢ)): the probability that it is accepted, given its
tokens. Each length i is taken with probability hᵢ = R/(R + 1 − cᵢ), R = Σₓ max(cᵢ p(x) − q(x), 0), the last
with its c alone; the longest taken is accepted, and a sample ∝ max(c p − q, 0) follows it. Each length has a
draw of its own, keyed (seed, start, i). It decides together with later positions' tokens: used again for the
same position in the next round, it would bias the sequence (docs/design.md §5).

The support is all of q, so R = c − Σₓ∈S min(c p(x), q(x)): no sum over the vocabulary is needed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from outrider.cloud_verifier.verification.methods.base import (
    Outcome,
    Resampling,
    RoundInput,
    VerificationMethod,
)
from outrider.cloud_verifier.verification.methods.chain import conclude
from outrider.cloud_verifier.verification.methods.supports import sample_residual, support_probs, target_probs
from outrider.common.stopping import first_stop


class _Prefix(NamedTuple):
    kept: float  # c: the probability that this prefix of the draft is accepted, given its tokens
    residual: float  # R: mass of max(c p − q, 0) after it; 0 after the last, where nothing is drafted


class BlockMethod(VerificationMethod):
    """Accepts the longest prefix that its draw takes, and corrects from that prefix's residual."""

    resampling = Resampling.BLOCK_RESIDUAL

    def verify(self, round_input: RoundInput) -> Outcome:
        prefixes, ratios = _weigh(round_input)
        accepted_len = _longest_taken(round_input, prefixes)
        stop = first_stop(round_input.draft_tokens[:accepted_len], round_input.stop_ids)
        if stop is not None:
            accepted_len = stop + 1
        correct = partial(sample_residual, round_input, kept=prefixes[accepted_len].kept)
        return conclude(round_input, range(accepted_len), ratios[: accepted_len + 1], correct)


def _weigh(round_input: RoundInput) -> tuple[list[_Prefix], list[float]]:
    """Returns every prefix of the draft, the empty one first, and min(1, p/q) of each token."""
    prefixes: list[_Prefix] = []
    ratios: list[float] = []
    kept = 1.0
    for row, (token_id, support) in enumerate(
        zip(round_input.draft_tokens, round_input.supports, strict=True)
    ):
        probs, draft_probs = target_probs(round_input, row), support_probs(support)
        residual = kept - float(np.minimum(kept * probs, draft_probs).sum())
        prefixes.append(_Prefix(kept, max(residual, 0.0)))
        drafted = support.token_ids.index(token_id)
        ratio = float(probs[drafted]) / float(draft_probs[drafted])
        ratios.append(min(1.0, ratio))
        kept = min(1.0, kept * ratio)
    prefixes.append(_Prefix(kept, 0.0))
    return prefixes, ratios


def _longest_taken(round_input: RoundInput, prefixes: list[_Prefix]) -> int:
    """Returns the length of the longest prefix that its draw takes, 0 where none does."""
    last = len(prefixes) - 1
    for length in range(last, 0, -1):
        kept, residual = prefixes[length]
        if length == last:
            probability = kept
        else:  # 0/0 where p equals q: then a longer prefix is accepted
            probability = residual / (residual + (1.0 - kept)) if residual > 0.0 else 0.0
        if round_input.draws.accepts(probability, length - 1):
            return length
    return 0
