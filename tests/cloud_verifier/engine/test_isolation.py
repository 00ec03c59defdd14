"""What fails in one session ends that session alone: others of the same step get their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.fakes import FakeBackend, FakeSequence
from test_colocated_drafts import CoLocated, KnownDraft, expected_text, make_request
from test_engine import GREEDY, SAMPLED, Harness

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.engine import finish
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.common.types import (
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

BAD, GOOD, LATER = (bytes([name]) * 16 for name in (1, 2, 3))


class Broken(Exception):
    """Raised by the fault that a test plants."""


def two_sessions(harness: Harness) -> tuple[Opened, Opened]:
    _, bad = harness.open(1, ignore_eos=True)
    _, good = harness.open(2, (8, 9), ignore_eos=True)
    return bad, good


def code_of(reply: SessionResponse) -> RoundErrorCode:
    assert isinstance(reply, RoundError), reply
    return reply.code


def settle_after_fault(harness: Harness) -> None:
    """Takes steps until all is answered, and checks that the engine and its pool are whole."""
    harness.settle()
    assert not harness.engine.num_jobs


def check_ended(harness: Harness, opened: Opened) -> None:
    """The failed session is gone, and another can be opened under its id."""
    error = harness.ask(BAD, VerifyRequest(9, opened.position, opened.hash))
    assert code_of(error) is RoundErrorCode.UNKNOWN_SESSION
    harness.open(1)


def break_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    make = finish._make_step_round

    def make_or_fail(work: Work) -> object:
        if work.session.opening.session_id == BAD:
            raise Broken
        return make(work)

    monkeypatch.setattr(finish, "_make_step_round", make_or_fail)


def break_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    process = finish.HostRows

    def process_or_fail(logits: Logits, step_round: finish.StepRound, *rest: object) -> object:
        if step_round.prompt_ids or step_round.position == 4:
            raise Broken
        return process(logits, step_round, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "HostRows", process_or_fail)


def break_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = finish._judge

    def judge_or_fail(work: Work, rows: object) -> object:
        if work.session.opening.session_id == BAD:
            raise Broken
        return judge(work, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "_judge", judge_or_fail)


@pytest.mark.parametrize("plant", [break_rows, break_penalties, break_judging])
def test_rows_that_cannot_be_processed_end_their_session_alone(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    bad, good = two_sessions(harness)
    with monkeypatch.context() as planted:
        plant(planted)
        theirs = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash, draft_tokens=(3,)))
        ours = harness.submit(GOOD, VerifyRequest(1, good.position, good.hash, draft_tokens=(3, 4)))
        settle_after_fault(harness)
    assert [code_of(reply) for reply in theirs] == [RoundErrorCode.INTERNAL]
    assert isinstance(ours[-1], Verdict)
    assert [good.first_token, ours[-1].correction][:1] == harness.reference((8, 9), GREEDY, 1)
    check_ended(harness, bad)


class NanBackend(FakeBackend):
    """Gives NaN for one sequence's rows."""

    nan_after: int | None = None  # the last token of the sequence whose rows are NaN

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        logits = super().forward(items)
        row = 0
        for item in items:
            assert isinstance(item.sequence, FakeSequence)
            if self.nan_after in item.sequence.tokens:
                logits[row : row + item.num_logit_rows] = np.nan
            row += item.num_logit_rows
        return logits


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(top_k=5, repetition_penalty=1.2)], ids=str
)
def test_rows_that_are_not_numbers_end_their_session_alone(sampling: SamplingParams) -> None:
    backend = NanBackend()
    harness, twin = Harness(backend), Harness()
    for each in (harness, twin):
        each.open(1, (5, 6, 7), sampling, ignore_eos=True)
        _, good = each.open(2, (8, 9), sampling, ignore_eos=True)
    bad = harness.engine.sessions.get("default", BAD).opening_reply
    backend.nan_after = 5
    theirs = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash, draft_tokens=(3,)))
    round_ = VerifyRequest(1, good.position, good.hash, draft_tokens=(3, 4))
    ours = harness.submit(GOOD, round_)
    settle_after_fault(harness)
    assert [code_of(reply) for reply in theirs] == [RoundErrorCode.INTERNAL]
    (expected,) = [twin.ask(GOOD, round_)]
    assert (ours[0].accepted_len, ours[0].hash) == (expected.accepted_len, expected.hash)
    backend.nan_after = None
    check_ended(harness, bad)


def test_a_failed_session_leaves_nothing_in_the_prefix_cache() -> None:
    backend = NanBackend()
    harness = Harness(backend)
    _, opened = harness.open(1, (5, 6, 7, 8), ignore_eos=True)
    backend.nan_after = 5
    harness.ask(BAD, VerifyRequest(1, opened.position, opened.hash))
    backend.nan_after = None
    num_fed = backend.num_query_rows
    harness.open(2, (5, 6, 7, 8))
    assert backend.num_query_rows == num_fed + 4, "KV of a session that failed was used again"


