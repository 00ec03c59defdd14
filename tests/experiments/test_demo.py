"""What the demo says of its runs."""

from __future__ import annotations

import pytest

from outrider.common.types import FinishReason, Origin
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord, SessionStats
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.demo import (
    EXACT,
    UNVERIFIED,
    Run,
    calls_per_token,
    ms_per_token,
    print_table,
    read_table,
)

WAYS = (*EXACT, *UNVERIFIED)


def make_run(mode: str, token_ms: int) -> Run:
    """Returns a run of eight tokens: two rounds of three accepted and a bonus, or the target's own."""
    stats = SessionStats(token_times_ns=[n * token_ms * 1_000_000 for n in range(8)])
    origins = (Origin.TARGET,) * 8
    if mode == ExecutionMode.SPECULATIVE:
        origins = (*(Origin.ACCEPTED,) * 3, Origin.BONUS) * 2
        stats.rounds = [RoundRecord(i, num_draft_tokens=3, num_accepted_tokens=3) for i in range(2)]
    result = SessionResult("", tuple(range(8)), origins, (True,) * 8, FinishReason.LENGTH, None, stats)
    return Run(mode, 0.8, result)


@pytest.mark.parametrize(
    ("here_ms", "words"), [(35, "2.0 times as fast as the target alone"), (140, "2.0 times as slow as")]
)
def test_the_sentence_reads_the_table(here_ms: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = dict(zip(WAYS, (here_ms, 70, 25, 1), strict=True))
    runs = [make_run(mode, ms) for mode, ms in times.items()]
    assert ms_per_token(runs[:1]) == pytest.approx(here_ms) and calls_per_token(runs[:1]) == 0.25
    said = read_table(runs)
    assert words in said and "one call writes 4.0 tokens" in said and "takes 25 ms" in said
    print_table("over a link", runs)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(WAYS)
    assert lines[2].split()[2:5] == [f"{here_ms}.0", "100%", "0.25"]
