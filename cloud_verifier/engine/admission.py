"""From a job to work: look the session up, check the request, set the text the round builds on.

Everything that can be answered without a forward is answered here: replays, errors, cancels, closes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.cloud_verifier.engine import validation
from outrider.cloud_verifier.engine.backlog import Refusal
from outrider.cloud_verifier.engine.session import Session
from outrider.cloud_verifier.engine.work import Job, Work
from outrider.common.errors import InvalidFieldError, UnimplementedFieldError
from outrider.common.sequences import common_prefix
from outrider.common.types import (
    CancelRequest,
    Closed,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    TokenIds,
    VerifyRequest,
)

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.engine import Engine

FULL_RETRY_MS = 1000
MAX_WAITING = 32  # of one session, behind its running work: as many as replies are stored


def admit(engine: Engine, job: Job) -> None:
    """Answers `job` now, puts it behind its session's running one, or makes it active work."""
    match job.request:
        case OpenRequest():
            _admit_open(engine, job, job.request)
        case VerifyRequest() | GenerateRequest():
            _admit_round(engine, job, job.request)
        case CancelRequest():
            _cancel(engine, job, job.request)
        case CloseRequest():
            _close(engine, job)


# ------------------------------------------------------------------------------------------ opening


def _admit_open(engine: Engine, job: Job, request: OpenRequest) -> None:
    session = engine.sessions.get(job.tenant, request.session_id)
    if session is not None:
        if session.work is not None:
            _wait(engine, session, job)
            return
        if session.opening == request and isinstance(session.opening_reply, Opened):
            job.reply(replace(session.opening_reply, is_existing=True))
            return
    elif engine.is_draining:
        job.reply(_error(request.round_id, RoundErrorCode.DRAINING, "no new sessions: shutting down"))
        return
    try:
        validation.check_open(request, engine.model)
    except InvalidFieldError as error:
        job.reply(_field_error(request.round_id, error))
        return
    if session is None and not _has_room(engine, job.tenant):
        engine.observer.on_refused("sessions")
        message = f"{engine.sessions.what_is_full(job.tenant)} are busy"
        job.reply(_refusal(request.round_id, Refusal("sessions", message, FULL_RETRY_MS)))
        return
    if (refusal := engine.backlog.enter_prefill(job.tenant, len(request.token_ids))) is not None:
        job.reply(_refusal(request.round_id, refusal))
        return
    eos_token_ids = () if request.ignore_eos else engine.model.eos_token_ids
    if session is not None:
        num_common = common_prefix(session.chain.token_ids, request.token_ids)
        truncate_kv(engine, session, min(num_common, len(request.token_ids) - 1))
    session = engine.sessions.put(job.tenant, request, frozenset((*eos_token_ids, *request.stop_token_ids)))
    session.opening_reply = None
    _activate(engine, session, job, request)


def _has_room(engine: Engine, tenant: str) -> bool:
    if removed := engine.sessions.make_room(tenant):
        engine.observer.on_evicted("session", removed.opening.session_id)
        engine.free(removed)
    return not engine.sessions.is_full(tenant)


# ------------------------------------------------------------------------------------------- rounds


def _admit_round(engine: Engine, job: Job, request: VerifyRequest | GenerateRequest) -> None:
    session = engine.sessions.get(job.tenant, job.session_id)
    if session is None:
        message = "open the session first; it may have expired, or the verifier restarted"
        job.reply(_error(request.round_id, RoundErrorCode.UNKNOWN_SESSION, message))
        return
    if session.work is not None:
        _wait(engine, session, job)
        return
    if (answer := _answer_without_work(session, request, engine)) is not None:
        job.reply(answer)
        return
    if not job.has_entered and (refusal := engine.enter_round(job.tenant, request, is_taken=True)):
        job.reply(_refusal(request.round_id, refusal, session))
        return
    base = request.base_position + (1 if _begins_with_bonus(session, request) else 0)
    replaced_tokens = tuple(session.chain.token_ids[base:])
    # The last token is always fed, so that its logits can be read: KV length ≤ position − 1.
    truncate_kv(engine, session, base - (0 if request.committed_tokens else 1))
    session.chain.truncate(base)
    session.chain.extend(request.committed_tokens)
    _activate(engine, session, job, request, base, replaced_tokens)


def _begins_with_bonus(session: Session, request: VerifyRequest | GenerateRequest) -> bool:
    """Whether the round's first draft token stands where the bonus of the round before it does. It is checked
    against that, never against another sample: the edge has the bonus in its text already, and in another
    batch the same logits may differ in their last bits."""
    if session.bonus is None or not isinstance(request, VerifyRequest) or request.committed_tokens:
        return False
    return request.base_position == session.bonus.position and bool(request.draft_tokens)


def _wait(engine: Engine, session: Session, job: Job) -> None:
    """Behind the session's running work, which a newer request ends if it is a `Generate`."""
    if len(session.waiting) >= MAX_WAITING:
        engine.observer.on_refused("waiting")
        round_id = getattr(job.request, "round_id", 0)
        message = f"{MAX_WAITING} requests of this session wait already"
        job.reply(_refusal(round_id, Refusal("waiting", message, engine.backlog.retry_ms()), session))
        return
    session.waiting.append(job)
    _end_generation(engine, session)


