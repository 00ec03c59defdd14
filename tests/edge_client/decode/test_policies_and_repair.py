"""Time-outs, lost connections, refusals, lost sessions: what each policy makes of them."""

from __future__ import annotations

import pytest
from support.edge.edge_fakes import (
    EOS,
    PROMPT,
    TARGET,
    Action,
    FakeDraft,
    FakeVerifier,
    Late,
    Lost,
    Silent,
    error,
    make_model,
    make_session,
)

from outrider.common.errors import IncompatibleError, LinkError, RoundFailedError, RoundTimeoutError
from outrider.common.types import (
    UNLIMITED_TOKENS,
    CloseRequest,
    FinishReason,
    GenerateRequest,
    OpenRequest,
    Origin,
    Progress,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    VerifyRequest,
)
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.decode import generation_state

NEW = TARGET[2:]
WRONG_AT_6 = [*TARGET[:6], 99, *TARGET[7:]]


# ------------------------------------------------------------------------------------- first_token


def test_first_token_keeps_one_marked_token_and_goes_on() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = make_session(verifier, FakeDraft(), depth=3)
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    assert session.result.origins[1] is Origin.FALLBACK
    assert session.result.num_unverified_tokens == 1
    second = verifier.of(VerifyRequest)[1]
    assert second.base_position == 3 and second.committed_tokens == (TARGET[3],)
    assert second.origins == (Origin.FALLBACK,) and second.draft_tokens == TARGET[4:7]
    assert session.result.stats.num_timeouts == 1
    next_answered = next(each for each in session.result.stats.rounds if each.is_answered)
    assert next_answered.since_ms is next_answered.edge_ms is None, "it is no time of a round"


def test_a_late_verdict_that_agrees_clears_the_mark() -> None:
    verifier = FakeVerifier(script={("verify", 1): Late()})
    session = make_session(verifier, FakeDraft(), depth=3)
    events = list(session.generate())
    assert MarkClearedEvent(1) in events
    assert session.result.num_unverified_tokens == 0
    assert session.result.origins[1] is Origin.FALLBACK  # where it came from stays true
    assert session.result.stats.num_late_verdicts == 1 and session.result.stats.num_marks_cleared == 1


def test_a_late_verdict_that_disagrees_leaves_the_mark() -> None:
    draft = FakeDraft([*TARGET[:3], 77, *TARGET[4:]])
    session = make_session(FakeVerifier(script={("verify", 1): Late()}), draft, depth=3)
    events = list(session.generate())
    assert not [e for e in events if isinstance(e, MarkClearedEvent)]
    assert session.result.token_ids[1] == 77 and session.result.is_verified[1] is False


def test_an_unverified_end_of_text_is_never_kept() -> None:
    draft = FakeDraft([*TARGET[:3], EOS, *TARGET[4:]])
    session = make_session(FakeVerifier(script={("verify", 1): Silent()}), draft)
    list(session.generate())
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0


def test_a_round_that_drafts_nothing_falls_back_on_a_token_too() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), max_new_tokens=5)
    for event in session.generate():
        if getattr(event, "index", None) == 0:
            take_down(verifier, 60.0)
    assert session.result.token_ids == NEW[:5] and session.result.num_unverified_tokens == 4


def test_first_token_gives_at_most_one_token_a_deadline_while_the_link_is_down() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), deadline_s=0.1, max_new_tokens=12)
    for event in session.generate():
        if getattr(event, "index", None) == 0:
            take_down(verifier, 0.35)
    assert session.result.num_unverified_tokens == 3  # at 0.1, 0.2 and 0.3 s
    assert session.result.token_ids == NEW[:12]
    assert session.result.origins[-1] in (Origin.BONUS, Origin.ACCEPTED, Origin.CORRECTION)


# --------------------------------------------------------------------------------- edge_only, fail


def take_down(verifier: FakeVerifier, duration_s: float) -> None:
    end_s = verifier.world.now_s + duration_s
    verifier.is_down = lambda: verifier.world.now_s < end_s


