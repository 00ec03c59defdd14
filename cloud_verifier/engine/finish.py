"""From logits to an answer: verify, commit, cut KV to what is committed, reply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

from outrider.cloud_verifier.backends.base import Logits
from outrider.cloud_verifier.engine.backlog import Backlog
from outrider.cloud_verifier.engine.gathering import SessionCounts
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.engine.session import Bonus, Session
from outrider.cloud_verifier.engine.session_manager import SessionManager
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.verification.device_rows import (
    is_on_device,
    make_device_rows,
    make_staged_rows,
    stage_rounds,
)
from outrider.cloud_verifier.verification.logprobs import logprobs_of
from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.candidates import candidate_indices, choose_here
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, ProcessedRows, StepRound
from outrider.common.clock import Clock
from outrider.common.sampling.processors import is_plain
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    RoundMetrics,
    TokenIds,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)

if TYPE_CHECKING:
    from outrider.cloud_verifier.verification.device_step import StagedRounds
    from outrider.cloud_verifier.verification.staging import Staging

_NO_CANDIDATES = range(0)
_ORIGIN_OF = {CorrectionKind.CORRECTION: Origin.CORRECTION, CorrectionKind.BONUS: Origin.BONUS}

MakeRows = Callable[[Logits, Sequence[StepRound], TokenIds, int], Sequence[ProcessedRows]]
"""Takes a step's logits, its rounds, the target's end-of-sequence ids and the number of ids that exist."""


def make_rows(
    logits: Logits, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
) -> Sequence[ProcessedRows]:
    """Returns the rows of each round, in the order of its logits, computed where the logits are."""
    if is_on_device(logits):
        return make_device_rows(logits, rounds, eos_token_ids, num_tokens)
    ends = accumulate(each.num_rows for each in rounds)
    return [
        HostRows(logits[end - each.num_rows : end], each, eos_token_ids, num_tokens)
        for each, end in zip(rounds, ends, strict=True)
    ]


class Awaited(Protocol):
    """Is what a GPU computes."""

    @property
    def is_computed(self) -> bool:
        """Returns whether it is."""

    def wait(self) -> None:
        """Returns once it is computed. Raises what went wrong with it."""


def awaited(logits: Logits, rows: Sequence[ProcessedRows | Exception]) -> Sequence[Awaited]:
    """Returns what of a step's `logits` and `rows` must be waited for; nothing where both are computed here."""
    on_device: list[Awaited] = [
        each for each in rows if not isinstance(each, Exception) and each.is_on_device
    ]
    if on_device or not is_on_device(logits):
        return on_device
    from outrider.cloud_verifier.verification.staging import Download

    return [Download([logits[:0]])]  # a step of chunks of prompts alone


@dataclass(slots=True)
class PreparedRows:
    """Holds works that end with a step, and what of their rows was sent with the step's forward."""

    works: Sequence[Work]
    staged: StagedRounds | None = None


