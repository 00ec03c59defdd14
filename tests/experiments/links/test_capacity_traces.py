"""Capacity traces: what is read, what is refused, and when packets leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.link_traces import MODELS, trace_lines

from outrider.common.errors import UsageError
from outrider.experiments.links.packets import TraceRate
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.traces import OWN_TRACES, CapacityTrace, load_trace, parse_trace
from outrider.experiments.links.virtual import VirtualLink


def departures_by_hand(times_ms: list[int], packets: list[tuple[float, int]]) -> list[float]:
    """Opportunity after opportunity, byte after byte."""
    number, left, found = 0, 1500, []

    def time_s(number: int) -> float:
        return (number // len(times_ms) * times_ms[-1] + times_ms[number % len(times_ms)]) / 1000

    for now_s, num_bytes in packets:
        while num_bytes > 0:
            if time_s(number) < now_s - 1e-12 or left == 0:
                number, left = number + 1, 1500
                continue
            taken = min(left, num_bytes)
            left -= taken
            num_bytes -= taken
        found.append(time_s(number))
    return found


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(lambda times: max(times) > 0),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5000)), min_size=1, max_size=15),
)
def test_packets_leave_when_opportunities_taken_one_by_one_say(
    times_ms: list[int], packets: list[tuple[int, int]]
) -> None:
    times_ms.sort()
    rate, now_ms, sent = TraceRate(CapacityTrace(tuple(times_ms))), 0, []
    for gap_ms, num_bytes in packets:
        now_ms += gap_ms
        sent.append((now_ms / 1000, num_bytes))
    found = [rate.depart(*packet) for packet in sent]
    assert found == pytest.approx(departures_by_hand(times_ms, sent), abs=1e-9)


def test_a_trace_of_one_line_is_a_packet_a_millisecond() -> None:
    trace = parse_trace(["1"], "here")
    assert trace.mean_mbit == 12
    rate = TraceRate(trace)
    assert [rate.depart(0.0, 1500) for _ in range(3)] == pytest.approx([0.001, 0.002, 0.003])
    assert rate.depart(1.0005, 100) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "needs a delivery opportunity"),
        (["0"], "needs a delivery opportunity"),
        (["5", "x"], "line 2: 'x' is not a time"),
        (["5", "-1"], "line 2: '-1' is not a time"),
        (["5", "", "# note", "4"], "line 4: 4 ms comes after 5 ms"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_trace(lines, "here")
    assert message in str(caught.value)


def test_a_missing_trace_names_ours(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lte-walk-down\.trace"):
        VirtualLink(LinkProfile(up_trace=str(tmp_path / "none.trace")))


def test_a_profile_takes_our_traces_by_their_bare_name() -> None:
    link = VirtualLink(LinkProfile(rtt_ms=20, up_trace="lte-walk-up.trace", down_trace="leo-up.trace"))
    assert link.up.deliver(0.0, 15_000) > 0.01 + 15_000 * 8 / 20e6


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_our_traces_are_what_their_models_make(model: object) -> None:
    name = model.name  # type: ignore[attr-defined]
    assert (OWN_TRACES / name).read_text() == "\n".join(trace_lines(model)) + "\n"  # type: ignore[arg-type]
    trace = load_trace(name)
    assert trace.period_ms == model.seconds * 1000  # type: ignore[attr-defined]
    assert 0.5 < trace.mean_mbit / model.mean_mbit < 2  # type: ignore[attr-defined]
