"""How rounds end, as the daemon's metrics count them."""

from __future__ import annotations

from support.edge.edge_fakes import FakeDraft, FakeVerifier, Silent, make_session
from support.edge.engine_link import Chances, EngineLink
from test_pipelined_rounds import decode, make_backend

from outrider.edge_client.core.stats import RoundOutcome, RoundRecord
from outrider.edge_client.daemon.metrics import DaemonMetrics, DaemonState
from outrider.edge_client.session.session import SessionResult


def metrics_of(result: SessionResult) -> DaemonMetrics:
    metrics = DaemonMetrics(lambda: DaemonState("outrider", 0, 0, 1, 0, 0, None))
    metrics.observe(result, "speculative", "coupled", arrived_s=0.0, num_reused_tokens=0, num_read_tokens=3)
    return metrics


def counted(result: SessionResult) -> dict[str, float]:
    """The rounds of a result by outcome, as a scrape shows them."""
    registry = metrics_of(result).registry
    return {
        outcome: number
        for outcome in RoundOutcome
        if (number := registry.get_sample_value("outrider_edge_rounds_total", {"outcome": outcome}))
    }


def test_the_acceptance_rate_is_of_judged_tokens() -> None:
    rounds = [
        RoundRecord(1, 16, 2),  # a chain of 16, whose third token was rejected: 13 were not judged
        RoundRecord(2, 4, 4),
        RoundRecord(3, 48, 3, main_path=(1, 5)),  # a tree that went on by another path
        RoundRecord(4, 8, outcome=RoundOutcome.TIMED_OUT),
    ]
    result = decode(EngineLink(make_backend()))
    result.stats.rounds[:] = rounds
    metrics = metrics_of(result)
    of_method = {"method": "coupled", "exact": "yes"}
    names = ("outrider_edge_draft_tokens_total", "outrider_edge_accepted_tokens_total")
    assert [metrics.registry.get_sample_value(name, of_method) for name in names] == [68, 9]
    judged = [
        metrics.registry.get_sample_value("outrider_edge_judged_tokens_total", {**of_method, "result": each})
        for each in ("accepted", "rejected")
    ]
    assert judged == [2 + 4 + 1, 2]


def test_a_round_that_the_edge_discarded_is_not_one_without_an_answer() -> None:
    result = decode(EngineLink(make_backend(), Chances(ripe=0.0)), accuracy=0.5, window=4)
    found, stats = counted(result), result.stats
    assert stats.num_timeouts == 0 < stats.num_stale_rounds
    num_answered = sum(each.is_answered for each in stats.rounds)
    assert found == {"answered": num_answered, "discarded": stats.num_stale_rounds}


def test_a_round_whose_deadline_passed_timed_out() -> None:
    session = make_session(FakeVerifier(script={("verify", 2): Silent()}), FakeDraft())
    list(session.generate())
    found = counted(session.result)
    assert found["timed_out"] == session.result.stats.num_timeouts == 1 and "discarded" not in found
