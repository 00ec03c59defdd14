"""From a job to work: find its session, check the request, set the sequence that the round builds on.

Everything that can be answered without a forward is answered here: replays, errors, cancels, closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.cloud_verifier.engine import validation
from outrider.cloud_verifier.engine.backlog import Backlog, Refusal
from outrider.cloud_verifier.engine.job import Disconnect, Job
from outrider.cloud_verifier.engine.line import SessionKey
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.engine.session import Bonus, Session
from outrider.cloud_verifier.engine.session_manager import SessionManager
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.verification.grammars import Found, GrammarStore, TooManyGrammarsError
from outrider.common.errors import InvalidFieldError, UnimplementedFieldError
from outrider.common.grammar.checked import NotCheckedError
from outrider.common.grammar.memory import NoGrammarRoomError
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.sampling.processors import is_plain
from outrider.common.tree import Tree, has_path, is_chain, nodes_along, supports_by_row
from outrider.common.types import (
    CancelRequest,
    Closed,
    CloseRequest,
    GenerateRequest,
    Grammar,
    ModelInfo,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    VerifyRequest,
)

FULL_RETRY_MS = 1000
MAX_WAITING = 32  # jobs of one session, after its running one: as many as replies are stored
_IS_CLOSED = "the session was closed"
_CALL_IS_OVER = "the call ended before the answer"


class Admission:
    """Decides what becomes of a job: an answer now, a place in its session's queue, or work."""

    def __init__(
        self,
        sessions: SessionManager,
        backlog: Backlog,
        model: ModelInfo,
        observer: EngineObserver,
        grammars: GrammarStore | None,
        resubmit: Callable[[Job], object],
    ) -> None:
        """`resubmit` is called with a job whose grammar is compiled now, on another thread."""
        self.is_draining = False  # no new sessions
        self._sessions = sessions
        self._backlog = backlog
        self._model = model
        self._observer = observer
        self._grammars, self._resubmit = grammars, resubmit
        self._compiling: dict[SessionKey, Job] = {}  # the openings that wait for their grammar

    def admit(self, job: Job) -> Work | SessionResponse | None:
        """Returns the work that the job becomes, or its answer. None: it is queued, or wants no answer.

        Ending a running `Generate` releases its session: the caller then admits what waited for it.
        """
        match job.request:
            case VerifyRequest() | GenerateRequest() as request:
                return self._admit_round(job, request)
            case OpenRequest() as request:
                return self._admit_open(job, request)
            case CancelRequest() as request:
                self._cancel(job, request)
                return None
            case CloseRequest():
                return self._close(job)
            case Disconnect():
                self._disconnect(job)
                return None

    def report_compiling(self, now_s: float) -> None:
        """Tells the edges of openings that wait for their grammar so."""
        for job in self._compiling.values():
            if job.is_report_due(now_s):
                job.report(0, job.num_tokens, now_s)

    # -------------------------------------------------------------------------------------- opening

    def _admit_open(self, job: Job, request: OpenRequest) -> Work | SessionResponse | None:
        key = job.tenant, request.session_id
        found, job.found = job.found, None  # it may have to wait for its session, and then comes again
        if found is not None:
            if self._compiling.get(key) is not job:
                return None  # it was answered meanwhile
            del self._compiling[key]
        session = self._sessions.get(job.tenant, request.session_id)
        if session is not None:
            if session.running is not None:
                return self._enqueue(session, job)
            if session.opening == request and session.opening_reply is not None:
                return replace(session.opening_reply, is_existing=True)
        elif self.is_draining:
            return RoundError(request.round_id, RoundErrorCode.DRAINING, "no new sessions: shutting down")
        try:
            validation.check_open(request, self._model)
        except InvalidFieldError as error:
            return _field_error(request.round_id, error)
        self._cancel_compiling(key, "a newer opening of the session came")
        if request.sampling.grammar is not None:
            compiled = self._compiled(job, request, request.sampling.grammar, found)
            if not isinstance(compiled, OpenRequest):
                return compiled
            request = compiled
        if limit := self._sessions.make_room(job.tenant, request):
            self._observer.on_refused("sessions")
            return _refusal(request.round_id, Refusal("sessions", f"{limit} are busy", FULL_RETRY_MS))
        if (refusal := self._backlog.take_prefill(job.tenant, len(request.token_ids))) is not None:
            return _refusal(request.round_id, refusal)
        eos_token_ids = () if request.ignore_eos else self._model.eos_token_ids
        stop_ids = frozenset((*eos_token_ids, *request.stop_token_ids))
        work = Work(self._sessions.open(job.tenant, request, stop_ids), job, request)
        if is_plain(request.sampling):
            work.num_prompt_rows = request.num_prompt_choices
        return work

    def _compiled(
        self, job: Job, request: OpenRequest, grammar: Grammar, found: Found | None
    ) -> OpenRequest | SessionResponse | None:
        """Returns the opening with its compiled grammar, or an answer; None where the grammar is being compiled."""
        if self._grammars is None:
            fix = "install its extra `structured`, and start it with --max-grammar-bytes above 0"
            error = UnimplementedFieldError(FIELD, f"this verifier takes no grammars: {fix}")
            return _field_error(request.round_id, error)

        def on_found(found: Found) -> None:
            job.found = found
            self._resubmit(job)

        try:
            found = found or self._grammars.get(job.tenant, grammar, request.session_id, on_found)
        except TooManyGrammarsError as error:
            self._observer.on_refused("waiting")
            return _refusal(request.round_id, Refusal("waiting", str(error), FULL_RETRY_MS))
        except NoGrammarRoomError as error:
            return self._refuse_grammar(request, error)
        if found is None:
            self._compiling[job.tenant, request.session_id] = job
            return None
        if isinstance(found, NotCheckedError | NoGrammarRoomError):
            return self._refuse_grammar(request, found)
        if isinstance(found, InvalidFieldError):
            return _field_error(request.round_id, found)
        return replace(request, sampling=replace(request.sampling, grammar=found))

    def _refuse_grammar(
        self, request: OpenRequest, error: NotCheckedError | NoGrammarRoomError
    ) -> RoundError:
        self._observer.on_refused("grammars")
        return _refusal(request.round_id, Refusal("grammars", str(error), FULL_RETRY_MS))

    def _cancel_compiling(self, key: SessionKey, message: str) -> None:
        """Answers an opening that waits for its grammar, if there is one."""
        if (job := self._compiling.pop(key, None)) is not None:
            assert isinstance(job.request, OpenRequest) and job.request.sampling.grammar is not None
            assert self._grammars is not None, "something compiles its grammar"
            self._grammars.forget(job.tenant, job.request.sampling.grammar, job.session_id)
            job.reply(RoundError(job.round_id, RoundErrorCode.CANCELLED, message))

    # --------------------------------------------------------------------------------------- rounds

    def _admit_round(
        self, job: Job, request: VerifyRequest | GenerateRequest
    ) -> Work | SessionResponse | None:
        session = self._sessions.get(job.tenant, job.session_id)
        if session is None:
            message = "open the session first; it may have expired, or the verifier restarted"
            return RoundError(request.round_id, RoundErrorCode.UNKNOWN_SESSION, message)
        if session.running is not None:
            return self._enqueue(session, job)
        bonus = _bonus_in(session, request)
        if (answer := self._answer_at_once(session, request, bonus)) is not None:
            return answer
        if job.ticket is None:
            deadline_ms = request.deadline_ms if isinstance(request, VerifyRequest) else 0
            refusal = self._backlog.take_round(job.tenant, job.num_tokens, deadline_ms, job.session_id)
            if refusal is not None:
                return _refusal(request.round_id, refusal, session)
        num_confirmed = 0 if bonus is None else 1
        base = request.base_position + num_confirmed
        replaced_tokens = tuple(session.chain.token_ids[base:])
        work = Work(session, job, request, base_position=base, replaced_tokens=replaced_tokens)
        if isinstance(request, VerifyRequest):
            work.confirmed = None if bonus is None else bonus.logprobs
            if is_chain(request.parents):
                work.draft_tokens = request.draft_tokens[num_confirmed:]
                work.draft_probs = request.q_token_probs[num_confirmed:]
                work.supports = request.q_support[num_confirmed:]
            else:
                _set_tree(work, request, None if bonus is None else session.chain.token_ids[bonus.position])
        # The last token is always fed, so that its logits can be read: KV length ≤ position − 1.
        self._sessions.truncate_kv(session, base - (0 if request.committed_tokens else 1))
        session.chain.truncate(base)
        session.chain.extend(request.committed_tokens)
        return work

    def _answer_at_once(
        self, session: Session, request: VerifyRequest | GenerateRequest, bonus: Bonus | None
    ) -> SessionResponse | None:
        """Returns a stored reply or an error; None where the round must be computed."""
        try:
            validation.check_round_id(request)
            if isinstance(request, VerifyRequest):
                if (reply := session.stored_reply(request)) is not None:
                    return reply
                validation.check_verify(request, session, self._model)
            elif request.round_id <= session.last_round_id:
                return session.error(request.round_id, RoundErrorCode.STALE, "an older round")
            else:
                validation.check_generate(request, session, self._model)
        except InvalidFieldError as error:
            return _field_error(request.round_id, error, session)
        if not session.chain.agrees(request.base_position, request.base_hash):
            code = RoundErrorCode.STALE if session.was_pipelined else RoundErrorCode.UNKNOWN_PREFIX
            message = f"base {request.base_position} is not a prefix of this session"
            return session.error(request.round_id, code, message)
        if bonus is not None:
            assert isinstance(request, VerifyRequest)
            token_id = session.chain.token_ids[bonus.position]
            begins = has_path(request.draft_tokens, request.parents, (token_id,))
            if not begins or token_id in session.stop_ids:
                message = "the draft does not begin with the bonus before it"
                return session.error(request.round_id, RoundErrorCode.STALE, message)
        return None

    def _enqueue(self, session: Session, job: Job) -> RoundError | None:
        """Lets the job wait for its session's running one, which it ends if that is a `Generate`."""
        num_tokens = sum(waiting.num_tokens for waiting in session.waiting)
        limits = self._model.limits
        max_tokens = limits.max_context + MAX_WAITING * (limits.max_draft_tokens + 1)
        is_over = session.waiting and num_tokens + job.num_tokens > max_tokens
        if is_over or len(session.waiting) >= MAX_WAITING:
            self._observer.on_refused("waiting")
            most = f"at most {MAX_WAITING}, and {max_tokens} tokens"
            message = f"{len(session.waiting)} requests of this session wait already, with {num_tokens} tokens; {most}"
            return _refusal(job.round_id, Refusal("waiting", message, self._backlog.retry_ms()), session)
        session.waiting.append(job)
        self._sessions.end_generation(session)
        if session.running is not None and isinstance(job.request, OpenRequest):
            job.report(0, job.num_tokens, job.arrival_ns / 1e9)
        return None

    # -------------------------------------------------------------------------------- cancel, close

    def _cancel(self, job: Job, request: CancelRequest) -> None:
        session = self._sessions.get(job.tenant, job.session_id)
        if session is None:
            return
        for waiting in [each for each in session.waiting if each.round_id == request.round_id]:
            session.waiting.remove(waiting)
            waiting.reply(session.error(request.round_id, RoundErrorCode.CANCELLED, "cancelled by the edge"))
        if session.running is not None and session.running.round_id == request.round_id:
            self._sessions.end_generation(session)

    def _disconnect(self, job: Job) -> None:
        opening = self._compiling.get((job.tenant, job.session_id))
        if opening is not None and opening.call is job.call:
            self._cancel_compiling((job.tenant, job.session_id), _CALL_IS_OVER)
        session = self._sessions.get(job.tenant, job.session_id)
        if session is None:
            return
        for waiting in [each for each in session.waiting if each.call is job.call]:
            session.waiting.remove(waiting)
            waiting.reply(session.error(waiting.round_id, RoundErrorCode.CANCELLED, _CALL_IS_OVER))
        if session.running is not None and session.running.call is job.call:
            self._sessions.end_generation(session)
            self._sessions.end_opening(session, _CALL_IS_OVER)

    def _close(self, job: Job) -> Closed:
        self._cancel_compiling((job.tenant, job.session_id), _IS_CLOSED)
        session = self._sessions.get(job.tenant, job.session_id)
        if session is None:
            return Closed(was_open=False, position=0)
        for waiting in session.waiting:
            waiting.reply(RoundError(waiting.round_id, RoundErrorCode.CANCELLED, _IS_CLOSED))
        session.waiting.clear()
        self._sessions.end_generation(session)
        if session.running is not None:
            session.running.reply(RoundError(session.running.round_id, RoundErrorCode.CANCELLED, _IS_CLOSED))
        self._sessions.forget(session)
        return Closed(was_open=True, position=session.chain.position)


