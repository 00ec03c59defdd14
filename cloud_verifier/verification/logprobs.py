"""Log-probabilities of emitted tokens, computed for sessions opened with `num_logprobs`.

Raw is the log-softmax of the target's logits before processing, over the ids that exist; processed is log p
of the distribution that was sampled from, so 0 at temperature 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import Outcome, TargetRows
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
from outrider.common.sampling.support import most_probable
from outrider.common.types import CorrectionKind, TokenIds, TokenLogprobs

MAX_LOGPROBS = 20


def logprobs_of(
    logits: NDArray[np.float32], rows: TargetRows, draft_tokens: TokenIds, outcome: Outcome, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Returns one entry for each committed token: the accepted ones, then the correction or bonus.

    `logits` [num_draft_tokens + 1, num_tokens] are `rows` before processing, without ids that do not exist.
    """
    nodes = outcome.accepted_nodes or range(outcome.accepted_len)
    token_ids = tuple(draft_tokens[node] for node in nodes)
    if outcome.correction_kind is not CorrectionKind.NONE:
        token_ids = (*token_ids, outcome.correction)
    return tuple(
        _logprobs_at(logits[row], rows.log_probs(row, (token_id,))[0], token_id, num_top)
        for row, token_id in zip((0, *(node + 1 for node in nodes)), token_ids, strict=False)
    )


def _logprobs_at(
    logits: NDArray[np.float32], processed_logprob: float, token_id: int, num_top: int
) -> TokenLogprobs:
    log_total = sum(load_row_kernels().logsumexp(logits, 1.0, -math.inf))
    top_ids = most_probable(logits, num_top)
    return TokenLogprobs(
        raw_logprob=float(logits[token_id]) - log_total,
        processed_logprob=processed_logprob,
        top_token_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple((logits[top_ids].astype(np.float64) - log_total).tolist()),
    )
