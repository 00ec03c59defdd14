"""Finds from a text's measured rounds what the target alone would have taken, and where it would have been faster.
Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from outrider.edge_client.controller.cost_model import cloud_only_s
from outrider.edge_client.controller.round_costs import EarlierCosts, RoundCosts, StepTimes
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import SessionStats

MIN_ROUNDS = 2 * SETTINGS.num_verify_samples  # the estimate of a step is of the second half
_STRETCH_TOKENS = 16  # several rounds, of which each brings tokens in one moment
_MIN_RATIO = 1.2  # below, the estimate's own error could decide
_MODES = (ExecutionMode.SPECULATIVE, ExecutionMode.CO_LOCATED)  # `auto` leaves a slow draft by itself


def slow_draft_note(mode: ExecutionMode, stats: SessionStats) -> str:
    """Returns that drafting made a text slower, and what to do, for a person; empty where it did not, and
    where that cannot be known: of few rounds, of a link that failed, of a verifier that refused."""
    if mode not in _MODES:
        return ""
    target_ms = target_step_ms(stats)
    if target_ms is None:
        return ""
    own_ms = _token_ms(stats.token_times_ns)
    if own_ms < _MIN_RATIO * target_ms:
        return ""
    return (
        f"drafting made this text slower: {own_ms:.1f} ms a token, and a step of the target alone takes "
        f"{target_ms:.1f} ms; --mode cloud-only streams its tokens, --mode auto measures and chooses"
    )


def target_step_ms(stats: SessionStats) -> float | None:
    """Returns what a step of the target alone takes, estimated from a text's rounds; None where that cannot be
    known: of few rounds, of a link that failed, of a verifier that refused."""
    answered = [each for each in stats.rounds if each.is_answered and each.num_draft_tokens]
    num_faults = stats.num_timeouts + stats.num_rebuilds + stats.num_reconnects + stats.num_refusals
    if min(len(answered), len(stats.token_times_ns)) < MIN_ROUNDS or num_faults:
        return None
    costs = RoundCosts(earlier=EarlierCosts(stream_overhead_s=0.0))  # a step alone is compared
    parts = stats.step_fixed_s, stats.step_token_s, stats.step_session_s
    costs.observe_opening(math.inf, StepTimes(*parts))  # rounds bound a step closer
    for each in answered:
        costs.observe(each)
    # The longer of two measurements of one step, this session's and the verifier's: no guess in our favour.
    return max(cloud_only_s(*costs.estimate()), sum(parts)) * 1e3


def _token_ms(times_ns: Sequence[int]) -> float:
    """Returns the median time a token over all stretches of the text, which a stall hardly moves."""
    stretches = zip(times_ns, times_ns[_STRETCH_TOKENS:], strict=False)
    return statistics.median(end - start for start, end in stretches) / _STRETCH_TOKENS / 1e6
