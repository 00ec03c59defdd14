"""The command that opens a link by hand: what it is asked to change is changed, or refused by name."""

from __future__ import annotations

import sys

import pytest

from outrider.common.errors import UsageError
from outrider.experiments.links.emulate import _chosen_profile, _parse_arguments


def test_every_change_counts_however_often_the_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["emulate", "--set", "rtt_ms=80", "up_mbit=5", "--set", "loss=0.01"])
    arguments = _parse_arguments()
    profile = _chosen_profile(arguments.profile, arguments.set)
    assert (profile.rtt_ms, profile.up_mbit, profile.loss) == (80, 5, 0.01)
    assert profile.down_mbit == 35, "of 4g, the default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss", "--set loss: want FIELD=VALUE"),
        ("outages=[", r"--set outages=\[: the value is not YAML"),
        ("rtt=80", "unknown field rtt"),
    ],
)
def test_a_change_that_says_nothing_is_refused(change: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _chosen_profile("4g", [change])
