"""One session decoded and written down: a request's row and its rounds' rows, as JSON takes them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import OutriderError
from outrider.common.types import FinishReason, Origin
from outrider.edge_client.core.events import RolledBackEvent, TokenEvent
from outrider.edge_client.core.stats import RoundOutcome, RoundRecord, SessionStats
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.experiments.sweep.results.records import RequestRow, RoundRow


@dataclass(frozen=True, slots=True)
class Errand:
    """Says which request this is."""

    cell: str
    request: str
    repeat: int
    session: int
    prompt: str
    seed: int
    link_opened_s: float  # on the observer's clock; all processes of a machine share `SYSTEM_CLOCK`


@dataclass(slots=True)
class _Times:
    """Holds when things happened, in nanoseconds of the observer's clock."""

    commits_ns: list[int]
    rounds_ns: list[int]


def observe(
    session: EdgeSession,
    errand: Errand,
    num_prompt_tokens: int,
    clock: Clock = SYSTEM_CLOCK,
    wall_s: Callable[[], float] = time.time,
) -> tuple[RequestRow, list[RoundRow]]:
    """Runs the session to its end; an error that the product reports is a row with `error`.

    `clock` is the session's; `wall_s` returns the seconds since 1970 that rows are dated by.
    """
    started_s, age_s = wall_s(), clock.now() - errand.link_opened_s
    error = ""
    times = _Times([], [])
    try:
        _watch(session, clock, times)
    except OutriderError as failure:
        error = str(failure)
    result = session.result
    request = _request_row(errand, result, times, num_prompt_tokens, started_s, age_s * 1e3, error)
    return request, _round_rows(errand, result.stats, times)


def token_hash(token_ids: Sequence[int]) -> str:
    """Returns the BLAKE2b-64 of the ids as uint32 little-endian, hex."""
    return hashlib.blake2b(np.asarray(token_ids, "<u4").tobytes(), digest_size=8).hexdigest()


def _watch(session: EdgeSession, clock: Clock, times: _Times) -> None:
    """Notes `times`, as far as the session came. Counts tokens that a consumer gets at once as one commit: they were
    timed before the first was given."""
    stats = session.result.stats
    group_end = 0
    for event in session.generate():
        now_ns = int(clock.now() * 1e9)
        if isinstance(event, RolledBackEvent):
            group_end = event.num_tokens
        if isinstance(event, TokenEvent) and event.index >= group_end:
            group_end = len(stats.token_times_ns)
            times.commits_ns.append(stats.token_times_ns[-1])
            now_ns = stats.token_times_ns[-1]
        times.rounds_ns += [now_ns] * (len(stats.rounds) - len(times.rounds_ns))


def _request_row(
    errand: Errand,
    result: SessionResult,
    times: _Times,
    num_prompt_tokens: int,
    started_s: float,
    link_age_ms: float,
    error: str,
) -> RequestRow:
    stats, model = result.stats, result.model
    token_ms = [_ms(each - stats.start_ns) for each in stats.token_times_ns]
    answered = [r for r in stats.rounds if r.is_answered]
    total_ms = token_ms[-1] if token_ms else None
    return RequestRow(
        cell=errand.cell,
        request=errand.request,
        repeat=errand.repeat,
        session=errand.session,
        prompt=errand.prompt,
        seed=errand.seed,
        started_s=round(started_s, 3),
        link_age_ms=round(link_age_ms, 3),
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(result.token_ids),
        finish_reason=str(FinishReason.ERROR if error else result.finish_reason),
        token_ids=list(result.token_ids),
        token_hash=token_hash(result.token_ids),
        token_times_ms=token_ms,
        commit_times_ms=[_ms(each - stats.start_ns) for each in times.commits_ns],
        token_origins=[str(origin) for origin in result.origins],
        ttft_ms=token_ms[0] if token_ms else None,
        tpot_ms=round((token_ms[-1] - token_ms[0]) / (len(token_ms) - 1), 4) if len(token_ms) > 1 else None,
        total_ms=total_ms,
        otps=round(1e3 * len(token_ms) / total_ms, 3) if total_ms else None,
        num_rounds=len(answered),
        num_draft_tokens=sum(r.num_draft_tokens for r in answered),
        num_accepted_tokens=sum(r.num_accepted_tokens for r in answered),
        verifier_calls=len(answered) + len(stats.generate_forward_ms),
        forward_s=round(_forward_share_ms(stats, answered) / 1e3, 6),
        cloud_draft_s=round(_draft_share_ms(answered) / 1e3, 6),
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
        num_unverified_tokens=result.num_unverified_tokens,
        num_fallback_tokens=sum(origin is Origin.FALLBACK for origin in result.origins),
        num_approximate_tokens=sum(result.token_is_approximate),
        num_rolled_back_tokens=stats.num_rolled_back_tokens,
        num_timeouts=stats.num_timeouts,
        num_reconnects=stats.num_reconnects,
        num_rebuilds=stats.num_rebuilds,
        num_refusals=stats.num_refusals,
        open_ms=round(stats.open_ms, 3),
        target=f"{model.model_id} ({model.dtype}, {model.device})" if model else "",
        target_fingerprint=model.target_fingerprint if model else "",
        labels=list(model.labels) if model else [],
        error=error,
    )


