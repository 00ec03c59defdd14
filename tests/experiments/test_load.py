"""The load generator against an in-process verifier: what it counts, and that it notices a wrong verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import FakeBackend
from support.processes.server import serving
from support.timed import timed

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.errors import LinkError, UsageError
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.load import command as load
from outrider.experiments.load.cloud import CloudStream
from outrider.experiments.load.command import LoadPlan, run_load
from outrider.experiments.load.drafting import DraftingStream
from outrider.experiments.load.record import record, record_traces
from outrider.experiments.load.recording import Recording
from outrider.experiments.load.report import LoadReport, Refusal, RoundSample, Tally, session_gaps_ms
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.verifier_metrics import MemoryPeaks

PROMPTS = [tuple(range(3, 15)), tuple(range(20, 29))]
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_k=20))


class KnowingDraft:
    """Drafts what the fake target would say, and something else at every third index of the text."""

    num_tokens = max_context = 1 << 30
    eos_token_ids: tuple[int, ...] = ()
    fingerprint = tokenizer_fingerprint = ""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> KnowingSequence:
        return KnowingSequence(self.backend, sampling)


class KnowingSequence:
    def __init__(self, backend: FakeBackend, sampling: SamplingParams) -> None:
        self.backend, self.sampling, self.text = backend, sampling, list[int]()

    def commit(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids

    def propose(self, num_draft_tokens: int, should_stop: object = None) -> Draft:
        text = list(self.text)
        for _ in range(num_draft_tokens):
            logits = self.backend.logits_after(text)[None]
            num_tokens = self.backend.num_tokens
            scores = process_logits(
                np, logits, self.sampling, prompt_ids=(), output_ids=text, num_tokens=num_tokens
            )
            token = int(choose(scores, self.sampling, [len(text)])[0])
            text.append((token + 1) % num_tokens if len(text) % 3 == 0 else token)
        drafted = tuple(text[len(self.text) :])
        return Draft(drafted, (0.5,) * len(drafted))

    def close(self) -> None: ...


@pytest.fixture
def server() -> Iterator[VerifierServer]:
    with serving(FakeBackend(num_tokens=64, max_context=256)) as server:
        yield server


def record_on(server: VerifierServer, num_sessions: int = 4) -> Recording:
    return record(
        address_of(server),
        KnowingDraft(FakeBackend(num_tokens=64, max_context=256)),  # type: ignore[arg-type]
        PROMPTS,
        num_sessions=num_sessions,
        num_rounds=5,
        samplings=SAMPLINGS,
    )


def address_of(server: VerifierServer) -> str:
    return f"127.0.0.1:{server.port}"


def with_wrong_correction(recording: Recording) -> Recording:
    """The third round of the first session expects another token than the target's."""
    first = recording.sessions[0]
    rounds = list(first.rounds)
    rounds[2] = replace(rounds[2], correction=(rounds[2].correction + 1) % 64)
    return replace(recording, sessions=(replace(first, rounds=tuple(rounds)), *recording.sessions[1:]))


def test_a_recording_has_accepted_and_rejected_drafts_and_survives_its_file(
    server: VerifierServer, tmp_path: Path
) -> None:
    recording = record_on(server)
    accepted = {r.accepted_len for session in recording.sessions for r in session.rounds}
    assert len(accepted) > 1 and len(recording.sessions) == 4
    assert Recording.load(recording.save(tmp_path / "drafts.jsonl")) == recording


def test_a_closed_loop_replays_sessions_over_and_over_and_every_verdict_is_right(
    server: VerifierServer,
) -> None:
    plan = LoadPlan(num_sessions=8, seconds=0.5, warmup_s=0.1, num_connections=2)
    report = asyncio.run(run_load(address_of(server), record_on(server), plan))
    assert report.is_right, report
    assert report.num_rounds > 8 * 5, "each session went round more than once"
    assert 0 < report.p50_ms <= report.p99_ms <= report.max_ms
    assert 0 < report.beyond_forward_ms < report.p99_ms


def test_think_time_bounds_the_rate_of_a_closed_loop(server: VerifierServer) -> None:
    plan = LoadPlan(num_sessions=2, think_s=0.05, seconds=0.6, warmup_s=0.1)
    report = asyncio.run(run_load(address_of(server), record_on(server), plan))
    assert 0 < report.rounds_per_s <= 2 / 0.05


@timed
def test_an_open_loop_sends_at_its_rate_whatever_comes_back(server: VerifierServer, is_timed: bool) -> None:
    plan = LoadPlan(num_sessions=16, rate=100.0, seconds=1.0, warmup_s=0.2, seed=3)
    report = asyncio.run(run_load(address_of(server), record_on(server), plan))
    assert report.is_right, report
    assert not is_timed or 60 < report.rounds_per_s < 140
    assert report.num_unsent == 0


