"""Decode through the product's own edge session, and compare texts the way docs/design.md §7 asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.common.methods import DEFAULT_SUPPORT_SIZE
from outrider.common.noise.draws import gumbel_row
from outrider.common.sampling.processors import process_logits
from outrider.common.sampling.support import certain
from outrider.common.types import Draft, Method, MethodParams, Origin, SamplingParams, StopParams
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.session.session import EdgeSession, SessionResult, new_session_id
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import VerifierLink
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

TIE_SCORE = 1e-4


def decode(
    address: str,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    draft: Any = None,
    mode: ExecutionMode | None = None,
    num_new: int = 32,
    depth: int = 4,
    transport: str = "stream",
    on_timeout: OnTimeout = OnTimeout.WAIT,
    deadline_s: float | None = None,
    recover_timeout_s: float = 60.0,
    wrap: Callable[[VerifierLink], VerifierLink] = lambda link: link,
    on_token: Callable[[int], None] = lambda index: None,
    on_kept: Callable[[], None] = lambda: None,
    is_target_change_allowed: bool = False,
    stop: StopParams | None = None,
    min_draft_s: float = 0.0,
    method: Method = Method.COUPLED,
    method_params: MethodParams = MethodParams(),  # noqa: B008
    support_size: int = DEFAULT_SUPPORT_SIZE,
    num_logprobs: int = 0,
    window: RoundWindow | None = None,
    policy: DepthPolicy | None = None,
) -> SessionResult:
    """Without a `mode` speculative with a draft model, cloud-only without one. `on_token(i)` runs after new
    token i, `on_kept()` after one that was kept without the verifier."""
    session_id = new_session_id()
    options = SessionOptions(
        mode=mode or (ExecutionMode.SPECULATIVE if draft is not None else ExecutionMode.CLOUD_ONLY),
        sampling=sampling,
        method=method,
        method_params=method_params,
        support_size=support_size,
        num_logprobs=num_logprobs,
        stop=stop or StopParams(max_new_tokens=num_new, ignore_eos=True),
        on_timeout=on_timeout,
        recover_timeout_s=recover_timeout_s,
        is_target_change_allowed=is_target_change_allowed,
    )
    verifier = RemoteVerifier(
        wrap(GrpcLink(address, session_id, transport)),
        RoundDeadline(deadline_s),
        recover_timeout_s=recover_timeout_s,
        is_patient=on_timeout is OnTimeout.WAIT,
    )
    session = EdgeSession(
        prompt_ids,
        options,
        decode=lambda token_id: f"<{token_id}>",
        verifier=verifier,
        draft=draft,
        depth=policy or FixedDepth(depth),
        window=window,
        session_id=session_id,
        min_draft_s=min_draft_s,
    )
    for event in session.generate():
        if hasattr(event, "token_id"):
            on_token(event.index)
            if event.origin in (Origin.FALLBACK, Origin.EDGE_ONLY):
                on_kept()
    return session.result


@dataclass
class TieLedger:
    """Counts tokens compared and ties met; more than one tie in 10,000 tokens fails."""

    num_tokens: int = 0
    ties: list[float] = field(default_factory=list)

    def check(self) -> str:
        summary = f"{self.num_tokens} tokens compared, {len(self.ties)} ties {self.ties}"
        assert len(self.ties) <= max(1, self.num_tokens // 10_000), summary
        return summary


class Oracle:
    """The target in this process, to judge whether two different tokens were a tie."""

    def __init__(self, target: Path) -> None:
        from outrider.cloud_verifier.backends.loading import load_target

        self.backend = load_target(target)

    def gap(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], a: int, b: int, sampling: Any
    ) -> float:
        """|score(a) − score(b)|, noise included, after prompt and output."""
        from outrider.cloud_verifier.backends.base import ForwardItem

        sequence = self.backend.new_sequence()
        text = [*prompt_ids, *output_ids]
        logits = self.backend.forward([ForwardItem(sequence, text, 1)])
        scores = process_logits(
            np,
            logits,
            sampling,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            num_tokens=self.backend.num_tokens,
        )[0].astype(np.float64)
        self.backend.close(sequence)
        if sampling.temperature:
            scores = scores + gumbel_row(sampling.seed, len(text), len(scores))
        return float(abs(scores[a] - scores[b]))


def assert_same_text(
    reference: Sequence[int],
    again: Callable[[Sequence[int], int], Sequence[int]],
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    oracle: Oracle,
    ledger: TieLedger,
) -> None:
    """`again(prefix, n)` decodes n tokens after prompt + prefix; equal to `reference`, ties forced.

    At a tie the reference token is forced and decoding goes on from there (docs/design.md §7, numerics).
    """
    done = 0
    while done < len(reference):
        found = again(reference[:done], len(reference) - done)
        ledger.num_tokens += len(found)
        wrong = next((i for i, t in enumerate(found) if t != reference[done + i]), None)
        if wrong is None:
            assert len(found) == len(reference) - done, "the texts differ in length"
            return
        prefix = reference[: done + wrong]
        gap = oracle.gap(prompt_ids, prefix, reference[done + wrong], found[wrong], sampling)
        assert gap < TIE_SCORE, (
            f"token {done + wrong}: {reference[done + wrong]} against {found[wrong]}, gap {gap}"
        )
        ledger.ties.append(gap)
        done += wrong + 1


class HostileDraft:
    """Always wrong: knows the reference text and proposes something else at every position."""

    num_tokens = 1 << 30
    max_context = 1 << 30
    eos_token_ids: tuple[int, ...] = ()
    fingerprint = tokenizer_fingerprint = ""

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._text, self._vocab_size = list(text), vocab_size

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> _HostileSequence:
        return _HostileSequence(self._text, self._vocab_size, num_support > 0)

    def close(self) -> None: ...


class _HostileSequence:
    def __init__(self, text: list[int], vocab_size: int, has_supports: bool) -> None:
        self._text, self._vocab_size, self.position = text, vocab_size, 0
        self._has_supports = has_supports

    def commit(self, token_ids: Sequence[int]) -> None:
        self.position += len(token_ids)

    def truncate(self, position: int) -> None:
        self.position = position

    def propose(self, num_draft_tokens: int, should_stop: object = None) -> Draft:
        right = self._text[self.position : self.position + num_draft_tokens]
        right += [0] * (num_draft_tokens - len(right))
        wrong = tuple((token + 1) % self._vocab_size for token in right)
        supports = tuple(map(certain, wrong)) if self._has_supports else ()
        return Draft(wrong, (1.0,) * len(wrong), supports=supports)

    def close(self) -> None: ...
