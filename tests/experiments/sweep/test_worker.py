"""An edge's process: what its jobs share and what they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.errors import LinkError
from outrider.common.types import FinishReason, Origin
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.core.stats import RoundOutcome, RoundRecord, SessionStats
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.experiments.sweep.observing import Errand, observe
from outrider.experiments.sweep.worker import _Edges


def test_requests_share_what_texts_taught_only_under_the_same_name() -> None:
    edges, config = _Edges(), run_config(mode="cloud-only")  # which loads no draft
    first, again = (edges.get(config, None, "one").acceptance_prior for _ in range(2))
    assert first is again
    assert edges.get(config, None, "other").acceptance_prior is not first
    alone = edges.get(config, None).acceptance_prior
    assert alone is not first and edges.get(config, None).acceptance_prior is not alone


def test_a_draft_of_copies_knows_no_text_of_another_request() -> None:
    edges, config = _Edges(), run_config(draft_strategy="suffix")
    text = [*range(100, 140)]

    def known(prior: str = "") -> int:
        """Says how many contexts a request begins with; then it ends, with a text."""
        draft = edges.get(config, None, prior).draft
        assert isinstance(draft, SuffixModel)
        number = len(draft.others())
        draft.remember(text, 0)
        return number

    assert known() == 0 and known() == 0
    assert known("one") == 0 and known("one") > 0, "those of one name do"


class FailingSession:
    """Writes a token a second in a round each, of which the second had guessed wrong, then loses its link."""

    def __init__(self) -> None:
        self.stats = SessionStats()

    @property
    def result(self) -> SessionResult:
        number = len(self.stats.token_times_ns)
        origins = (Origin.ACCEPTED,) * number
        return SessionResult(
            "", (7,) * number, origins, (True,) * number, FinishReason.ERROR, None, self.stats
        )

    def generate(self) -> Iterator[TokenEvent]:
        records = [
            RoundRecord(1, 1, 1),
            RoundRecord(2, 1, outcome=RoundOutcome.DISCARDED),
            RoundRecord(3, 1, 1),
        ]
        for index, record in enumerate(records):
            self.stats.rounds.append(record)
            if record.is_answered:
                time_ns = (index + 1) * 10**9
                self.stats.token_times_ns.append(time_ns)
                yield TokenEvent(len(self.stats.token_times_ns) - 1, 7, "", Origin.ACCEPTED, True, time_ns)
        self.stats.rounds.append(RoundRecord(0, 1, outcome=RoundOutcome.TIMED_OUT))
        raise LinkError("it is gone")


def test_a_verifier_that_drafts_for_several_sessions_counts_for_each_by_its_share() -> None:
    session = FailingSession()
    session.stats.rounds.append(RoundRecord(4, 2, 3, draft_ms=12.0, batch_size=4))
    errand = Errand("c", "c/0/0/p", 0, 0, "p", 1, 0.0)
    request, _ = observe(cast(EdgeSession, session), errand, 3, SYSTEM_CLOCK)
    assert request.cloud_draft_s == 0.003


def test_a_request_that_fails_keeps_its_times_and_only_what_timed_out_is_a_fallback() -> None:
    errand = Errand("c", "c/0/0/p", 0, 0, "p", 1, 0.0)
    request, rounds = observe(cast(EdgeSession, FailingSession()), errand, 3, SYSTEM_CLOCK)
    assert request.error == "it is gone" and request.commit_times_ms == [1000.0, 3000.0]
    assert [row.at_ms for row in rounds] == [1000.0, 3000.0, 3000.0, 3000.0]
    assert [row.fallback for row in rounds] == [False, False, False, True]
