"""Opening a session, and opening it again with everything the edge has."""

from __future__ import annotations

import time
from dataclasses import replace

from outrider.common.alignment import extend_hash
from outrider.common.errors import IncompatibleError, RoundFailedError
from outrider.common.types import PROTOCOL_VERSION, Opened, OpenRequest, Origin, RoundError, RoundErrorCode
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import Mode, OnTimeout
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.reverify import hold_against
from outrider.edge_client.transport.remote_verifier import SessionLostError

_NO_DRAFT_THERE = RoundError(
    round_id=0,
    code=RoundErrorCode.UNIMPLEMENTED,
    message="it has no draft for co-located speculation: serve with --draft DIR",
    field="mode",
)
_CLEARLY_S = 0.0005  # a wait of its own, after the draft had read the prompt
_FIRST_SIGN_S = 2.0  # a rebuild that computes for longer announces itself


def open_session(decoding: Decoding) -> list[SessionEvent]:
    """Opens with the whole text; the target's own next token joins it, unless a correction is to be chosen
    for that place: the next round then builds on the text without it. Of a text with tokens still to be
    judged it opens with what lies before them, and the first of them is held against the target's own.

    Raises `IncompatibleError` for another tokenizer, or a target other than the first; `LinkError`;
    `RoundFailedError` in co-located mode where the verifier has no draft.
    """
    text, remote = decoding.text, decoding.remote
    is_rebuild = text.position > text.num_prompt_tokens or decoding.model is not None
    request = _make_request(decoding, is_rebuild)
    start_s = time.perf_counter()
    drafter = decoding.proposer.drafter
    warm_up = (lambda: drafter.warm_up(request.token_ids)) if drafter and not is_rebuild else None
    timeout_s = None
    if is_rebuild and decoding.options.on_timeout is not OnTimeout.WAIT:
        timeout_s = max(_FIRST_SIGN_S, 2.0 * remote.deadline.seconds)
    while True:
        try:
            opened = remote.open(request, timeout_s=timeout_s, meanwhile=warm_up)
            break
        except SessionLostError as error:  # a bug over there: once more, then it is reported
            decoding.note_failure(error.error)
            request = replace(request, round_id=remote.next_round_id())
    wait_s = time.perf_counter() - start_s
    decoding.stats.open_ms += wait_s * 1e3
    if warm_up is not None:
        decoding.recall(opened.model)
        _tell_choice(decoding, opened, wait_s)
    decoding.stats.num_rebuilds += is_rebuild
    return _take(decoding, opened)


def _tell_choice(decoding: Decoding, opened: Opened, wait_s: float) -> None:
    """What an opening says of the link, the target and the draft, to whoever chooses the mode. Where the
    draft read its prompt for longer than the verifier did, the wait says nothing."""
    choice, drafter = decoding.window.choice, decoding.proposer.drafter
    if choice is None or drafter is None or time.monotonic() - drafter.warm_s < _CLEARLY_S:
        return
    metrics = opened.metrics
    trip_s = max(0.0, wait_s - metrics.total_ns / 1e9)
    choice.observe_opening(
        trip_s,
        metrics.forward_ns / 1e9,
        drafter.time_token(),
        opened.step_fixed_ns / 1e9,
        opened.step_token_ns / 1e9,
    )


def _make_request(decoding: Decoding, is_rebuild: bool) -> OpenRequest:
    options, model = decoding.options, decoding.model
    expected = model.target_fingerprint if model and not options.is_target_change_allowed else ""
    return OpenRequest(
        session_id=decoding.session_id,
        token_ids=tuple(decoding.text.chain.token_ids[: decoding.text.settled_position]),
        num_prompt_tokens=decoding.text.num_prompt_tokens,
        sampling=options.sampling,
        method=options.method,
        method_params=options.method_params,
        tokenizer_fingerprint=options.tokenizer_fingerprint,
        target_fingerprint=expected,
        ignore_eos=options.stop.ignore_eos,
        stop_token_ids=options.stop.stop_token_ids,
        num_logprobs=options.num_logprobs,
        is_rebuild=is_rebuild,
        round_id=decoding.remote.next_round_id(),
    )


def _take(decoding: Decoding, opened: Opened) -> list[SessionEvent]:
    text = decoding.text
    position = text.settled_position  # what it was opened with
    if opened.model.protocol_version != PROTOCOL_VERSION:
        theirs = opened.model.protocol_version
        raise IncompatibleError(f"the verifier speaks protocol {theirs}, this edge {PROTOCOL_VERSION}")
    decoding.model = opened.model
    if decoding.options.mode is Mode.CO_LOCATED and not opened.model.draft_fingerprint:
        raise RoundFailedError(_NO_DRAFT_THERE)  # before anything is shown
    decoding.must_open = False
    text.set_eos(opened.model.eos_token_ids)
    their_hash = extend_hash(text.chain.hash_at(position), (opened.first_token,))
    if (opened.position, opened.hash) != (position + 1, their_hash):
        raise IncompatibleError("the verifier hashes the same text differently")
    if decoding.pending is not None:
        text.acknowledge(position)
        return []
    logprobs = () if opened.logprobs is None else (opened.logprobs,)
    events = hold_against(decoding, position, (opened.first_token,), logprobs)
    if text.position == position:
        events += decoding.add((opened.first_token,), (Origin.TARGET,), logprobs)
    text.acknowledge(position + 1)
    return events
