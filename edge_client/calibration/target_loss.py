"""Measures the loss of any text under a verifier's target, through the protocol alone.

With the method `threshold` and a threshold that every token passes, the target accepts whatever is sent and
returns each token's log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.common.alignment import TokenChain
from outrider.common.errors import RoundFailedError
from outrider.common.types import Method, MethodParams, OpenRequest, Origin, SamplingParams, VerifyRequest
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

if TYPE_CHECKING:
    from outrider.edge_client.transport.link.base import VerifierLink

_LEAST_PROB = 1e-30
_MOST_NATS = 69.1  # what a token below it counts for
_DEADLINE_S = 10.0


def target_nats(
    link: VerifierLink, session_id: bytes, prompt_ids: Sequence[int], text_ids: Sequence[int]
) -> float | None:
    """Returns the loss of `text_ids` after the prompt in nats, summed, at temperature 1; None where the
    verifier does not offer the method. Raises `OutriderError` as a session does."""
    remote = RemoteVerifier(link, RoundDeadline(_DEADLINE_S), is_patient=True)
    try:
        remote.connect()
        return _sum_nats(remote, session_id, tuple(prompt_ids), tuple(text_ids))
    except RoundFailedError as error:
        if error.error.field == "method":
            return None
        raise
    finally:
        remote.close()


def _sum_nats(
    remote: RemoteVerifier, session_id: bytes, prompt_ids: tuple[int, ...], text_ids: tuple[int, ...]
) -> float:
    opened = remote.open(
        OpenRequest(
            session_id=session_id,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=SamplingParams(temperature=1.0),
            method=Method.THRESHOLD,
            method_params=MethodParams(threshold_pass=_LEAST_PROB),
            ignore_eos=True,
            num_logprobs=1,
            round_id=remote.next_round_id(),
        )
    )
    at_once = opened.model.limits.max_draft_tokens
    chain, done, nats = TokenChain(prompt_ids), 0, 0.0
    skipped: tuple[int, ...] = ()  # a token the target all but excludes: told, not asked about
    while done < len(text_ids):
        tokens = text_ids[done : done + at_once]
        remote.submit(
            VerifyRequest(
                round_id=remote.next_round_id(),
                base_position=chain.position,
                base_hash=chain.hash,
                committed_tokens=skipped,
                origins=(Origin.EDGE_ONLY,) * len(skipped),
                draft_tokens=tokens,
                q_token_probs=(1.0,) * len(tokens),
            )
        )
        verdict = remote.verdict().verdict
        accepted = tokens[: verdict.accepted_len]
        nats -= sum(each.raw_logprob for each in verdict.logprobs[: len(accepted)])
        chain.extend((*skipped, *accepted))
        done += len(accepted)
        skipped = tokens[len(accepted) : len(accepted) + 1]
        nats += _MOST_NATS * len(skipped)
        done += len(skipped)
    return nats