def test_edge_only_goes_on_alone_and_hands_its_tokens_over_on_return() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), on_timeout=OnTimeout.EDGE_ONLY, max_new_tokens=40)
    for event in session.generate():
        if getattr(event, "index", None) == 0:
            take_down(verifier, 0.25)
        if getattr(event, "origin", None) is Origin.EDGE_ONLY:
            verifier.world.sleep(0.02)  # a draft has a speed
    result = session.result
    alone = [i for i, origin in enumerate(result.origins) if origin is Origin.EDGE_ONLY]
    assert len(alone) >= 4 and alone == list(range(alone[0], alone[-1] + 1))
    assert result.token_ids == NEW[:40] and result.is_verified[-1]
    back = next(r for r in verifier.of(VerifyRequest) if r.committed_tokens)
    assert set(back.origins) == {Origin.EDGE_ONLY}


def test_edge_only_starts_without_any_contact_and_opens_later() -> None:
    verifier = FakeVerifier()
    take_down(verifier, 0.2)
    session = make_session(
        verifier, FakeDraft(), on_timeout=OnTimeout.EDGE_ONLY, max_new_tokens=40, recover_timeout_s=2.0
    )
    for event in session.generate():
        if getattr(event, "origin", None) is Origin.EDGE_ONLY:
            verifier.world.sleep(0.02)
    opening = verifier.of(OpenRequest)[0]
    assert opening.num_prompt_tokens == len(PROMPT) < len(opening.token_ids)
    assert session.result.token_ids == NEW[:40] and session.result.is_verified[-1]


def test_a_text_without_a_limit_ends_where_no_target_ever_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_state, "_MAX_UNKNOWN_CONTEXT_TOKENS", 30)
    session = make_session(
        FakeVerifier(is_down=lambda: True),
        FakeDraft(),
        on_timeout=OnTimeout.EDGE_ONLY,
        max_new_tokens=UNLIMITED_TOKENS,
    )
    list(session.generate())
    assert session.result.finish_reason is FinishReason.CONTEXT
    assert len(PROMPT) + len(session.result.token_ids) == 30


@pytest.mark.parametrize("is_reverified", [False, True])
@pytest.mark.parametrize("ends_at", [5, 9])
def test_text_kept_before_the_first_opening_is_judged_by_the_targets_end_of_text(
    ends_at: int, is_reverified: bool
) -> None:
    """The draft does not know the target's end-of-text id and keeps it; it writes on after its own."""
    verifier = FakeVerifier()
    take_down(verifier, 0.2)
    draft = FakeDraft([*TARGET[:ends_at], EOS, *TARGET[ends_at + 1 :]], eos=98)
    session = make_session(
        verifier,
        draft,
        on_timeout=OnTimeout.EDGE_ONLY,
        max_new_tokens=40,
        recover_timeout_s=2.0,
        is_reverified=is_reverified,
    )
    shown: list[int] = []
    for event in session.generate():
        if isinstance(event, TokenEvent):
            shown.append(event.token_id)
            if event.origin is Origin.EDGE_ONLY:
                verifier.world.sleep(0.02)
        elif isinstance(event, RolledBackEvent):
            del shown[event.num_tokens :]
    result = session.result
    assert result.token_ids == tuple(shown) == NEW[:40], "an unverified end-of-text id stayed"
    assert result.finish_reason is FinishReason.LENGTH
    assert EOS in draft.text[: ends_at + 1]


def test_fail_ends_at_the_deadline_and_keeps_the_text_so_far() -> None:
    verifier = FakeVerifier(script={("verify", 2): Silent()})
    session = make_session(verifier, FakeDraft(), on_timeout=OnTimeout.FAIL, recover_timeout_s=20.0)
    with pytest.raises(RoundTimeoutError, match="no answer from fake:1"):
        list(session.generate())
    assert verifier.world.now_s == pytest.approx(0.05), "it did not wait for a recovery"
    assert session.result.token_ids == NEW[:6] and session.result.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.FAIL])
def test_without_a_first_contact_there_is_no_text(policy: OnTimeout) -> None:
    session = make_session(FakeVerifier(is_down=lambda: True), FakeDraft(), on_timeout=policy)
    with pytest.raises(LinkError, match="cannot connect"):
        list(session.generate())
    assert session.result.token_ids == ()


def test_wait_gives_up_after_the_recover_timeout() -> None:
    verifier = FakeVerifier(is_down=lambda: True)
    session = make_session(verifier, FakeDraft(), on_timeout=OnTimeout.WAIT, recover_timeout_s=0.3)
    with pytest.raises(LinkError, match="cannot connect"):
        list(session.generate())
    assert 0.3 <= verifier.world.now_s < 0.6


# -------------------------------------------------------------------------------------------- wait


