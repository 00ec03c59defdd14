"""The target's log-probabilities of a text that is given, by rounds that have it judged as if it were drafted."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.alignment import TokenChain
from outrider.common.types import (
    Method,
    MethodParams,
    OpenRequest,
    Origin,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
    VerifyRequest,
)
from outrider.edge_client.transport.connection import CancelledByUser
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import VerifierLink
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

LEAST_NATS = -69.1  # the log of the least probability that a token is asked about
_LEAST_PROB = 1e-30
_DEADLINE_S = 10.0


class TextScoring:
    """Asks once for the log-probabilities of a text, in a session of its own with the method `threshold`."""

    def __init__(
        self, link: VerifierLink, session_id: bytes, num_top: int = 1, recover_timeout_s: float = 60.0
    ) -> None:
        self._session_id, self._num_top = session_id, num_top
        self._remote = RemoteVerifier(
            link, RoundDeadline(_DEADLINE_S), recover_timeout_s=recover_timeout_s, is_patient=True
        )

    def cancel(self) -> None:
        """Ends `run` by `CancelledByUser`, also where it has not begun. Safe in any thread."""
        self._remote.cancel()

    def run(self, prompt_ids: Sequence[int], text_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """Returns an entry for each of `text_ids` after the prompt, at temperature 1, with the `num_top` most probable
        ids; None for a token below `LEAST_NATS`.

        Raises `RoundFailedError` whose field is `method` where the verifier does not offer it, and `OutriderError` as
        a session does.
        """
        is_cancelled = False
        try:
            self._remote.connect()
            return _ask(self._remote, self._session_id, tuple(prompt_ids), tuple(text_ids), self._num_top)
        except CancelledByUser:
            is_cancelled = True
            raise
        finally:
            self._remote.close(is_cancelled)


def text_logprobs(
    link: VerifierLink, session_id: bytes, prompt_ids: Sequence[int], text_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Returns and raises what `TextScoring.run` does, with the most probable id of each place."""
    return TextScoring(link, session_id).run(prompt_ids, text_ids)


def _ask(
    remote: RemoteVerifier, session_id: bytes, prompt_ids: TokenIds, text_ids: TokenIds, num_top: int
) -> list[TokenLogprobs | None]:
    opened, _ = remote.open(
        OpenRequest(
            session_id=session_id,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=SamplingParams(temperature=1.0),
            method=Method.THRESHOLD,
            method_params=MethodParams(threshold_pass=_LEAST_PROB),
            ignore_eos=True,
            num_logprobs=max(1, num_top),
            round_id=remote.next_round_id(),
        )
    )
    at_once = opened.model.limits.max_draft_tokens
    chain, found = TokenChain(prompt_ids), list[TokenLogprobs | None]()
    skipped: TokenIds = ()  # a token the target all but excludes: told, not asked about
    while len(found) < len(text_ids):
        tokens = text_ids[len(found) : len(found) + at_once]
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
        num_accepted = verdict.accepted_len
        found += verdict.logprobs[:num_accepted]
        chain.extend((*skipped, *tokens[:num_accepted]))
        skipped = tokens[num_accepted : num_accepted + 1]
        found += [None] * len(skipped)
    return found