def _answer_without_work(
    session: Session, request: VerifyRequest | GenerateRequest, engine: Engine
) -> SessionResponse | None:
    """A stored reply or an error; None when the round must be computed."""
    if isinstance(request, VerifyRequest):
        if (reply := session.stored_reply(request)) is not None:
            return reply
    elif request.round_id <= session.last_round_id:
        return session.error(request.round_id, RoundErrorCode.STALE, "an older round")
    try:
        if isinstance(request, VerifyRequest):
            validation.check_verify(request, session, engine.model)
        else:
            validation.check_generate(request, session, engine.model)
    except InvalidFieldError as error:
        return _field_error(request.round_id, error, session)
    if not session.chain.agrees(request.base_position, request.base_hash):
        code = RoundErrorCode.STALE if session.was_pipelined else RoundErrorCode.UNKNOWN_PREFIX
        return session.error(
            request.round_id, code, f"base {request.base_position} is not a prefix of this session"
        )
    if _begins_with_bonus(session, request):
        assert isinstance(request, VerifyRequest)
        token_id = session.chain.token_ids[request.base_position]
        if token_id != request.draft_tokens[0] or token_id in session.stop_ids:
            return session.error(
                request.round_id, RoundErrorCode.STALE, "the draft does not begin with the bonus before it"
            )
    return None


def _activate(
    engine: Engine,
    session: Session,
    job: Job,
    request: OpenRequest | VerifyRequest | GenerateRequest,
    base_position: int = 0,
    replaced_tokens: TokenIds = (),
) -> None:
    work = Work(session, job, request, base_position=base_position, replaced_tokens=replaced_tokens)
    if isinstance(request, VerifyRequest):
        if session.bonus is not None and _begins_with_bonus(session, request):
            work.confirmed = session.bonus.logprobs
        first = work.num_confirmed
        work.draft_tokens = request.draft_tokens[first:]
        work.draft_probs = request.q_token_probs[first:]
        work.supports = request.q_support[first:]
    engine.activate(work)


def truncate_kv(engine: Engine, session: Session, length: int) -> None:
    """The session's KV keeps the first `length` tokens of its text at most."""
    if session.kv is not None and session.kv.length > length:
        engine.backend.truncate(session.kv, length)


# ------------------------------------------------------------------------------------ cancel, close


def _end_generation(engine: Engine, session: Session) -> None:
    """A newer request ends a running `Generate`; its committed tokens stay."""
    if session.work is not None and isinstance(session.work.request, GenerateRequest):
        _answer_cancelled(session.work)
        engine.release(session.work)


def _answer_cancelled(work: Work) -> None:
    chain = work.session.chain
    work.job.reply(GeneratedTokens(work.request.round_id, (), (), chain.position, chain.hash, is_last=True))


def _cancel(engine: Engine, job: Job, request: CancelRequest) -> None:
    session = engine.sessions.get(job.tenant, job.session_id)
    if session is None:
        return
    for waiting in list(session.waiting):
        if getattr(waiting.request, "round_id", None) == request.round_id:
            session.waiting.remove(waiting)
            waiting.reply(session.error(request.round_id, RoundErrorCode.CANCELLED, "cancelled by the edge"))
    if session.work is not None and session.work.request.round_id == request.round_id:
        _end_generation(engine, session)


def _close(engine: Engine, job: Job) -> None:
    session = engine.sessions.get(job.tenant, job.session_id)
    if session is None:
        job.reply(Closed(was_open=False, position=0))
        return
    for waiting in session.waiting:
        waiting.reply(_error(0, RoundErrorCode.CANCELLED, "the session was closed"))
    session.waiting.clear()
    if session.work is not None and isinstance(session.work.request, GenerateRequest):
        _answer_cancelled(session.work)
    elif session.work is not None:
        round_id = session.work.request.round_id
        session.work.job.reply(_error(round_id, RoundErrorCode.CANCELLED, "the session was closed"))
    position = session.chain.position
    engine.forget(session)
    job.reply(Closed(was_open=True, position=position))


# ------------------------------------------------------------------------------------------- errors


def _error(round_id: int, code: RoundErrorCode, message: str) -> RoundError:
    return RoundError(round_id=round_id, code=code, message=message)


def _refusal(round_id: int, refusal: Refusal, session: Session | None = None) -> RoundError:
    position, hash_ = (session.chain.position, session.chain.hash) if session else (0, 0)
    return RoundError(
        round_id,
        RoundErrorCode.REFUSED,
        refusal.message,
        retry_after_ms=refusal.retry_after_ms,
        position=position,
        hash=hash_,
    )


def _field_error(round_id: int, error: InvalidFieldError, session: Session | None = None) -> RoundError:
    is_unbuilt = isinstance(error, UnimplementedFieldError)
    code = RoundErrorCode.UNIMPLEMENTED if is_unbuilt else RoundErrorCode.INVALID
    position, hash_ = (session.chain.position, session.chain.hash) if session else (0, 0)
    return RoundError(round_id, code, error.reason, field=error.field, position=position, hash=hash_)
