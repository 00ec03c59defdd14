"""From logits to an answer: verify, commit, truncate KV to what stands, reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from outrider.cloud_verifier.backends.base import Logits, TargetBackend
from outrider.cloud_verifier.engine.backlog import Backlog
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.engine.session import Bonus
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.verification.device_rows import scan_step
from outrider.cloud_verifier.verification.logprobs import logprobs_of
from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.candidates import choose_here
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedCoins, ProcessedRows, StepRound
from outrider.common.sampling.processors import is_plain
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    RoundMetrics,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)

_ORIGIN_OF = {CorrectionKind.CORRECTION: Origin.CORRECTION, CorrectionKind.BONUS: Origin.BONUS}


def split_rows(works: Sequence[Work], logits: Logits, model: ModelInfo) -> Sequence[ProcessedRows]:
    """The rows of each of `works`, which are those that end with this step, in the order of their logits."""
    rounds = [_make_step_round(work) for work in works]
    if not isinstance(logits, np.ndarray):
        return scan_step(logits, rounds, model.eos_token_ids, model.num_tokens)
    ends = accumulate(each.num_rows for each in rounds)
    return [
        HostRows(logits[end - each.num_rows : end], each, model.eos_token_ids, model.num_tokens)
        for each, end in zip(rounds, ends, strict=True)
    ]


def finish(
    work: Work,
    rows: ProcessedRows,
    backend: TargetBackend,
    model: ModelInfo,
    observer: EngineObserver,
    batch_size: int,
    backlog: Backlog,
) -> bool:
    """Answers `work` from its rows; returns whether it is done."""
    session = work.session
    session.last_round_id = max(session.last_round_id, work.request.round_id)
    session.was_pipelined = isinstance(work.request, VerifyRequest) and work.request.pipelined
    round_input = _make_round_input(work, rows)
    outcome = create_method(session.opening.method).verify(round_input)
    if outcome.candidates and isinstance(work.request, GenerateRequest):
        outcome = choose_here(round_input, outcome, session.opening.sampling.seed)
    logprobs = _make_logprobs(work, rows, outcome)
    _commit(work, outcome, backend)
    if not round_input.candidates_from:  # which leaves what is owed as it is
        is_owed = bool(outcome.candidates) and outcome.accepted_len > 0
        session.choice_position = session.chain.position if is_owed else None
    session.bonus = _announced_bonus(work, outcome, logprobs)
    metrics = _make_metrics(work, outcome, batch_size)
    observer.on_round(
        work.request,
        session.opening.session_id,
        session.opening.method,
        num_draft_tokens=len(work.draft_tokens),
        num_accepted_tokens=outcome.accepted_len,
        has_correction=outcome.correction_kind is not CorrectionKind.NONE,
        metrics=metrics,
    )
    match work.request:
        case VerifyRequest() as request:
            verdict = Verdict(
                round_id=request.round_id,
                accepted_len=outcome.accepted_len + work.num_confirmed,
                correction=outcome.correction,
                correction_kind=outcome.correction_kind,
                position=session.chain.position,
                hash=session.chain.hash,
                candidates=outcome.candidates,
                logprobs=(*(work.confirmed or ()), *logprobs),
                metrics=metrics,
            )
            session.store_reply(request, verdict)
            work.job.reply(verdict)
            return True
        case OpenRequest():
            chain = session.chain
            step_fixed_ns, step_token_ns = backlog.step_line_ns()
            opened = Opened(
                model,
                outcome.correction,
                chain.position,
                chain.hash,
                metrics=metrics,
                logprobs=logprobs[0] if logprobs else None,
                step_fixed_ns=step_fixed_ns,
                step_token_ns=step_token_ns,
            )
            session.opening_reply = opened
            work.job.reply(opened)
            return True
        case GenerateRequest() as request:
            return _continue_generation(work, request, outcome, model, metrics, logprobs)


def _announced_bonus(work: Work, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...]) -> Bonus | None:
    """What the next round's first draft token is checked against: the bonus of a pipelined round's draft. One
    without a draft announces nothing, so that an edge which lost its verdict may build on the same base."""
    request = work.request
    if not isinstance(request, VerifyRequest) or not request.pipelined or not request.draft_tokens:
        return None
    if outcome.correction_kind is not CorrectionKind.BONUS:
        return None
    return Bonus(work.session.chain.position - 1, logprobs[-1:])


def _continue_generation(
    work: Work,
    request: GenerateRequest,
    outcome: Outcome,
    model: ModelInfo,
    metrics: RoundMetrics,
    logprobs: tuple[TokenLogprobs, ...],
) -> bool:
    chain = work.session.chain
    token_ids = work.draft_tokens[: outcome.accepted_len]
    origins = (Origin.ACCEPTED,) * len(token_ids)
    if outcome.correction_kind is not CorrectionKind.NONE:
        extra = _ORIGIN_OF[outcome.correction_kind] if request.is_co_located else Origin.TARGET
        token_ids, origins = (*token_ids, outcome.correction), (*origins, extra)
    work.num_generated += len(token_ids)
    is_last = (
        work.num_generated >= request.max_new_tokens
        or token_ids[-1] in work.session.stop_ids
        or chain.position >= model.limits.max_context
    )
    work.job.reply(
        GeneratedTokens(
            request.round_id,
            token_ids,
            origins,
            chain.position,
            chain.hash,
            is_last=is_last,
            metrics=metrics,
            logprobs=logprobs,
            num_draft_tokens=len(work.draft_tokens),
            draft_ns=work.draft_ns,
        )
    )
    work.start_ns, work.forward_ns, work.draft_ns = 0, 0, 0
    work.draft_tokens, work.draft_probs, work.supports = (), (), ()
    return is_last


def _make_step_round(work: Work) -> StepRound:
    session = work.session
    sampling = session.opening.sampling
    needs_text = not is_plain(sampling)  # a long text is not copied for a round that ignores it
    return StepRound(
        sampling,
        session.chain.position,
        prompt_ids=session.prompt_ids if needs_text else (),
        output_ids=session.output_ids if needs_text else (),
        draft_token_ids=work.draft_tokens,
        supports=work.supports,
    )


def _make_round_input(work: Work, rows: ProcessedRows) -> RoundInput:
    opening, position = work.session.opening, work.session.chain.position
    request = work.request if isinstance(work.request, VerifyRequest) else None
    return RoundInput(
        rows=rows,
        coins=KeyedCoins(opening.sampling.seed, position),
        position=position,
        draft_tokens=work.draft_tokens,
        draft_probs=work.draft_probs,
        supports=work.supports,
        stop_ids=work.session.stop_ids,
        method_params=opening.method_params,
        candidates_from=request.candidates_from if request else 0,
        is_pipelined=request is not None and request.pipelined,
    )


def _make_logprobs(work: Work, rows: ProcessedRows, outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    num_top = work.session.opening.num_logprobs
    if not num_top:
        return ()
    return logprobs_of(rows.raw_logits(), rows, work.draft_tokens, outcome, num_top)


def _commit(work: Work, outcome: Outcome, backend: TargetBackend) -> None:
    """Text += accepted + correction; KV keeps what was fed of it: all but the correction."""
    session = work.session
    accepted = work.draft_tokens[: outcome.accepted_len]
    has_correction = outcome.correction_kind is not CorrectionKind.NONE
    session.chain.extend((*accepted, outcome.correction) if has_correction else accepted)
    kv_length = session.chain.position - 1
    assert session.kv is not None, "a session that computed has KV"
    if session.kv.length > kv_length:
        backend.truncate(session.kv, kv_length)


def _make_metrics(work: Work, outcome: Outcome, batch_size: int) -> RoundMetrics:
    num_draft_tokens = len(work.draft_tokens) + work.num_confirmed
    num_accepted = outcome.accepted_len + work.num_confirmed
    return RoundMetrics(
        alpha_mean=outcome.alpha_mean,
        la_over_k=num_accepted / num_draft_tokens if num_draft_tokens else 0.0,
        queue_ns=work.start_ns - work.job.arrival_ns if work.num_generated == 0 else 0,
        forward_ns=work.forward_ns,
        total_ns=time.perf_counter_ns() - work.job.arrival_ns,
        batch_size=batch_size,
    )
