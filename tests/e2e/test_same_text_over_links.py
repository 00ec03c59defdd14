"""`ctl.same_text`, small: cloud-only's text over links that break; and what is counted as none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.controller import same_text as bench_same_text
from benchmarks.controller.same_text import (
    HANDLINGS,
    LINKS,
    BadLink,
    Text,
    compare_texts,
    measure_same_text,
)
from outrider.common.errors import LinkError
from outrider.edge_client.core.stats import SessionStats
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.watched import HungError

BROKEN = (
    BadLink(LinkProfile("resets", rtt_ms=4), resets=(7, 23)),
    BadLink(LinkProfile("outages", rtt_ms=4, outages=(Outage(0.1, 0.3),))),
)


def test_texts_over_links_that_break_or_go_dark_are_cloud_onlys() -> None:
    (measure,), details = measure_same_text("proxy", is_quick=True, links=BROKEN, policies=("optimal",))
    found = details["same_text"]["links"]
    assert (measure.id, measure.value, measure.met) == ("ctl.same_text", 0, True), found
    assert all(each["texts"] == 2 * len(HANDLINGS) for each in found.values())
    for each in found.values():
        happened = each["happened"]
        assert happened["reconnects"] > 0 and happened["judged_ahead"] > 0 and happened["rounds"] > 50


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_over_links_that_lose_and_reorder_packets_are_cloud_onlys() -> None:
    bad = [link for link in LINKS if link.profile.name in ("lossy", "reordering")]
    for link in bad:
        if reasons := create_realisation("tun").refusals(link.profile):
            pytest.skip("; ".join(reasons))
    (measure,), details = measure_same_text("tun", is_quick=True, links=bad)
    assert measure.met, details["same_text"]["links"]
    assert details["same_text"]["links"]["lossy"]["link"]["packets_dropped"]["up"] > 0


class Script:
    """A decoder that answers every text the same way."""

    def __init__(self, written: tuple[int, ...] | Exception) -> None:
        self._written = written

    def decode(self, *arguments: object, **named: object) -> SimpleNamespace:
        if isinstance(self._written, Exception):
            raise self._written
        return SimpleNamespace(token_ids=self._written, stats=SessionStats())


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ((5, 6, 7), None),
        ((5, 6), "differs from token 2 on"),
        ((5, 6, 8), "differs from token 2 on"),
        (LinkError("gone"), "gone"),
        (HungError("a session was at work"), "a session was at work"),
    ],
)
def test_what_differs_fails_or_hangs_is_counted(
    monkeypatch: pytest.MonkeyPatch, written: tuple[int, ...] | Exception, what: str | None
) -> None:
    monkeypatch.setattr(bench_same_text, "_is_tie", lambda *arguments: False)
    link: Any = SimpleNamespace(restart_outages=lambda: None)
    decoder: Any = Script(written)
    texts = [Text("a prompt", 0.8, 1, (5, 6, 7))]
    found = compare_texts(link, LINKS[0], decoder, texts, ("optimal",))
    assert found.num_texts == len(HANDLINGS)
    assert len(found.wrong) == (0 if what is None else len(HANDLINGS))
    assert all(line.endswith(str(what)) for line in found.wrong)