def test_a_wrong_expectation_is_caught_and_the_session_goes_on(server: VerifierServer) -> None:
    planted = with_wrong_correction(record_on(server, num_sessions=2))
    plan = LoadPlan(num_sessions=2, seconds=0.4, warmup_s=0.1)
    report = asyncio.run(run_load(address_of(server), planted, plan))
    assert report.num_mismatches > 0 and not report.is_right
    assert "round 2" in report.mismatches[0]
    assert not report.errors, "a mismatch ends nothing"


def test_the_command_prints_its_report_and_fails_on_a_mismatch(
    server: VerifierServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = record_on(server, num_sessions=2)
    right = recording.save(tmp_path / "right.jsonl")
    wrong = with_wrong_correction(recording).save(tmp_path / "wrong.jsonl")
    flags = ["--address", address_of(server), "--sessions", "2", "--closed", "--seconds", "0.3"]
    flags += ["--warmup-s", "0.1", "--json"]
    assert load.main([*flags, "--recording", str(right)]) == 0
    assert json.loads(capsys.readouterr().out)["num_mismatches"] == 0
    assert load.main([*flags, "--recording", str(wrong)]) == 1
    assert json.loads(capsys.readouterr().out)["num_mismatches"] > 0


def test_a_recording_of_another_target_is_refused_by_name(server: VerifierServer) -> None:
    other = replace(record_on(server, num_sessions=1), target_fingerprint="abc123")
    with pytest.raises(UsageError, match=r"abc123.*load.record"):
        asyncio.run(run_load(address_of(server), other, LoadPlan(1, seconds=0.1)))


def test_rounds_refused_for_want_of_kv_are_counted_and_sent_again(server: VerifierServer) -> None:
    recording = record_on(server)
    with serving(FakeBackend(num_tokens=64, max_context=256, kv_tokens=70)) as small:
        plan = LoadPlan(num_sessions=4, seconds=1.0, warmup_s=0.0, deadline_s=5.0)
        report = asyncio.run(run_load(address_of(small), recording, plan))
    assert report.num_refused > 0 and report.num_refused_without_hint == 0
    assert report.num_rounds > 0 and report.is_right, report


def test_a_cloud_stream_writes_the_recorded_text(server: VerifierServer) -> None:
    session = record_on(server, num_sessions=2).sessions[1]

    async def decode() -> list[int]:
        connection = await connect(address_of(server))
        stream = CloudStream(connection, session.prompt_ids, session.sampling)
        await stream.run(len(session.output_ids))
        connection.close()
        return stream.token_ids

    assert tuple(asyncio.run(decode())) == session.output_ids


def test_nobody_listening_is_told_with_the_address() -> None:
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        asyncio.run(connect("127.0.0.1:1"))


def test_figures_count_what_ended_in_the_window_and_what_was_in_time() -> None:
    tally = Tally()
    for end_s, latency_s in ((0.5, 0.1), (1.0, 0.1), (1.5, 0.2), (2.5, 0.5), (3.0, 0.1)):
        tally.rounds.append(RoundSample(end_s, latency_s, 50_000_000, 0, 60_000_000, 2))
    tally.refusals.append(Refusal(2.0, 0.01, 0))
    report = tally.report(since_s=1.0, until_s=3.0, deadline_s=0.4)
    assert (report.num_rounds, report.rounds_per_s, report.goodput) == (3, 1.5, 1.0)
    assert (report.p50_ms, report.p99_ms, report.beyond_forward_ms) == (200.0, 500.0, 150.0)
    assert (report.num_refused, report.num_refused_without_hint, report.refused_p99_ms) == (1, 1, 10.0)


# ----------------------------------------------------------------------------------- texts and traces


class TracedDraft(KnowingDraft):
    signal_names: tuple[str, ...] = ()


def record_traces_on(server: VerifierServer, num_sessions: int = 3) -> Recording:
    return record_traces(
        address_of(server),
        TracedDraft(FakeBackend(num_tokens=64, max_context=256)),  # type: ignore[arg-type]
        PROMPTS,
        num_sessions=num_sessions,
        num_positions=40,
        samplings=SAMPLINGS,
    )


@pytest.fixture
def traces(server: VerifierServer) -> Recording:
    return record_traces_on(server)


def test_traces_survive_their_file(traces: Recording, tmp_path: Path) -> None:
    assert Recording.load(traces.save(tmp_path / "traces.jsonl")) == traces
    assert all(s.trace is not None and len(s.trace.runs) == 40 for s in traces.sessions)


@pytest.mark.parametrize(
    "ways",
    [
        {"depth_policy": "fixed", "num_speculative_tokens": 3},
        {"depth_policy": "fixed", "num_speculative_tokens": 60},
        {"depth_policy": "optimal"},
        {"depth_policy": "optimal", "mode": ExecutionMode.AUTO},
        {"mode": ExecutionMode.CLOUD_ONLY},
    ],
)
def test_a_traced_text_is_replayed_in_every_way_and_is_the_same(
    server: VerifierServer, traces: Recording, ways: dict[str, Any]
) -> None:
    for seconds in (0.5, 2.0, 8.0):  # until each session began again, on a busy machine too
        plan = LoadPlan(4, seconds=seconds, warmup_s=0.1, **ways)
        report = asyncio.run(run_load(address_of(server), traces, plan))
        assert report.is_right, report
        if report.num_tokens > 4 * 40:
            break
    assert report.num_tokens > 4 * 40
    drafted = {"fixed": ways.get("num_speculative_tokens"), "": 0}.get(ways.get("depth_policy", ""))
    assert drafted is None or report.mean_drafted == drafted
    if "mode" not in ways:
        assert report.tokens_per_round > 1
    elif ways["mode"] is ExecutionMode.CLOUD_ONLY:
        assert report.tokens_per_round == 1


def test_a_pass_after_the_first_begins_in_the_mode_that_is_best_by_what_was_found(
    server: VerifierServer, traces: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: dict[DraftingStream, list[bool]] = {}
    begin = DraftingStream._begin

    def note(stream: DraftingStream) -> None:
        begin(stream)
        passes.setdefault(stream, []).append(stream._conditions.are_known)

    monkeypatch.setattr(DraftingStream, "_begin", note)
    for seconds in (0.5, 2.0, 8.0):  # until a session began again, on a busy machine too
        plan = LoadPlan(2, seconds=seconds, warmup_s=0.1, depth_policy="optimal", mode=ExecutionMode.AUTO)
        passes.clear()
        asyncio.run(run_load(address_of(server), traces, plan))
        later = [is_known for of_stream in passes.values() for is_known in of_stream[1:]]
        if later:
            break
    assert later and all(later)
    assert not any(of_stream[0] for of_stream in passes.values()), "it is not open yet"


def test_a_text_unlike_the_recorded_one_is_noticed(server: VerifierServer, traces: Recording) -> None:
    first = traces.sessions[0]
    assert first.trace is not None
    text = list(first.trace.text)
    text[5] = (text[5] + 1) % 64
    wrong = replace(traces, sessions=(replace(first, trace=replace(first.trace, text=tuple(text))),))
    for ways in ({"mode": ExecutionMode.CLOUD_ONLY}, {"depth_policy": "fixed"}):
        plan = LoadPlan(1, seconds=0.3, warmup_s=0.0, **ways)  # type: ignore[arg-type]
        report = asyncio.run(run_load(address_of(server), wrong, plan))
        assert report.num_mismatches > 0 and not report.is_right


def test_what_a_recording_lacks_is_named(server: VerifierServer, traces: Recording) -> None:
    address = address_of(server)
    with pytest.raises(UsageError, match="--depth-policy fixed"):
        asyncio.run(run_load(address, traces, LoadPlan(1)))
    with pytest.raises(UsageError, match="--traces 128"):
        asyncio.run(run_load(address, record_on(server, 1), LoadPlan(1, depth_policy="optimal")))
    with pytest.raises(UsageError, match="--closed"):
        asyncio.run(run_load(address, traces, LoadPlan(1, rate=5.0, depth_policy="optimal")))


def test_gaps_are_between_a_sessions_own_answers_with_tokens() -> None:
    ends = [(1, 1.0, 2), (2, 1.1, 1), (1, 1.3, 1), (2, 1.5, 0), (2, 1.6, 3), (3, 1.7, 1)]
    rounds = [RoundSample(end_s, 0.1, 0, 0, 0, 1, session, tokens) for session, end_s, tokens in ends]
    assert sorted(session_gaps_ms(rounds)) == [pytest.approx(300), pytest.approx(500)]
    tally = Tally(rounds=rounds)
    report = tally.report(0.0, 2.0, 0.4)
    assert (report.num_tokens, report.tokens_per_s, report.worst_commit_gap_p95_ms) == (8, 4.0, 500.0)


def test_a_report_survives_json() -> None:
    for memory in (None, MemoryPeaks(512, 0.25, 7, 9)):
        report = replace(Tally().report(0.0, 1.0, 0.4), memory=memory)
        assert LoadReport.from_json(json.loads(json.dumps(asdict(report)))) == report
