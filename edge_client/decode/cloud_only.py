"""What the verifier writes by itself, streamed in the same session: the target alone, or (co-located) with a
draft beside it, where each message is a round. A lost stream resumes from the last token received.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import FinishReason, GeneratedTokens, GenerateRequest, Origin
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import Mode, OnTimeout
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.transport.remote_verifier import SessionLostError, UnknownPrefixError

if TYPE_CHECKING:
    from outrider.edge_client.decode.auto import StreamWatch

_MAX_SILENCE_S = 10.0


def stream_cloud_only(decoding: Decoding, watch: StreamWatch | None = None) -> Iterator[SessionEvent]:
    """Until the text ends, or `watch` wants to leave: the verifier is then told to stop, and what it streamed
    until then still comes. Exact: a fault is waited for (`recover_timeout_s`), except under `fail`."""
    text, remote = decoding.text, decoding.remote
    silence_s = remote.deadline.seconds
    give_up_s = time.monotonic() + decoding.options.recover_timeout_s
    while text.finish is None and not (watch is not None and watch.is_left):
        if not decoding.context_room:
            text.finish = FinishReason.CONTEXT
            return
        try:
            if decoding.must_open:
                yield from open_session(decoding)
                continue
            request = _make_request(decoding)
            for tokens in remote.generate(request, silence_s, give_up_s - time.monotonic()):
                yield from _take(decoding, tokens)
                decoding.note_success()
                give_up_s = time.monotonic() + decoding.options.recover_timeout_s
                if text.finish is not None or decoding.must_open:
                    break
                if watch is not None and watch.see(tokens):
                    remote.cancel(request)
        except (SessionLostError, UnknownPrefixError) as error:
            decoding.note_failure(error.error)
            decoding.must_open = True
        except LinkError as error:
            if decoding.options.on_timeout is OnTimeout.FAIL:
                raise
            if watch is not None and watch.abandon():
                remote.lifeline.drop()
                return
            if time.monotonic() > give_up_s:
                raise LinkError(str(error)) from error
            decoding.stats.num_timeouts += isinstance(error, RoundTimeoutError)
            silence_s = min(2.0 * silence_s, _MAX_SILENCE_S)
            remote.lifeline.drop()


def _make_request(decoding: Decoding) -> GenerateRequest:
    text = decoding.text
    committed, origins = text.unacked()
    is_co_located = decoding.options.mode is Mode.CO_LOCATED
    return GenerateRequest(
        round_id=decoding.remote.next_round_id(),
        base_position=text.acked_position,
        base_hash=text.acked_hash,
        max_new_tokens=text.num_remaining,
        committed_tokens=committed,
        origins=origins,
        is_co_located=is_co_located,
        num_speculative_tokens=decoding.next_depth() if is_co_located else 0,
    )


def _take(decoding: Decoding, tokens: GeneratedTokens) -> Iterator[SessionEvent]:
    text = decoding.text
    events = decoding.add(tokens.token_ids, tokens.origins, tokens.logprobs)
    decoding.stats.num_generate_tokens += len(events)
    if decoding.options.mode is Mode.CO_LOCATED:
        num_accepted = sum(event.origin is Origin.ACCEPTED for event in events)
        decoding.record(_make_record(tokens, num_accepted))
    elif tokens.metrics.forward_ns:
        decoding.stats.generate_forward_ms.append(tokens.metrics.forward_ns / 1e6)
        decoding.stats.generate_batch_sizes.append(tokens.metrics.batch_size)
    yield from events
    if text.finish is None:
        if text.chain.agrees(tokens.position, tokens.hash) and tokens.position == text.position:
            text.acknowledge(text.position)
        elif tokens.token_ids:
            decoding.must_open = True


def _make_record(tokens: GeneratedTokens, num_accepted_tokens: int) -> RoundRecord:
    """A round of the verifier's own; no network lies between its draft and its verdict."""
    metrics = tokens.metrics
    return RoundRecord(
        round_id=tokens.round_id,
        num_draft_tokens=tokens.num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        draft_ms=tokens.draft_ns / 1e6,
        queue_ms=metrics.queue_ns / 1e6,
        forward_ms=metrics.forward_ns / 1e6,
        batch_size=metrics.batch_size,
        alpha_mean=metrics.alpha_mean,
    )