@pytest.mark.parametrize("action", [Silent(), Lost()])
def test_wait_sends_the_same_round_again_on_a_fresh_connection(action: Silent | Lost) -> None:
    verifier = FakeVerifier(script={("verify", 2): action})
    session = make_session(verifier, FakeDraft(WRONG_AT_6), on_timeout=OnTimeout.WAIT)
    list(session.generate())
    rounds = verifier.of(VerifyRequest)
    assert rounds[1] == rounds[2] and verifier.num_connections == 2
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0
    assert session.result.stats.num_timeouts == 0 and session.result.stats.num_reconnects == 1
    assert session.result.stats.rounds[1].since_ms is None is not session.result.stats.rounds[2].since_ms


@pytest.mark.parametrize("policy", list(OnTimeout))
def test_a_lost_stream_that_is_back_within_the_deadline_costs_no_exactness(policy: OnTimeout) -> None:
    verifier = FakeVerifier(script={("verify", 2): Lost()})
    session = make_session(verifier, FakeDraft(), on_timeout=policy, deadline_s=0.5)
    list(session.generate())
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0


# ----------------------------------------------------------------------------- errors and repairs


def test_a_refusal_is_waited_for_and_is_no_timeout() -> None:
    verifier = FakeVerifier(script={("verify", 1): error(RoundErrorCode.REFUSED, retry_after_ms=120)})
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert verifier.world.now_s == pytest.approx(0.12)  # longer than the deadline
    assert session.result.num_unverified_tokens == 0 and session.result.stats.num_timeouts == 0
    assert session.result.stats.num_refusals == 1 and session.result.token_ids == NEW[:12]


@pytest.mark.parametrize(("policy", "is_told"), [(OnTimeout.FIRST_TOKEN, True), (OnTimeout.WAIT, False)])
def test_the_verifier_is_told_the_deadline_unless_a_late_answer_serves(
    policy: OnTimeout, is_told: bool
) -> None:
    verifier = FakeVerifier(script={("verify", 2): error(RoundErrorCode.REFUSED, retry_after_ms=20)})
    list(make_session(verifier, FakeDraft(), depth=3, on_timeout=policy).generate())
    told = [request.deadline_ms > 0 for request in verifier.of(VerifyRequest)]
    assert len(told) > 2 and set(told) == {is_told}


def test_a_refused_opening_is_tried_again() -> None:
    verifier = FakeVerifier(script={("open", 1): error(RoundErrorCode.REFUSED, retry_after_ms=30)})
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert len(verifier.of(OpenRequest)) == 2 and session.result.token_ids == NEW[:12]


def test_progress_is_no_timeout() -> None:
    verifier = FakeVerifier()

    def compute_slowly(request: SessionRequest) -> list[SessionResponse]:
        assert isinstance(request, VerifyRequest)
        answer = verifier.answer(request)
        connection = verifier.connections[-1]
        verifier.world.call_at(0.15, connection.inbox.put, answer[0])
        return [Progress(request.round_id, 0, 1000)]

    verifier.connections = []
    connect = verifier.connect
    verifier.connect = lambda t: verifier.connections.append(connect(t)) or verifier.connections[-1]
    verifier.script[("verify", 1)] = compute_slowly
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert session.result.stats.num_timeouts == 0 and session.result.num_unverified_tokens == 0


@pytest.mark.parametrize("policy", list(OnTimeout))
def test_a_lost_session_is_opened_again_with_all_ids(policy: OnTimeout) -> None:
    verifier = FakeVerifier(script={("verify", 2): error(RoundErrorCode.UNKNOWN_SESSION)})
    session = make_session(verifier, FakeDraft(), on_timeout=policy, depth=2)
    list(session.generate())
    rebuild = verifier.of(OpenRequest)[1]
    assert rebuild.is_rebuild and rebuild.num_prompt_tokens == 2 and rebuild.token_ids == TARGET[:6]
    assert rebuild.target_fingerprint == "target-1"
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0
    assert session.result.stats.num_rebuilds == 1


def test_a_verifier_that_is_lost_before_every_answer_may_forget_the_session_as_often() -> None:
    faults = {("verify", number): error(RoundErrorCode.UNKNOWN_SESSION) for number in range(2, 18, 2)}
    verifier = FakeVerifier(script={("verify", number - 1): Lost() for _, number in faults} | faults)
    session = make_session(verifier, FakeDraft(), on_timeout=OnTimeout.WAIT)
    list(session.generate())
    assert session.result.token_ids == NEW[:12] and session.result.stats.num_rebuilds == len(faults)
    stubborn = FakeVerifier(
        script={("verify", n): error(RoundErrorCode.UNKNOWN_SESSION) for n in range(1, 9)}
    )
    with pytest.raises(RoundFailedError, match="unknown_session"):
        list(make_session(stubborn, FakeDraft(), on_timeout=OnTimeout.WAIT).generate())