class RoundFinisher:
    """Turns the logits of a step into verdicts and other answers, and commits them."""

    def __init__(
        self,
        sessions: SessionManager,
        model: ModelInfo,
        backlog: Backlog,
        observer: EngineObserver,
        clock: Clock,
        make_rows: MakeRows = make_rows,
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._backlog = backlog
        self._observer = observer
        self._clock = clock
        self._make_rows = make_rows

    def prepare_rows(self, works: Sequence[Work], staging: Staging | None) -> PreparedRows:
        """Prepares the rows of `works`, those that end with this step, before its forward: with `staging`, of a backend
        whose logits stay on a device, what they are computed with goes there with the forward's inputs."""
        prepared = PreparedRows(works)
        if staging is not None and works:
            # One work's exception is met again, and belongs to it, where each is processed alone.
            with contextlib.suppress(Exception):
                prepared.staged = self._stage(works, staging)
        return prepared

    def _stage(self, works: Sequence[Work], staging: Staging) -> StagedRounds:
        rounds = [_make_step_rounds([work]) for work in works]
        try:
            of_all = list(chain.from_iterable(rounds))
            return stage_rounds(of_all, self._model.num_tokens, staging, self._clock)
        finally:
            for work, own in zip(works, rounds, strict=True):
                work.prepare_s += sum(each.host_s for each in own)

    def process_rows(self, prepared: PreparedRows, logits: Logits) -> Sequence[ProcessedRows | Exception]:
        """Returns the rows of each work, in the order of their logits.

        Where they cannot be processed together they are one by one, with an exception in place of those that
        cannot be processed alone either.
        """
        works = prepared.works
        try:
            return self._process(prepared, logits)
        except Exception as error:
            if len(works) == 1:
                return [error]
            ends = accumulate(work.num_rows for work in works)
            parts = [logits[end - work.num_rows : end] for work, end in zip(works, ends, strict=True)]
            return [self._process_alone(work, part) for work, part in zip(works, parts, strict=True)]

    def _process_alone(self, work: Work, logits: Logits) -> ProcessedRows | Exception:
        begin_s = self._clock.now()
        (rows,) = self.process_rows(PreparedRows([work]), logits)
        work.prepare_s += self._clock.now() - begin_s
        return rows

    def _process(self, prepared: PreparedRows, logits: Logits) -> Sequence[ProcessedRows]:
        eos_token_ids, num_tokens = self._model.eos_token_ids, self._model.num_tokens
        found: Sequence[ProcessedRows]
        if prepared.staged is not None:
            assert is_on_device(logits), "staging is of a backend whose logits are on a device"
            found = make_staged_rows(logits, prepared.staged, eos_token_ids)
        else:
            found = self._make_rows(logits, _make_step_rounds(prepared.works), eos_token_ids, num_tokens)
        of_rounds, rows = iter(found), list[ProcessedRows]()
        for work in prepared.works:
            work.prompt_rows = next(of_rounds) if work.num_prompt_rows else None
            rows.append(next(of_rounds))
        return rows

    def finish(self, work: Work, rows: ProcessedRows | Exception, counts: SessionCounts) -> bool:
        """Answers `work` from its rows; returns whether its session is free for its next job. `counts` are reported.

        Raises the exception that is in the rows' place.
        """
        if isinstance(rows, Exception):
            raise rows
        request, session = work.request, work.session
        session.last_round_id = max(session.last_round_id, request.round_id)
        session.was_pipelined = isinstance(request, VerifyRequest) and request.pipelined
        prompt_choices: TokenIds = ()
        if work.prompt_rows is not None:
            prompt_choices = tuple(map(work.prompt_rows.target_sample, range(work.num_prompt_rows)))
        outcome, logprobs = _judge(work, rows)
        if work.wants_choices:
            read = range(0 if rows.judged.is_cut else work.num_logit_rows)
            work.choices = tuple(map(rows.target_sample, read))
        self._commit(work, outcome)
        if isinstance(request, VerifyRequest):
            _note_for_next_round(session, request, outcome, logprobs)
        else:
            session.bonus, session.choice_position = None, _choice_position(session, outcome)
        metrics = self._make_metrics(work, outcome, counts)
        self._observer.on_round(
            request,
            session.opening.session_id,
            session.opening.method,
            num_draft_tokens=len(work.draft_tokens),
            num_accepted_tokens=outcome.accepted_len,
            judged_tokens=work.judged_tokens(outcome),
            has_correction=outcome.correction_kind is not CorrectionKind.NONE,
            answered_ns=work.answered_ns,
            metrics=metrics,
        )
        chain = session.chain
        match request:
            case VerifyRequest():
                verdict = Verdict(
                    round_id=request.round_id,
                    accepted_len=outcome.accepted_len + work.num_confirmed,
                    accepted_nodes=work.sent_accepted_nodes(outcome),
                    correction=outcome.correction,
                    correction_kind=outcome.correction_kind,
                    position=chain.position,
                    hash=chain.hash,
                    candidates=outcome.candidates,
                    logprobs=(*(work.confirmed or ()), *logprobs),
                    metrics=metrics,
                )
                session.store_reply(request, verdict)
                work.job.reply(verdict)
                return True
            case OpenRequest():
                step_fixed_ns, step_session_ns, step_token_ns = self._backlog.step_parts_ns()
                session.opening_reply = Opened(
                    self._model,
                    outcome.correction,
                    chain.position,
                    chain.hash,
                    metrics=metrics,
                    logprobs=logprobs[0] if logprobs else None,
                    step_fixed_ns=step_fixed_ns,
                    step_session_ns=step_session_ns,
                    step_token_ns=step_token_ns,
                    stream_gap_ns=self._backlog.stream_gap_ns(),
                    prompt_choices=prompt_choices,
                )
                self._sessions.publish(session)  # now: others open with the same prompt meanwhile
                work.job.reply(session.opening_reply)
                return True
            case GenerateRequest():
                return self._continue_generation(work, request, outcome, metrics, logprobs)

    def _commit(self, work: Work, outcome: Outcome) -> None:
        """Adds the accepted tokens and the correction; KV keeps what was fed of them: all but the correction."""
        session, start = work.session, work.session.chain.position
        accepted = work.accepted_tokens(outcome)
        has_correction = outcome.correction_kind is not CorrectionKind.NONE
        session.chain.extend((*accepted, outcome.correction) if has_correction else accepted)
        if work.tree is not None:
            self._sessions.keep_kv(session, start, outcome.accepted_nodes)
        self._sessions.truncate_kv(session, session.chain.position - 1)

    def _make_metrics(self, work: Work, outcome: Outcome, counts: SessionCounts) -> RoundMetrics:
        num_draft_tokens = len(work.draft_tokens) + work.num_confirmed
        num_accepted = outcome.accepted_len + work.num_confirmed
        return RoundMetrics(
            alpha_mean=outcome.alpha_mean,
            la_over_k=num_accepted / num_draft_tokens if num_draft_tokens else 0.0,
            queue_ns=work.start_ns - work.job.arrival_ns if work.num_generated == 0 else 0,
            forward_ns=work.forward_ns,
            total_ns=int(self._clock.now() * 1e9) - work.job.arrival_ns,
            batch_size=counts.num_in_step,
            step_token_ns=self._backlog.step_parts_ns()[2],
            num_active_sessions=counts.num_active,
        )

    def _continue_generation(
        self,
        work: Work,
        request: GenerateRequest,
        outcome: Outcome,
        metrics: RoundMetrics,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> bool:
        """Sends the step's tokens; returns whether they are the last ones, as where another request waits."""
        session, chain = work.session, work.session.chain
        token_ids = work.accepted_tokens(outcome)
        origins = (Origin.ACCEPTED,) * len(token_ids)
        if outcome.correction_kind is not CorrectionKind.NONE:
            extra = _ORIGIN_OF[outcome.correction_kind] if request.is_co_located else Origin.TARGET
            token_ids, origins = (*token_ids, outcome.correction), (*origins, extra)
        work.num_generated += len(token_ids)
        is_last = (
            work.num_generated >= request.max_new_tokens
            or token_ids[-1] in session.stop_ids
            or chain.position >= self._model.limits.max_context
            or bool(session.waiting)
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
        work.answered_ns = metrics.total_ns
        work.start_ns, work.forward_ns, work.draft_ns = 0, 0, 0
        work.draft_tokens, work.draft_probs, work.supports, work.tree = (), (), (), None
        work.known_states = None
        return is_last


def _make_step_rounds(works: Sequence[Work]) -> list[StepRound]:
    """Returns what the works' rows are computed as, in their order: those of a prompt's places are a round of their
    own before the work's, by which nothing is judged."""
    rounds = []
    for work in works:
        own = _make_step_round(work)
        if work.num_prompt_rows:
            start = own.position - work.num_prompt_rows
            token_ids = tuple(work.session.chain.token_ids[start : own.position - 1])
            rounds.append(StepRound(own.sampling, start, (), (), token_ids))
        rounds.append(own)
    return rounds


def _make_step_round(work: Work) -> StepRound:
    session, opening = work.session, work.session.opening
    sampling = session.sampling
    session.begin_round()
    needs_ids = not is_plain(sampling)  # a long sequence is not copied for a round that ignores it
    history = session.current_history if needs_ids or sampling.logit_bias else None
    return StepRound(
        sampling,
        session.chain.position,
        prompt_ids=session.prompt_ids if needs_ids else (),
        output_ids=session.output_ids if needs_ids else (),
        draft_token_ids=work.draft_tokens,
        tree=work.tree,
        supports=work.supports,
        history=history,
        resampling=create_method(opening.method).resampling,
        candidates=_candidates(work) if opening.method is Method.CANDIDATES else _NO_CANDIDATES,
        num_logprobs=opening.num_logprobs,
    )


def _candidates(work: Work) -> range:
    """Returns the indices of the candidates that a round may end with."""
    opening, request = work.session.opening, work.request
    first_index = request.candidates_from if isinstance(request, VerifyRequest) else 0
    if not (work.draft_tokens or first_index):
        return _NO_CANDIDATES
    return candidate_indices(opening.method_params, first_index)


def _judge(work: Work, rows: ProcessedRows) -> tuple[Outcome, tuple[TokenLogprobs, ...]]:
    """Has the session's method verify the draft; returns the outcome and the logprobs that were asked for."""
    opening, position = work.session.opening, work.session.chain.position
    request = work.request if isinstance(work.request, VerifyRequest) else None
    judged = rows.judged
    draft_tokens = judged.draft_token_ids
    round_input = RoundInput(
        rows=rows,
        draws=KeyedDraws(opening.sampling.seed, position),
        position=position,
        draft_tokens=draft_tokens,
        draft_probs=work.draft_probs[: len(draft_tokens)],
        supports=judged.supports,
        stop_ids=work.session.stop_ids,
        method_params=opening.method_params,
        candidates_from=request.candidates_from if request else 0,
        is_pipelined=request is not None and request.pipelined,
        tree=judged.tree,
        is_cut=judged.is_cut,
    )
    outcome = create_method(opening.method).verify(round_input)
    if outcome.candidates and isinstance(work.request, GenerateRequest):
        outcome = choose_here(round_input, outcome, opening.sampling.seed)
    if not opening.num_logprobs:
        return outcome, ()
    return outcome, logprobs_of(rows, draft_tokens, outcome, opening.num_logprobs)


def _note_for_next_round(
    session: Session, request: VerifyRequest, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...]
) -> None:
    """Notes what the next round must begin with: a bonus that was announced, or a choice among candidates.

    Only a pipelined round's draft announces its bonus. A round without a draft announces nothing, so that an
    edge which lost its verdict may build on the same base.
    """
    is_announced = (
        request.pipelined and request.draft_tokens and outcome.correction_kind is CorrectionKind.BONUS
    )
    session.bonus = Bonus(session.chain.position - 1, logprobs[-1:]) if is_announced else None
    if not request.candidates_from:  # which leaves the choice as it is
        session.choice_position = _choice_position(session, outcome)


def _choice_position(session: Session, outcome: Outcome) -> int | None:
    return session.chain.position if outcome.candidates and outcome.accepted_len > 0 else None