def test_a_round_that_fails_leaves_no_waiting_round_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    bad, _ = two_sessions(harness)
    reopening = OpenRequest(BAD, (5, 6), 2, GREEDY, round_id=4)
    with monkeypatch.context() as planted:
        break_judging(planted)
        replies = [
            harness.submit(BAD, VerifyRequest(round_id, bad.position, bad.hash)) for round_id in (1, 2, 3)
        ]
        harness.engine.step()
    opening = harness.submit(BAD, reopening)
    settle_after_fault(harness)
    assert [[(r.round_id, code_of(r)) for r in each] for each in replies] == [
        [(1, RoundErrorCode.INTERNAL)],
        [(2, RoundErrorCode.UNKNOWN_SESSION)],
        [(3, RoundErrorCode.UNKNOWN_SESSION)],
    ]
    assert isinstance(opening[-1], Opened)


def test_an_opening_that_waits_for_a_round_that_fails_opens_the_session_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    bad, _ = two_sessions(harness)
    with monkeypatch.context() as planted:
        break_rows(planted)
        harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash))
        opening = harness.submit(BAD, OpenRequest(BAD, (5, 6), 2, GREEDY, round_id=2))
        harness.engine.step()
    settle_after_fault(harness)
    assert isinstance(opening[-1], Opened)


def test_a_failed_forward_answers_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    bad, good = two_sessions(harness)
    harness.backend.fail_next = Broken()
    replies = [
        *(harness.submit(BAD, VerifyRequest(n, bad.position, bad.hash)) for n in (1, 2)),
        *(harness.submit(GOOD, VerifyRequest(n, good.position, good.hash)) for n in (1, 2)),
    ]
    settle_after_fault(harness)
    assert [[code_of(r) for r in each] for each in replies] == [
        [RoundErrorCode.INTERNAL],
        [RoundErrorCode.UNKNOWN_SESSION],
    ] * 2


def test_a_job_that_cannot_be_admitted_ends_its_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two waiting rounds is released by a round of the same step that others get verdicts of."""
    harness = Harness()
    bad, good = two_sessions(harness)
    new_sequence = harness.backend.new_sequence

    def new_or_fail(tenant: str = "", token_ids: Sequence[int] = ()) -> FakeSequence:
        if list(token_ids[:2]) == [9, 9]:
            raise Broken
        return new_sequence(tenant, token_ids)

    monkeypatch.setattr(harness.backend, "new_sequence", new_or_fail)
    first = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash))
    opening = harness.submit(BAD, OpenRequest(BAD, (9, 9), 2, GREEDY, round_id=2))
    last = harness.submit(BAD, VerifyRequest(3, bad.position, bad.hash))
    ours = harness.submit(GOOD, VerifyRequest(1, good.position, good.hash))
    settle_after_fault(harness)
    assert isinstance(first[0], Verdict) and isinstance(ours[0], Verdict)
    waits, error = opening
    assert waits == Progress(2, 0, 2) and code_of(error) is RoundErrorCode.INTERNAL
    assert [code_of(reply) for reply in last] == [RoundErrorCode.UNKNOWN_SESSION]
    check_ended(harness, bad)


def test_an_expired_round_that_cannot_be_refused_ends_its_session_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    bad, good = two_sessions(harness)
    undo = Work.undo

    def undo_or_fail(work: Work) -> None:
        if work.session.opening.session_id == BAD:
            raise Broken
        undo(work)

    monkeypatch.setattr(Work, "undo", undo_or_fail)
    theirs = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash, deadline_ms=1))
    ours = harness.submit(GOOD, VerifyRequest(1, good.position, good.hash))
    harness.clock.now_s += 1.0
    settle_after_fault(harness)
    assert [code_of(reply) for reply in theirs] == [RoundErrorCode.INTERNAL]
    assert isinstance(ours[0], Verdict)
    check_ended(harness, bad)


@pytest.mark.parametrize("is_alone", [False, True])
def test_tokens_that_cannot_be_fed_end_their_session_alone(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    bad, good = two_sessions(harness)
    feed, num_forwards = Work.forward_item, harness.backend.num_forwards

    def feed_or_fail(work: Work, num_tokens: int, *, is_final: bool) -> ForwardItem:
        if work.session.opening.session_id == BAD:
            raise Broken
        return feed(work, num_tokens, is_final=is_final)

    with monkeypatch.context() as planted:
        planted.setattr(Work, "forward_item", feed_or_fail)
        theirs = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash, draft_tokens=(3,)))
        behind = harness.submit(BAD, VerifyRequest(2, bad.position, bad.hash))
        round_ = VerifyRequest(1, good.position, good.hash, draft_tokens=(3, 4))
        ours = [] if is_alone else harness.submit(GOOD, round_)
        settle_after_fault(harness)
    assert [code_of(reply) for reply in theirs] == [RoundErrorCode.INTERNAL]
    assert [code_of(reply) for reply in behind] == [RoundErrorCode.UNKNOWN_SESSION]
    assert [type(reply) for reply in ours] == [Verdict] * (not is_alone)
    assert harness.backend.num_forwards == num_forwards + (not is_alone), "nothing is no forward"
    assert not harness.engine.observer.num_failed_steps
    check_ended(harness, bad)


class ReadingDraft(KnownDraft):
    """Is a head that reads the target's states."""

    name, reads_all = "head", True

    def last_features(self, rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, 4)


