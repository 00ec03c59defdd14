"""Who sees a round's record, and when."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.common.types import GeneratedTokens, Origin
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.recorder import Recorder


class Seen:
    """A depth policy that notes what it observes."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


def test_the_first_rounds_are_observed_at_once_and_later_ones_when_asked() -> None:
    seen: Any = Seen()
    recorder, dense = Recorder(seen, RoundWindow()), SETTINGS.dense_rounds
    for number in range(dense + 2):
        recorder.record(RoundRecord(number, 4, 2))
    assert len(seen.records) == dense and recorder.has_unobserved
    recorder.observe()
    assert [each.round_id for each in seen.records] == [*range(dense + 2)] and not recorder.has_unobserved


def test_short_rounds_are_planned_several_at_a_time_and_long_ones_each() -> None:
    for rtt_ms, num_due in ((5.0, SETTINGS.rounds_a_plan), (60.0, 1), (0.0, 1)):
        seen: Any = Seen()
        recorder, dense = Recorder(seen, RoundWindow()), SETTINGS.dense_rounds
        due = []
        for number in range(dense + 2 * num_due):
            recorder.record(RoundRecord(number, 4, 2, rtt_ms=rtt_ms))
            if recorder.is_plan_due:
                due.append(number)
                recorder.observe()
        assert due == [dense + num_due - 1, dense + 2 * num_due - 1]
        assert len(seen.records) == dense + 2 * num_due


@pytest.mark.parametrize(
    "rtt_ms, is_copied, may_stream, is_at_once",
    [
        (5.0, False, True, False),
        (60.0, False, False, True),
        (0.0, False, False, True),
        (5.0, True, True, True),
        (5.0, True, False, False),
    ],
)
def test_the_first_rounds_are_planned_each_and_short_ones_while_the_next_is_in_flight(
    rtt_ms: float, is_copied: bool, may_stream: bool, is_at_once: bool
) -> None:
    seen: Any = Seen()
    conditions = Conditions(is_copied=is_copied)
    modes = CHOOSABLE_MODES if may_stream else CHOOSABLE_MODES[:2]
    policy = ModePolicy(modes, conditions=conditions)
    recorder = Recorder(seen, RoundWindow(policy=policy), conditions)
    for number in range(1, SETTINGS.dense_rounds + 1):
        recorder.record(RoundRecord(number, 4, 2, rtt_ms=rtt_ms))
        assert len(seen.records) == number - (not is_at_once)
        assert recorder.has_unobserved == recorder.is_plan_due == (not is_at_once)
        recorder.observe()


def test_co_located_rounds_are_all_observed_at_once() -> None:
    seen: Any = Seen()
    recorder, num_rounds = Recorder(seen, RoundWindow()), 3 * SETTINGS.dense_rounds
    for number in range(num_rounds):
        recorder.streamed(GeneratedTokens(number, (1, 2), (Origin.ACCEPTED, Origin.BONUS), 2, 0), 2, 1)
    assert len(seen.records) == num_rounds and not recorder.has_unobserved