def _bonus_in(session: Session, request: VerifyRequest | GenerateRequest) -> Bonus | None:
    """Returns the last round's bonus where the round's first draft token is at its position.

    That token is checked against the bonus, never against another sample: the edge has the bonus in its
    sequence already, and in another batch the same logits may differ in their last bits.
    """
    bonus = session.bonus
    if bonus is None or not isinstance(request, VerifyRequest) or request.committed_tokens:
        return None
    return bonus if request.base_position == bonus.position and request.draft_tokens else None


def _set_tree(work: Work, request: VerifyRequest, bonus_token: int | None) -> None:
    """Sets the draft of a round that is a tree: what follows the bonus before it, where there is one."""
    nodes: Sequence[int] = range(len(request.parents))
    parents = request.parents
    if bonus_token is not None:
        (first,) = nodes_along(request.draft_tokens, request.parents, (bonus_token,))  # checked: there is one
        work.confirmed_node = (first,)
        nodes, parents = Tree(request.parents).subtree(first)
    work.sent_nodes, work.tree = nodes, Tree(parents)
    if request.q_support:  # there is no bonus before it: only `coupled` announces one, and sends no support
        work.supports = supports_by_row(work.tree, request.q_support)
    work.draft_tokens = tuple(request.draft_tokens[node] for node in nodes)
    work.draft_probs = tuple(request.q_token_probs[node] for node in nodes if request.q_token_probs)


def _refusal(round_id: int, refusal: Refusal, session: Session | None = None) -> RoundError:
    make: Callable[..., RoundError] = RoundError if session is None else session.error
    code = RoundErrorCode.REFUSED
    return make(round_id, code, refusal.message, retry_after_ms=refusal.retry_after_ms)


def _field_error(round_id: int, error: InvalidFieldError, session: Session | None = None) -> RoundError:
    make: Callable[..., RoundError] = RoundError if session is None else session.error
    is_unbuilt = isinstance(error, UnimplementedFieldError)
    code = RoundErrorCode.UNIMPLEMENTED if is_unbuilt else RoundErrorCode.INVALID
    return make(round_id, code, error.reason, field=error.field)
