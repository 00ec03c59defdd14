"""Cloud-only's text over links that break, lose and reorder; and what is counted as another text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support import texts_over_links as over_links
from support.texts_over_links import (
    HANDLINGS,
    LINKS,
    BadLink,
    Text,
    compare_texts,
    texts_over_links,
)

from outrider.common.errors import LinkError
from outrider.edge_client.core.stats import SessionStats
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.decoding import HungError

BROKEN = (
    BadLink(LinkProfile("resets", rtt_ms=4), resets=(7, 23)),
    BadLink(LinkProfile("outages", rtt_ms=4, outages=(Outage(0.1, 0.3),))),
)


def test_texts_over_links_that_break_or_go_dark_are_cloud_onlys() -> None:
    for found, _ in texts_over_links(create_realisation("proxy"), BROKEN, ("optimal",)).values():
        assert not found.wrong and found.num_texts == 2 * len(HANDLINGS)
        happened = found.happened
        assert happened["reconnects"] > 0 and happened["judged_ahead"] > 0 and happened["rounds"] > 20


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_over_links_that_lose_and_reorder_packets_are_cloud_onlys() -> None:
    tun = create_realisation("tun")
    if reasons := [reason for link in LINKS for reason in tun.refusals(link.profile)]:
        pytest.skip("; ".join(reasons))
    found = texts_over_links(tun, LINKS)
    assert not [line for each, _ in found.values() for line in each.wrong]
    assert found["lossy"][1]["packets_dropped"]["up"] > 0


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
    monkeypatch.setattr(over_links, "_is_tie", lambda *arguments: False)
    link: Any = SimpleNamespace(restart_outages=lambda: None)
    decoder: Any = Script(written)
    texts = [Text("a prompt", 0.8, 1, (5, 6, 7))]
    found = compare_texts(link, LINKS[0], decoder, texts, ("optimal",))
    assert found.num_texts == len(HANDLINGS)
    assert len(found.wrong) == (0 if what is None else len(HANDLINGS))
    assert all(line.endswith(str(what)) for line in found.wrong)