def _is_over_there(record: RoundRecord) -> bool:
    """Returns whether the round was co-located: it crossed no network, and its draft was made by the
    verifier."""
    return record.rtt_ms == 0


def _forward_share_ms(stats: SessionStats, answered: Sequence[RoundRecord]) -> float:
    in_rounds = sum(r.forward_ms / max(1, r.batch_size) for r in answered)
    streamed = zip(stats.generate_forward_ms, stats.generate_batch_sizes, strict=True)
    return in_rounds + sum(forward_ms / max(1, batch_size) for forward_ms, batch_size in streamed)


def _draft_share_ms(answered: Sequence[RoundRecord]) -> float:
    """Returns a session's share of the verifier's drafting, whose time is told of all that drafted together."""
    return sum(r.draft_ms / max(1, r.batch_size) for r in answered if _is_over_there(r))


def _round_rows(errand: Errand, stats: SessionStats, times: _Times) -> list[RoundRow]:
    # Rounds that an error cut off before anybody saw them have no time of their own.
    last_ns = stats.token_times_ns[-1] if stats.token_times_ns else stats.start_ns
    ends_ns = times.rounds_ns + [last_ns] * (len(stats.rounds) - len(times.rounds_ns))
    return [
        _round_row(errand, index, record, _ms(end_ns - stats.start_ns))
        for index, (record, end_ns) in enumerate(zip(stats.rounds, ends_ns, strict=True))
    ]


def _round_row(errand: Errand, index: int, record: RoundRecord, at_ms: float) -> RoundRow:
    return RoundRow(
        cell=errand.cell,
        request=errand.request,
        round=index,
        at_ms=at_ms,
        num_draft_tokens=record.num_draft_tokens,
        num_accepted_tokens=record.num_accepted_tokens,
        la_over_k=round(record.la_over_k, 4),
        alpha_mean=None if math.isnan(record.alpha_mean) else round(record.alpha_mean, 5),
        draft_ms=round(record.draft_ms, 4),
        rtt_ms=round(record.rtt_ms, 4),
        net_ms=round(record.net_ms, 4),
        queue_ms=round(record.queue_ms, 4),
        forward_ms=round(record.forward_ms, 4),
        verifier_ms=round(record.verifier_ms, 4),
        batch_size=record.batch_size,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        is_answered=record.is_answered,
        fallback=record.outcome is RoundOutcome.TIMED_OUT,
        kept=record.outcome is RoundOutcome.KEPT,
        hard_ratio=record.hard_ratio,
        escalated=record.escalated,
        pipelined_hit=record.pipelined_hit,
        main_path=None if record.main_path is None else list(record.main_path),
    )


def _ms(ns: int) -> float:
    return round(ns / 1e6, 4)