def test_a_verifier_that_is_behind_is_met_where_it_is() -> None:
    verifier = FakeVerifier()

    def forget(request: SessionRequest) -> list[SessionResponse]:
        assert verifier.chain is not None
        verifier.chain.truncate(4)
        return verifier.answer(request)

    verifier.script[("verify", 2)] = forget
    session = make_session(verifier, FakeDraft(), depth=2)
    list(session.generate())
    again = verifier.of(VerifyRequest)[2]
    assert again.base_position == 4 and again.committed_tokens == TARGET[4:6]
    assert len(verifier.of(OpenRequest)) == 1 and session.result.token_ids == NEW[:12]


def test_an_unknown_prefix_that_is_not_ours_is_rebuilt() -> None:
    verifier = FakeVerifier(
        script={("verify", 2): error(RoundErrorCode.UNKNOWN_PREFIX, position=5, hash=1234)}
    )
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert len(verifier.of(OpenRequest)) == 2 and session.result.token_ids == NEW[:12]


def test_a_verdict_with_another_hash_is_not_believed() -> None:
    from dataclasses import replace

    verifier = FakeVerifier()
    verifier.script[("verify", 1)] = lambda request: [replace(verifier.answer(request)[0], hash=1)]
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert len(verifier.of(OpenRequest)) == 2 and session.result.token_ids == NEW[:12]


def test_verdicts_that_never_match_are_reported_as_what_they_are() -> None:
    from dataclasses import replace

    verifier = FakeVerifier()
    lying = {
        ("verify", n): lambda request: [replace(verifier.answer(request)[0], hash=1)] for n in range(1, 9)
    }
    verifier.script |= lying
    with pytest.raises(RoundFailedError, match="hash or candidates do not match the edge's sequence"):
        list(make_session(verifier, FakeDraft(), on_timeout=OnTimeout.WAIT).generate())


def test_an_end_of_text_that_nobody_judges_is_an_error_that_says_what_to_do() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft([*TARGET[:3], EOS, *TARGET[4:]]), recover_timeout_s=0.3)
    with pytest.raises(LinkError) as caught:
        for event in session.generate():
            if getattr(event, "index", None) == 0:
                take_down(verifier, 60.0)
    assert "fake:1 has not answered for " in str(caught.value)
    assert "an end of text that only the target may decide" in str(caught.value)
    assert caught.value.fix == "raise --recover-timeout-s or restore the link"


def test_a_verifier_of_another_release_is_refused_with_what_to_do() -> None:
    from dataclasses import replace

    other = FakeVerifier()
    other.model = replace(other.model, protocol_version=0)
    with pytest.raises(IncompatibleError, match=r"speaks protocol 0, this edge \d+: upgrade the older side"):
        list(make_session(other, FakeDraft()).generate())
    lying = FakeVerifier()
    lying.script[("open", 1)] = lambda request: [replace(lying.answer(request)[0], hash=1)]
    with pytest.raises(
        IncompatibleError, match="same token ids differs from the edge's: run the same release"
    ):
        list(make_session(lying, FakeDraft()).generate())


def test_an_internal_error_is_opened_again_once_then_reported() -> None:
    internal = error(RoundErrorCode.INTERNAL)
    once = FakeVerifier(script={("verify", 1): internal})
    session = make_session(once, FakeDraft())
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    twice = FakeVerifier(script={("verify", 1): internal, ("verify", 2): internal})
    with pytest.raises(RoundFailedError, match="internal"):
        list(make_session(twice, FakeDraft()).generate())


def test_an_invalid_field_is_reported_by_name() -> None:
    verifier = FakeVerifier(script={("open", 1): error(RoundErrorCode.INVALID, field="sampling.top_p")})
    with pytest.raises(RoundFailedError, match=r"sampling\.top_p"):
        list(make_session(verifier, FakeDraft()).generate())


def test_another_tokenizer_is_incompatible() -> None:
    verifier = FakeVerifier(
        script={("open", 1): error(RoundErrorCode.INVALID, field="tokenizer_fingerprint")}
    )
    with pytest.raises(IncompatibleError, match="the draft's tokenizer is not the target's: name a draft"):
        list(make_session(verifier, FakeDraft()).generate())


