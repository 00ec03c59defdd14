"""Rounds, where a text ends, and what is recorded: against a scripted verifier."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence

import pytest
from support.edge.edge_fakes import (
    EOS,
    PROMPT,
    TARGET,
    Action,
    FakeDraft,
    FakeSequence,
    FakeVerifier,
    Silent,
    make_model,
    make_session,
)

from outrider.common.alignment import TokenChain
from outrider.common.errors import UsageError
from outrider.common.types import (
    CloseRequest,
    FinishReason,
    GenerateRequest,
    Limits,
    OpenRequest,
    Origin,
    VerifyRequest,
)
from outrider.edge_client.core.events import EndEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.simulator.world.standins import VirtualClock

NEW = TARGET[2:]


def test_accepted_corrected_and_bonus_tokens_are_told_apart() -> None:
    draft = FakeDraft([*TARGET[:5], 99, *TARGET[6:]])  # wrong at position 5
    session = make_session(FakeVerifier(), draft, depth=3, max_new_tokens=8)
    events = list(session.generate())
    result = session.result
    assert result.token_ids == NEW[:8]
    assert [str(o) for o in result.origins] == [
        "target",  # the opening, position 2
        "accepted",  # 3
        "accepted",  # 4
        "correction",  # 5
        "accepted",
        "accepted",
        "accepted",
        "bonus",
    ]
    assert result.num_unverified_tokens == 0
    assert [e.index for e in events if isinstance(e, TokenEvent)] == list(range(8))
    assert isinstance(events[-1], EndEvent) and events[-1].finish_reason is FinishReason.LENGTH
    assert result.text == "".join(f"<{t}>" for t in NEW[:8])


def test_the_summary_counts_rounds_and_acceptance() -> None:
    draft = FakeDraft([*TARGET[:5], 99, *TARGET[6:]])
    session = make_session(FakeVerifier(), draft, depth=3, max_new_tokens=8)
    list(session.generate())
    summary = session.result.stats.summary(session.result.origins)
    assert summary["num_rounds"] == 2
    assert summary["num_draft_tokens"] == 6
    assert summary["num_accepted_tokens"] == 5
    assert summary["acceptance_rate"] == round(5 / 6, 4)
    assert summary["tokens_per_round"] == 3.5
    assert summary["acceptance_per_position"] == [1.0, 1.0, 0.5]
    assert summary["forward_ms"] == 2.0
    assert summary["num_fallback_tokens"] == 0


def test_a_round_names_the_position_and_hash_it_builds_on() -> None:
    verifier = FakeVerifier()
    list(make_session(verifier, FakeDraft(), depth=2, max_new_tokens=4).generate())
    rounds = verifier.of(VerifyRequest)
    assert [r.base_position for r in rounds] == [3]
    assert rounds[0].base_hash == TokenChain(TARGET[:3]).hash
    assert rounds[0].draft_tokens == TARGET[3:5] and rounds[0].q_token_probs == (0.5, 0.5)
    assert verifier.of(OpenRequest)[0].token_ids == PROMPT


def test_the_draft_length_never_passes_the_last_token_wanted() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), depth=4, max_new_tokens=7)
    list(session.generate())
    assert [len(r.draft_tokens) for r in verifier.of(VerifyRequest)] == [4, 0]
    assert session.result.token_ids == NEW[:7]


class PreparingSequence(FakeSequence):
    """Notes how many rounds had been sent when it was to prepare how many positions, and which it did."""

    def __init__(self, model: FakeDraft, verifier: FakeVerifier) -> None:
        super().__init__(model, 0)
        self.verifier = verifier
        self.asked: list[tuple[int, int]] = []
        self.prepared: list[int] = []

    def prepare(self, num_tokens: int) -> Iterator[None]:
        self.asked.append((len(self.verifier.of(VerifyRequest)), num_tokens))
        for position in range(self.position, self.position + num_tokens):
            yield
            self.prepared.append(position)


@pytest.mark.parametrize("answers_after", [0, 2], ids=["at once", "late"])
def test_the_next_round_is_prepared_while_one_is_in_flight_until_its_answer_is_there(
    monkeypatch: pytest.MonkeyPatch, answers_after: int
) -> None:
    verifier, draft = FakeVerifier(), FakeDraft()
    sequence = PreparingSequence(draft, verifier)
    monkeypatch.setattr(draft, "sequence", lambda *arguments, **named: sequence)
    polls = itertools.count()
    poll = RemoteVerifier.poll

    def poll_later(self: RemoteVerifier, wait_s: float = 0.0) -> Sequence[object]:
        return [None] if next(polls) % 3 < answers_after else poll(self, wait_s)

    monkeypatch.setattr(RemoteVerifier, "poll", poll_later)
    session = make_session(verifier, draft, depth=2, max_new_tokens=7)
    list(session.generate())
    assert session.result.token_ids == NEW[:7]
    assert sequence.asked == [(1, 5), (2, 5)], "a draft, a bonus and the next draft"
    assert sequence.prepared == ([3, 4, 6, 7] if answers_after else [])


def test_one_token_needs_no_round() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), max_new_tokens=1)
    list(session.generate())
    assert session.result.token_ids == NEW[:1]
    assert not verifier.of(VerifyRequest) and len(verifier.of(CloseRequest)) == 1


def test_an_accepted_end_of_text_ends_it() -> None:
    target = (*TARGET[:5], EOS, *TARGET[6:])
    session = make_session(FakeVerifier(target), FakeDraft(target))
    list(session.generate())
    assert session.result.token_ids == (*TARGET[2:5], EOS)
    assert session.result.finish_reason is FinishReason.STOP
    assert session.result.text == "<10><11><12>"


def test_a_stop_token_id_ends_the_text_in_the_middle_of_a_draft() -> None:
    session = make_session(FakeVerifier(), FakeDraft(), stop_token_ids=(12,))
    list(session.generate())
    assert session.result.token_ids == (10, 11, 12)
    assert session.result.finish_reason is FinishReason.STOP


def test_a_stop_string_over_two_tokens_ends_the_text_before_it() -> None:
    session = make_session(FakeVerifier(), FakeDraft(), stop_strings=("2><1",))
    events = list(session.generate())
    assert session.result.text == "<10><11><1"
    assert session.result.token_ids == (10, 11, 12, 13)  # ids end with the token that completes the stop
    assert "".join(getattr(e, "text", "") for e in events) == "<10><11><1"
    assert session.result.stats.summary(session.result.origins)["num_accepted_tokens"] == 3


def test_a_character_of_several_tokens_shows_with_its_last() -> None:
    pieces = {10: b"a", 11: b"\xe2", 12: b"\x82", 13: b"\xac", 14: b"b"}
    decoder = codecs.getincrementaldecoder("utf-8")()
    session = make_session(
        FakeVerifier(), FakeDraft(), decode=lambda t: decoder.decode(pieces[t]), max_new_tokens=5
    )
    texts = [e.text for e in session.generate() if isinstance(e, TokenEvent)]
    assert texts == ["a", "", "", "€", "b"]


def test_text_held_for_a_stop_string_that_never_completes_is_released_at_the_end() -> None:
    session = make_session(FakeVerifier(), FakeDraft(), stop_strings=("<12><99",), max_new_tokens=3)
    list(session.generate())
    assert session.result.text == "<10><11><12>"


def test_the_text_ends_with_the_targets_context() -> None:
    limits = Limits(8, 16, 1 << 20, 8, 60_000)
    session = make_session(FakeVerifier(model=make_model(limits=limits)), FakeDraft(), max_new_tokens=50)
    list(session.generate())
    assert session.result.token_ids == TARGET[2:8]
    assert session.result.finish_reason is FinishReason.CONTEXT


def test_a_draft_at_its_own_context_limit_hands_over_to_the_target() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(max_context=8), max_new_tokens=12)
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    assert session.result.origins[-3:] == (Origin.TARGET,) * 3
    assert Origin.ACCEPTED in session.result.origins
    first, then = session.result.stats.stretches
    assert (first.mode, then.mode) == ("speculative", "cloud-only")
    assert (first.reason, then.reason) == ("given", "draft_full")
    assert first.start == 0 and set(session.result.origins[then.start :]) == {Origin.TARGET}


def test_drafts_longer_than_the_verifier_takes_are_shortened() -> None:
    limits = Limits(64, 2, 1 << 20, 8, 60_000)
    verifier = FakeVerifier(model=make_model(limits=limits))
    list(make_session(verifier, FakeDraft(), depth=6, max_new_tokens=9).generate())
    assert max(len(r.draft_tokens) for r in verifier.of(VerifyRequest)) == 2


def test_the_session_closes_what_it_opened() -> None:
    verifier, draft = FakeVerifier(), FakeDraft()
    list(make_session(verifier, draft).generate())
    assert len(verifier.of(CloseRequest)) == 1 and draft.sequences[0].is_closed


def test_a_consumer_that_leaves_early_closes_the_session_too() -> None:
    verifier, draft = FakeVerifier(), FakeDraft()
    session = make_session(verifier, draft)
    events = session.generate()
    next(events)
    events.close()
    assert len(verifier.of(CloseRequest)) == 1 and draft.sequences[0].is_closed
    assert session.result.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize(("is_link_up", "waited_s"), [(True, 2.0), (False, 0.3)])
def test_the_end_waits_for_a_verifier_that_stands_still(is_link_up: bool, waited_s: float) -> None:
    # A stream that is cancelled while the verifier reads nothing takes the close with it: the session stayed.
    script: dict[tuple[str, int], Action] = {("close", 1): Silent()}
    if not is_link_up:
        script[("verify", 1)] = Silent()
    verifier = FakeVerifier(script=script)
    clock = VirtualClock(verifier.world)
    session = make_session(verifier, FakeDraft(), max_new_tokens=2, depth=1)
    last_s = 0.0
    for event in session.generate():
        if isinstance(event, TokenEvent):
            last_s = clock.now()
    assert clock.now() - last_s == pytest.approx(waited_s, abs=0.01)


# ------------------------------------------------------------------------------------- other modes


def test_a_text_that_cannot_be_kept_closes_the_session_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Drafter, token_ids: Sequence[int]) -> None:
        raise UsageError("a full disk")

    monkeypatch.setattr(Drafter, "remember", fail)
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(TARGET))
    with pytest.raises(UsageError, match="a full disk"):
        list(session.generate())
    assert isinstance(verifier.requests[-1], CloseRequest) and session.result.token_ids == NEW[:12]


def test_edge_only_needs_no_verifier_and_marks_every_token() -> None:
    session = make_session(None, FakeDraft(), mode=ExecutionMode.EDGE_ONLY, max_new_tokens=6)
    list(session.generate())
    assert session.result.token_ids == NEW[:6]
    assert set(session.result.origins) == {Origin.EDGE_ONLY}
    assert session.result.num_unverified_tokens == 6 and session.result.model is None


def test_in_edge_only_mode_the_drafts_own_end_of_text_ends_it() -> None:
    text = (*TARGET[:5], EOS, *TARGET[6:])
    session = make_session(None, FakeDraft(text), mode=ExecutionMode.EDGE_ONLY)
    list(session.generate())
    assert session.result.token_ids == (10, 11, 12, EOS)
    assert session.result.finish_reason is FinishReason.STOP


def test_edge_only_ends_with_the_drafts_context() -> None:
    session = make_session(None, FakeDraft(max_context=6), mode=ExecutionMode.EDGE_ONLY)
    list(session.generate())
    assert session.result.finish_reason is FinishReason.CONTEXT and len(session.result.token_ids) == 4


@pytest.mark.parametrize("num_new", [1, 2, 12])
def test_cloud_only_gives_the_same_text(num_new: int) -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, mode=ExecutionMode.CLOUD_ONLY, max_new_tokens=num_new)
    list(session.generate())
    assert session.result.token_ids == NEW[:num_new]
    assert set(session.result.origins) == {Origin.TARGET}


def test_cloud_only_stops_at_a_stop_string() -> None:
    session = make_session(FakeVerifier(), mode=ExecutionMode.CLOUD_ONLY, stop_strings=("<13>",))
    list(session.generate())
    assert session.result.text == "<10><11><12>" and session.result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_new", [1, 2, 12])
def test_co_located_gives_the_same_text_in_the_verifiers_rounds(num_new: int) -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, mode=ExecutionMode.CO_LOCATED, max_new_tokens=num_new, depth=4)
    list(session.generate())
    result = session.result
    assert result.token_ids == NEW[:num_new] and all(result.is_verified)
    stats = result.stats.summary(result.origins)
    shapes = [(r.num_draft_tokens, r.num_accepted_tokens) for r in result.stats.rounds]
    assert shapes == {1: [], 2: [(0, 0)], 12: [(4, 4), (4, 4), (0, 0)]}[num_new]
    if num_new == 12:
        assert stats["acceptance_rate"] == 1.0 and stats["tokens_per_round"] == round(11 / 3, 4)
        assert stats["draft_ms"] == 1.0 and stats["forward_ms"] == 2.0
        assert stats["rtt_ms"] is None and stats["net_ms"] is None, "no network lies between the two models"


def test_co_located_asks_for_no_more_than_the_verifier_takes_in_a_round() -> None:
    verifier = FakeVerifier()
    list(make_session(verifier, mode=ExecutionMode.CO_LOCATED, depth=200).generate())
    assert [r.num_speculative_tokens for r in verifier.of(GenerateRequest)] == [16]


def test_co_located_stops_at_a_stop_string_inside_a_round() -> None:
    session = make_session(FakeVerifier(), mode=ExecutionMode.CO_LOCATED, depth=8, stop_strings=("<13>",))
    list(session.generate())
    assert session.result.text == "<10><11><12>" and session.result.finish_reason is FinishReason.STOP
    assert session.result.token_ids == NEW[:4]
    assert [r.num_accepted_tokens for r in session.result.stats.rounds] == [3]
