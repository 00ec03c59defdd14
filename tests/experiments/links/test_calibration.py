"""Calibration: what is measured, how it is judged, and that the proxy and the simulated link agree."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.timed import timed

from outrider.common.errors import UsageError
from outrider.experiments.links.calibrate import exp_links, run
from outrider.experiments.links.calibration.measure import (
    Calibration,
    Plan,
    Point,
    calibrate,
    num_points,
    short_calibration,
)


def point(realisation: str, measured: float, nominal: float = 10.0) -> Point:
    return Point(realisation, "rtt", nominal, 200, nominal, measured, measured, measured, 1.0, "ms")


def test_the_worst_deviation_counts_from_nominal_and_between_realisations() -> None:
    found = Calibration([point("proxy", 10.6), point("tun", 9.8), point("tun", 40.1, 40.0)], {}, {})
    assert found.worst == point("proxy", 10.6)
    assert found.worst_share == pytest.approx(0.8), "proxy and tun are 0.8 ms apart"
    measure, details = exp_links(found)
    assert (measure.id, measure.met) == ("exp.links", True)
    assert details["worst_pair"] == "proxy and tun, rtt at 10 ms, 200 B"
    assert json.dumps(details)


@timed
def test_proxy_and_simulated_link_are_measured_at_every_point(is_timed: bool) -> None:
    plan = Plan(rtts_ms=(10.0,), num_trips=10, has_jitter=False, throughput_s=0.4)
    found = calibrate(["simulated", "proxy"], plan)
    assert len(found.points) == 2 * num_points(plan)
    simulated = [each for each in found.points if each.realisation == "simulated"]
    assert all(each.measured == pytest.approx(each.nominal) for each in simulated)
    assert {"kernel", "congestion_control", "client_congestion_control"} <= set(found.facts["proxy"])
    throughput = {each.realisation: each.measured for each in found.points if each.what == "throughput"}
    assert throughput["simulated"] == pytest.approx(19.3, rel=0.1)
    assert throughput["proxy"] == pytest.approx(19.3, rel=0.1 if is_timed else 0.9)


def test_what_cannot_be_measured_here_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "outrider.experiments.links.tun.realisation.Tun.refusals", lambda self, profile: ["no root"]
    )
    assert calibrate(["tun"], Plan()).refused == {"tun": ["no root"]}
    with pytest.raises(UsageError, match="did you mean"):
        calibrate(["prox"], Plan())


def test_where_nothing_can_be_measured_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "outrider.experiments.links.tun.realisation.Tun.refusals", lambda self, profile: ["no root"]
    )
    with pytest.raises(UsageError, match="--realisation tun: none of them works here"):
        run(["tun"], Plan())


def test_a_short_calibration_goes_with_a_result() -> None:
    record = short_calibration("proxy", rtts_ms=(5.0,))
    assert record["facts"]["proxy"]["realisation"] == "proxy"
    assert [each["rtt_ms"] for each in record["points"]] == [5.0] * 3
    assert json.dumps(record)


def test_the_command_answers_for_help_and_a_wrong_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.experiments.links.calibrate", "--realisation", "tunn"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "did you mean tun" in done.stderr
