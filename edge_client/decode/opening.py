"""Opening a session, and opening it again with everything the edge has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from outrider.common.alignment import extend_hash
from outrider.common.errors import IncompatibleError, RoundFailedError
from outrider.common.types import (
    DRAFT_SOURCE,
    PROTOCOL_VERSION,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    RoundError,
    RoundErrorCode,
)
from outrider.edge_client.controller.round_costs import StepTimes
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.reverify import reconcile
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.learned.head import NUM_TOP
from outrider.edge_client.transport.remote_verifier import SessionLostError

_FIRST_MESSAGE_S = 2.0  # a rebuild that computes for longer reports `Progress` earlier


def open_session(state: GenerationState) -> list[SessionEvent]:
    """Opens with the whole sequence and appends the target's next token, unless a correction is to be chosen
    in that place: the next round then builds on the sequence without it. Where tokens are still to be judged it
    opens with those before them, and compares the first of them with the target's.

    Raises `IncompatibleError` for another tokenizer, or a target other than the first; `LinkError`;
    `RoundFailedError` in co-located mode where the verifier has no draft.
    """
    tokens, remote = state.tokens, state.remote
    is_rebuild = tokens.position > tokens.num_prompt_tokens or state.model is not None
    request = _make_request(state, is_rebuild)
    start_s = state.clock.now()
    drafter = state.proposer.drafter
    warm_up = None
    if drafter is not None and not is_rebuild:
        state.recall_times()
        warm_up = partial(_warm_up, state, drafter, request)
    timeout_s = None
    if is_rebuild and state.options.on_timeout is not OnTimeout.WAIT:
        timeout_s = max(_FIRST_MESSAGE_S, 2.0 * remote.deadline.seconds)
    while True:
        try:
            opened, trip_s = remote.open(request, timeout_s=timeout_s, meanwhile=warm_up)
            break
        except SessionLostError as error:  # a bug of the verifier: once more, then it is reported
            state.failed(error.error)
            request = replace(request, round_id=remote.next_round_id())
    wait_s = state.clock.now() - start_s
    if warm_up is not None:
        state.recall_acceptance(opened.model)
        _observe_opening(state, opened, trip_s)
    state.recorder.opened(opened, wait_s, is_rebuild=is_rebuild)
    events = _take(state, opened)
    state.plan_draft()
    return events


def _warm_up(state: GenerationState, drafter: Drafter, request: OpenRequest) -> None:
    """Does what needs no answer: the draft reads the prompt, and the mode's first decision is prepared."""
    drafter.warm_up(request.token_ids, request.num_prompt_choices)
    state.window.prepare()


def _observe_opening(state: GenerationState, opened: Opened, trip_s: float) -> None:
    """Passes on to the policies what an opening measures of the link, the target and the draft."""
    conditions, drafter = state.conditions, state.proposer.drafter
    if conditions is None or drafter is None:
        return
    metrics, would_be_accepted = opened.metrics, None
    conditions.observe_prompt(*drafter.agreed_with(opened.prompt_choices))
    if (
        state.options.method is Method.COUPLED
    ):  # with others an accepted token may differ from the target's own
        would_be_accepted = drafter.would_open_with(opened.first_token)
    conditions.observe_opening(
        max(0.0, trip_s - metrics.total_ns / 1e9),
        metrics.forward_ns / 1e9,
        None if conditions.costs.has_draft else drafter.time_token(),
        StepTimes.from_ns(
            opened.step_fixed_ns, opened.step_token_ns, opened.step_session_ns, opened.stream_gap_ns
        ),
        metrics.num_active_sessions,
        would_be_accepted=would_be_accepted,
    )


def _make_request(state: GenerationState, is_rebuild: bool) -> OpenRequest:
    options, model = state.options, state.model
    expected = model.target_fingerprint if model and not options.is_target_change_allowed else ""
    return OpenRequest(
        session_id=state.session_id,
        token_ids=tuple(state.tokens.chain.token_ids[: state.tokens.settled_position]),
        num_prompt_tokens=state.tokens.num_prompt_tokens,
        sampling=options.sampling,
        method=options.method,
        method_params=options.method_params,
        tokenizer_fingerprint=options.tokenizer_fingerprint,
        target_fingerprint=expected,
        ignore_eos=options.stop.ignore_eos,
        stop_token_ids=options.stop.stop_token_ids,
        num_logprobs=max(options.num_logprobs, NUM_TOP if state.head_learner is not None else 0),
        is_rebuild=is_rebuild,
        round_id=state.remote.next_round_id(),
        draft_source=options.draft_source,
        num_prompt_choices=0 if is_rebuild else state.num_prompt_choices,
    )


def _check_draft_source(source: str, model: ModelInfo) -> None:
    """Raises `RoundFailedError` where the verifier has no such source of drafts."""
    if source in model.draft_sources:
        return
    message, field = "it has no draft for co-located speculation: serve with --draft DIR", "mode"
    if source != DRAFT_SOURCE:
        names = ", ".join(model.draft_sources) or "none"
        message, field = f"it drafts by {names}: serve with --heads DIR of {source}", "draft_source"
    raise RoundFailedError(RoundError(0, RoundErrorCode.UNIMPLEMENTED, message, field))


def _take(state: GenerationState, opened: Opened) -> list[SessionEvent]:
    tokens = state.tokens
    position = tokens.settled_position  # it was opened with so many tokens
    if opened.model.protocol_version != PROTOCOL_VERSION:
        theirs = opened.model.protocol_version
        message = f"the verifier speaks protocol {theirs}, this edge {PROTOCOL_VERSION}"
        raise IncompatibleError(message, "upgrade the older side")
    if state.options.sampling.grammar is not None and not opened.model.limits.max_grammar_bytes:
        raise IncompatibleError("this verifier knows no grammars", "use one of this edge's version")
    their_hash = extend_hash(tokens.chain.hash_at(position), (opened.first_token,))
    rolled_back = state.opened(opened)
    if state.options.mode is ExecutionMode.CO_LOCATED:
        _check_draft_source(
            state.options.draft_source or DRAFT_SOURCE, opened.model
        )  # before a token is shown
    if (opened.position, opened.hash) != (position + 1, their_hash):
        message = "the verifier's hash of the same token ids differs from the edge's"
        raise IncompatibleError(message, "run the same release on both sides")
    if state.pending is not None or tokens.position < position:
        tokens.acknowledge(position)
        return [*rolled_back]
    logprobs = () if opened.logprobs is None else (opened.logprobs,)
    events = [*rolled_back, *reconcile(state, position, (opened.first_token,), logprobs)]
    if tokens.position == position:
        events += state.add((opened.first_token,), (Origin.TARGET,), logprobs)
    tokens.acknowledge(position + 1)
    return events