def test_another_target_may_be_allowed() -> None:
    verifier = FakeVerifier(script={("verify", 1): error(RoundErrorCode.UNKNOWN_SESSION)})
    session = make_session(verifier, FakeDraft(), allow_target_change=True)
    for event in session.generate():
        if getattr(event, "index", None) == 0:
            verifier.model = make_model(target_fingerprint="target-2")
    assert verifier.of(OpenRequest)[1].target_fingerprint == ""
    assert session.result.model is not None and session.result.model.target_fingerprint == "target-2"


# -------------------------------------------------------- cloud-only and co-located, cancelling

STREAMED = pytest.mark.parametrize("mode", [ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED])


@STREAMED
def test_a_lost_stream_resumes_from_the_last_token(mode: ExecutionMode) -> None:
    verifier = FakeVerifier()

    def break_off(request: SessionRequest) -> list[SessionResponse]:
        return [*verifier.answer(request)[:3], LinkError("lost")]  # type: ignore[list-item]

    verifier.script[("generate", 1)] = break_off
    session = make_session(verifier, mode=mode, deadline_s=0.2, depth=1)
    list(session.generate())
    num_lost_after = 3 * (2 if mode is ExecutionMode.CO_LOCATED else 1)
    assert [r.base_position for r in verifier.of(GenerateRequest)] == [3, 3 + num_lost_after]
    assert all(r.is_co_located == (mode is ExecutionMode.CO_LOCATED) for r in verifier.of(GenerateRequest))
    assert session.result.token_ids == NEW[:12]


@STREAMED
@pytest.mark.parametrize("action", [Silent(), Lost(), error(RoundErrorCode.REFUSED, retry_after_ms=20)])
def test_a_stream_recovers_from_a_failed_request(action: object, mode: ExecutionMode) -> None:
    session = make_session(FakeVerifier(script={("generate", 1): action}), mode=mode)  # type: ignore[dict-item]
    list(session.generate())
    assert session.result.token_ids == NEW[:12]


@STREAMED
def test_a_stream_that_is_refused_again_and_again_ends_with_the_refusal(mode: ExecutionMode) -> None:
    script: dict[tuple[str, int], Action] = {
        ("generate", number): error(RoundErrorCode.REFUSED, retry_after_ms=20) for number in range(1, 100)
    }
    session = make_session(FakeVerifier(script=script), mode=mode, recover_timeout_s=0.1)
    with pytest.raises(RoundFailedError):
        list(session.generate())


@STREAMED
def test_a_stream_opens_a_lost_session_again(mode: ExecutionMode) -> None:
    verifier = FakeVerifier(script={("generate", 1): error(RoundErrorCode.UNKNOWN_SESSION)})
    session = make_session(verifier, mode=mode)
    list(session.generate())
    assert verifier.of(OpenRequest)[1].token_ids == TARGET[:3] and session.result.token_ids == NEW[:12]


@pytest.mark.parametrize(
    "mode", [ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED]
)
@pytest.mark.parametrize("kind", ["open", "verify"])
def test_a_cancel_ends_any_wait_and_closes(mode: ExecutionMode, kind: str) -> None:
    kind = "generate" if mode is not ExecutionMode.SPECULATIVE and kind == "verify" else kind
    verifier = FakeVerifier(script={(kind, 1): Silent()})
    session = make_session(
        verifier, FakeDraft(), mode=mode, on_timeout=OnTimeout.WAIT, deadline_s=20.0, recover_timeout_s=30.0
    )
    verifier.world.call_at(0.1, session.cancel)
    list(session.generate())
    assert verifier.world.now_s == pytest.approx(0.1)
    assert session.result.finish_reason is FinishReason.CANCELLED
    assert session.result.token_ids == (() if kind == "open" else NEW[:1])
    assert len(verifier.of(CloseRequest)) == 1


def test_a_cancel_ends_the_search_for_a_lost_link() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft(), on_timeout=OnTimeout.WAIT, recover_timeout_s=30.0)
    verifier.world.call_at(0.2, session.cancel)
    for event in session.generate():
        if getattr(event, "index", None) == 0:
            take_down(verifier, 60.0)
    assert verifier.world.now_s < 0.5
    assert session.result.finish_reason is FinishReason.CANCELLED
