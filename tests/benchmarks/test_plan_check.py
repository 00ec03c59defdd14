"""The check of the plan against real runs, here without a link: the whole chain, and what it says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.timed import timed

from benchmarks.controller.plan_check import Checked, plan_check
from outrider.common.errors import UsageError
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.synthetic.pair import SyntheticPair


class Straight:
    """A realisation of nothing: the verifier itself."""

    name = "straight"

    def refusals(self, profile: LinkProfile) -> list[str]:
        return ["it has no delay"] if profile.rtt_ms else []

    @contextlib.contextmanager
    def open(self, profile: LinkProfile, upstream: str) -> Iterator[Any]:
        yield StraightLink(upstream)


class StraightLink:
    def __init__(self, address: str) -> None:
        self.address = address

    def facts(self) -> dict[str, str]:
        return {"realisation": "straight"}


@timed
def test_every_case_is_run_and_held_against_its_prediction(is_timed: bool) -> None:
    pair = SyntheticPair((0.8,), draft_token_s=0.001, target_s=0.008)
    lines: list[str] = []
    realisation: Any = Straight()
    measures, details = plan_check(
        realisation, pair, rtts_ms=(0.0,), num_repeats=2, num_new=16, say=lines.append
    )
    names = [each["case"] for each in details["plan"]]
    assert len(lines) == len(names) == 6 and len(set(names)) == 6
    assert details["labels"] == list(pair.labels), "synthetic runs say so"
    error, model = measures
    assert (error.id, model.id) == ("exp.plan_error", "ctl.model") and "synthetic" in error.measure
    worst = max(abs(each["error"]) for each in details["plan"])
    assert error.value == pytest.approx(worst, abs=1e-3) and error.met is (error.value <= 0.1)
    if is_timed:  # on a busy machine a run is slower than its parts say, never much faster
        assert all(-0.5 < each["error"] < 0.3 for each in details["plan"]), details["plan"]
        assert model.value < 1.5


def test_a_link_that_cannot_be_made_is_said_before_anything_runs() -> None:
    realisation: Any = Straight()
    with pytest.raises(UsageError, match="straight cannot make the link rtt10: it has no delay"):
        plan_check(realisation, SyntheticPair(), rtts_ms=(0.0, 10.0))


def test_an_error_is_relative_to_what_was_measured() -> None:
    assert Checked("case", 10.0, measured_s=0.02, predicted_s=0.018, aa=1.0).error == pytest.approx(-0.1)
