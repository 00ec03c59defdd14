"""A draft that makes a text slower than the target alone is said to, from what was measured and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from outrider.edge_client.controller.slow_draft import MIN_ROUNDS, slow_draft_note
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord, SessionStats
from outrider.edge_client.daemon.service import Daemon

SPECULATIVE, CO_LOCATED = ExecutionMode.SPECULATIVE, ExecutionMode.CO_LOCATED


def text(
    num_rounds: int = MIN_ROUNDS, *, draft_ms: float = 4.0, rtt_ms: float = 1.0, accepted: int = 0
) -> SessionStats:
    """Synchronous rounds of 4 tokens; a step of the target takes 9.5 ms and 0.1 ms a token."""
    stats, now_ms, verify_ms = SessionStats(step_fixed_s=0.0095, step_token_s=0.0001), 0.0, 10.0
    for number in range(num_rounds):
        now_ms += draft_ms + rtt_ms + verify_ms
        stats.rounds.append(
            RoundRecord(
                number,
                4,
                accepted,
                draft_ms=draft_ms,
                rtt_ms=rtt_ms + verify_ms,
                net_ms=rtt_ms,
                verifier_ms=verify_ms,
            )
        )
        stats.token_times_ns += [int(now_ms * 1e6)] * (accepted + 1)
    return stats


@pytest.mark.parametrize(
    ("about", "own_ms"),
    [
        ({"accepted": 0}, 15.0),
        ({"accepted": 1, "rtt_ms": 30.0}, 22.0),
        ({"draft_ms": 80.0, "accepted": 3}, 22.8),
    ],
)
def test_a_slower_text_is_said_to_be_so_with_both_times_and_the_flags_that_help(
    about: dict[str, float], own_ms: float
) -> None:
    note = slow_draft_note(SPECULATIVE, text(40, **about))  # type: ignore[arg-type]
    told_ms = float(note.partition("slower: ")[2].partition(" ms")[0])
    assert told_ms == pytest.approx(own_ms, rel=0.06) and "takes 9.6 ms" in note
    assert "--mode cloud-only" in note and "--mode auto" in note


def test_a_text_of_trees_alone_is_judged_as_well() -> None:
    for rtt_ms, is_slow in ((30.0, True), (0.0, False)):
        stats = text(40, draft_ms=0.4, rtt_ms=rtt_ms, accepted=1)
        for record in stats.rounds:
            record.main_path = (1, 3)
        assert bool(slow_draft_note(SPECULATIVE, stats)) == is_slow


def test_a_faster_text_is_not_and_neither_is_one_that_is_hardly_slower() -> None:
    assert slow_draft_note(SPECULATIVE, text(accepted=3)) == ""
    assert slow_draft_note(SPECULATIVE, text(draft_ms=0.4, rtt_ms=0.0)) == "", "10.4 against 9.6 ms"


def test_a_machine_that_stalls_is_not_taken_for_a_slow_draft() -> None:
    stats = text(60, accepted=2)
    half = len(stats.token_times_ns) // 2
    stats.token_times_ns[half:] = [time_ns + 2_000_000_000 for time_ns in stats.token_times_ns[half:]]
    assert slow_draft_note(SPECULATIVE, stats) == ""


def test_a_step_whose_length_is_not_known_is_not_guessed_to_be_short() -> None:
    """Without stated times a whole verification bounds it; with longer ones than this session saw, those do."""
    stats = text(draft_ms=0.5)
    stats.step_fixed_s = stats.step_token_s = 0.0
    assert slow_draft_note(SPECULATIVE, stats) == ""
    stats = text()
    assert slow_draft_note(SPECULATIVE, stats)
    stats.step_fixed_s = 0.014
    assert slow_draft_note(SPECULATIVE, stats) == ""


def test_it_is_silent_where_it_cannot_know() -> None:
    assert slow_draft_note(SPECULATIVE, text(MIN_ROUNDS))
    assert slow_draft_note(SPECULATIVE, text(MIN_ROUNDS - 1)) == "", "too few rounds"
    for fault in ("num_timeouts", "num_rebuilds", "num_reconnects", "num_refusals"):
        stats = text()
        setattr(stats, fault, 1)
        assert slow_draft_note(SPECULATIVE, stats) == "", f"{fault}: not the draft's doing"
    assert slow_draft_note(SPECULATIVE, SessionStats()) == ""
    for mode in (ExecutionMode.AUTO, ExecutionMode.CLOUD_ONLY, ExecutionMode.EDGE_ONLY):
        assert slow_draft_note(mode, text()) == ""


def test_a_daemon_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    daemon = cast(Daemon, SimpleNamespace(_has_noted_slow_draft=False))
    for stats in (text(accepted=3), text(), text()):
        Daemon.note_slow_draft(daemon, SPECULATIVE, stats)
    assert len(caplog.messages) == 1 and "drafting made this text slower" in caplog.messages[0]


def test_a_draft_beside_the_target_may_be_too_slow_as_well() -> None:
    stats = text(rtt_ms=0.0, draft_ms=10.0)
    for each in stats.rounds:  # such rounds cross no network, and report their forward alone
        each.rtt_ms = each.net_ms = each.verifier_ms = 0.0
        each.forward_ms = 10.0
    assert "20.0 ms a token" in slow_draft_note(CO_LOCATED, stats)
