"""The verifier generates by itself and streams, in the same session: the target alone, or (co-located) with a
draft beside it, where each message is a round. A lost stream resumes from the last token received.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import GeneratedTokens, GenerateRequest, Origin, RoundError, RoundErrorCode
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.decode.stream_watch import StreamWatch
from outrider.edge_client.transport.remote_verifier import SessionLostError, UnknownPrefixError

_MAX_SILENCE_S = 10.0
_DISAGREES = "the position or hash of the generated tokens does not match the edge's sequence"


def stream_cloud_only(state: GenerationState, watch: StreamWatch | None = None) -> Iterator[SessionEvent]:
    """Streams until the sequence ends, or `watch` leaves: the verifier is then asked to stop, and what it sent
    before still comes. Exact: after a fault it waits for the link (`recover_timeout_s`), except under `fail`."""
    tokens, remote, now = state.tokens, state.remote, state.clock.now
    silence_s = remote.deadline.seconds
    give_up_s = now() + state.options.recover_timeout_s
    while tokens.finish is None and not (watch is not None and watch.is_left):
        state.finish_if_full()
        if tokens.finish is not None:
            return
        try:
            if state.must_open:
                yield from open_session(state)
                continue
            request = _make_request(state)
            for message in remote.generate(request, silence_s, give_up_s - now()):
                yield from _take(state, message)
                give_up_s = now() + state.options.recover_timeout_s
                if tokens.finish is not None or state.must_open:
                    break
                if watch is not None and watch.should_leave(message):
                    remote.stop_generating(request)
        except (SessionLostError, UnknownPrefixError) as error:
            state.failed(error.error)
            state.lost()
        except LinkError as error:
            if state.options.on_timeout is OnTimeout.FAIL:
                raise
            if watch is not None and watch.may_abandon():
                remote.drop_connection()
                return
            if now() > give_up_s:
                raise LinkError(str(error)) from error
            if isinstance(error, RoundTimeoutError):
                state.recorder.stream_timed_out()
            silence_s = min(2.0 * silence_s, _MAX_SILENCE_S)
            remote.drop_connection()


def _make_request(state: GenerationState) -> GenerateRequest:
    tokens = state.tokens
    committed, origins = tokens.unacked()
    is_co_located = state.options.mode is ExecutionMode.CO_LOCATED
    num_nodes = state.num_colocated_nodes if is_co_located else 0
    return GenerateRequest(
        round_id=state.remote.next_round_id(),
        base_position=tokens.acked_position,
        base_hash=tokens.acked_hash,
        max_new_tokens=tokens.num_remaining,
        committed_tokens=committed,
        origins=origins,
        is_co_located=is_co_located,
        num_speculative_tokens=num_nodes or (state.next_depth() if is_co_located else 0),
        is_tree=num_nodes > 0,
    )


def _take(state: GenerationState, message: GeneratedTokens) -> Iterator[SessionEvent]:
    """Appends what the message brings, or has the session opened again where it is of another sequence."""
    tokens = state.tokens
    position = tokens.position + len(message.token_ids)
    if message.token_ids and (message.position, message.hash) != (
        position,
        tokens.chain.hash_with(message.token_ids),
    ):
        state.failed(RoundError(message.round_id, RoundErrorCode.UNKNOWN_PREFIX, _DISAGREES))
        state.lost()
        return
    state.answered()
    events = state.add(message.token_ids, message.origins, message.logprobs)
    num_accepted = None
    if state.options.mode is ExecutionMode.CO_LOCATED:
        num_accepted = sum(event.origin is Origin.ACCEPTED for event in events)
    is_tree = state.num_colocated_nodes > 0 and message.num_draft_tokens > 0
    state.recorder.streamed(message, len(events), num_accepted, is_tree=is_tree)
    yield from events
    if tokens.finish is None and message.token_ids:
        tokens.acknowledge(position)
