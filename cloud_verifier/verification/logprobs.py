"""Log-probabilities of emitted tokens, computed for sessions opened with `num_logprobs`.

Raw is the log-softmax of the target's logits before processing, over the ids that exist; processed is log p
of the distribution that was sampled from, so 0 at temperature 0.
"""

from __future__ import annotations

from outrider.cloud_verifier.verification.methods.base import Outcome
from outrider.cloud_verifier.verification.rows import ProcessedRows
from outrider.common.types import CorrectionKind, TokenIds, TokenLogprobs

MAX_LOGPROBS = 20


def logprobs_of(
    rows: ProcessedRows, draft_tokens: TokenIds, outcome: Outcome, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Returns one entry for each committed token: the accepted ones, then the correction or bonus."""
    nodes = outcome.accepted_nodes or range(outcome.accepted_len)
    token_ids = tuple(draft_tokens[node] for node in nodes)
    if outcome.correction_kind is not CorrectionKind.NONE:
        token_ids = (*token_ids, outcome.correction)
    return tuple(
        _logprobs_at(rows, row, token_id, num_top)
        for row, token_id in zip((0, *(node + 1 for node in nodes)), token_ids, strict=False)
    )


def _logprobs_at(rows: ProcessedRows, row: int, token_id: int, num_top: int) -> TokenLogprobs:
    raw = rows.raw_logprobs(row, token_id, num_top)
    return TokenLogprobs(
        raw_logprob=raw.logprob,
        processed_logprob=rows.log_probs(row, (token_id,))[0],
        top_token_ids=raw.top_token_ids,
        top_logprobs=raw.top_logprobs,
    )