def test_features_that_cannot_be_kept_end_their_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head = ReadingDraft(expected_text(GREEDY, 20))
    harness = Harness(drafter=CoLocatedDrafter(None, [head], clock=head.clock))
    _, bad = harness.open(1, ignore_eos=True, draft_source="head")
    _, good = harness.open(2, (8, 9), ignore_eos=True, draft_source="head")
    failing, append = harness.engine.sessions.get("default", BAD).features, FeatureLog.append

    def append_or_fail(log: FeatureLog, start: int, rows: torch.Tensor) -> None:
        if log is failing:
            raise Broken
        append(log, start, rows)

    with monkeypatch.context() as planted:
        planted.setattr(FeatureLog, "append", append_or_fail)
        theirs = harness.submit(BAD, VerifyRequest(1, bad.position, bad.hash, draft_tokens=(3,)))
        ours = harness.submit(GOOD, VerifyRequest(1, good.position, good.hash, draft_tokens=(3, 4)))
        settle_after_fault(harness)
    assert [code_of(reply) for reply in theirs] == [RoundErrorCode.INTERNAL]
    assert isinstance(ours[0], Verdict) and not harness.engine.observer.num_failed_steps
    check_ended(harness, bad)


class BreakingDraft(KnownDraft):
    """Has no sequence for one seed, or fails to close it."""

    fails_to_open, fails_to_close = False, False

    def sequence(self, sampling: SamplingParams, **fields: object) -> object:  # type: ignore[override]
        sequence = super().sequence(sampling)
        if sampling.seed == 13:
            if self.fails_to_open:
                self.num_open -= 1
                raise Broken
            if self.fails_to_close:
                close = sequence.close

                def close_and_fail() -> None:
                    close()
                    raise Broken

                sequence.close = close_and_fail  # type: ignore[method-assign]
        return sequence


@pytest.mark.parametrize("fails_to", ["open", "close"])
def test_a_draft_that_breaks_for_one_generation_ends_no_other(fails_to: str) -> None:
    text = expected_text(GREEDY, 20)
    draft = BreakingDraft(text)
    setattr(draft, f"fails_to_{fails_to}", True)
    harness = CoLocated(draft)
    _, bad = harness.open(1, (5, 6, 7), SamplingParams(temperature=0.0, seed=13), ignore_eos=True)
    _, good = harness.open(2, (5, 6, 7), GREEDY, ignore_eos=True)
    _, later = harness.open(3, (8, 9), GREEDY, ignore_eos=True)
    theirs = harness.submit(BAD, make_request(bad.position, bad.hash, 8))
    ours = harness.submit(GOOD, make_request(good.position, good.hash, 15))
    verdict = harness.submit(LATER, VerifyRequest(1, later.position, later.hash))
    settle_after_fault(harness)
    harness.engine.step()
    assert isinstance(theirs[-1], RoundError if fails_to == "open" else GeneratedTokens)
    assert isinstance(ours[-1], GeneratedTokens) and ours[-1].is_last
    assert [t for r in ours for t in r.token_ids] == text[4:19]
    assert isinstance(verdict[0], Verdict)
    assert draft.num_open == 0


# --------------------------------------------------------------------------------- every request has its end


def test_a_generation_with_a_request_behind_it_ends_with_its_last_message() -> None:
    harness = Harness()
    _, opened = harness.open(1, ignore_eos=True)
    first = harness.submit(BAD, VerifyRequest(1, opened.position, opened.hash))
    stream = harness.submit(BAD, GenerateRequest(2, 3, opened_hash(harness), max_new_tokens=9))
    behind = harness.submit(BAD, VerifyRequest(3, 3, opened_hash(harness)))
    settle_after_fault(harness)
    assert isinstance(first[0], Verdict) and len(behind) == 1
    assert isinstance(stream[-1], GeneratedTokens) and stream[-1].is_last
    assert [reply.is_last for reply in stream].count(True) == 1


def opened_hash(harness: Harness) -> int:
    return harness.engine.sessions.get("default", BAD).chain.hash_at(3)


def test_a_close_answers_the_rounds_that_wait_by_their_ids() -> None:
    harness = Harness()
    _, opened = harness.open(1, ignore_eos=True)
    rounds = [harness.submit(BAD, VerifyRequest(n, opened.position, opened.hash)) for n in (1, 2, 3)]
    closed = harness.submit(BAD, CloseRequest())
    settle_after_fault(harness)
    assert [[(r.round_id, code_of(r)) for r in each] for each in rounds] == [
        [(n, RoundErrorCode.CANCELLED)] for n in (1, 2, 3)
    ]
    assert closed[0].was_open
