"""Sessions with a gate: over a scripted verifier, and over the real engine under every fault."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge.edge_fakes import (
    EOS,
    PROMPT,
    TARGET,
    FakeDraft,
    FakeVerifier,
    Silent,
    error,
    make_model,
    make_session,
)
from support.edge.engine_link import Chances, EngineLink
from support.edge.random_runs import ANY_SEED, FAULTS, GREEDY_OR_SAMPLED
from support.edge.telling_draft import HARD_PLACE, HARD_TOKEN, SURE, Tell, TellingDraft, every, make_gate
from test_pipelined_rounds import PROMPT as SHORT_PROMPT
from test_pipelined_rounds import decode, make_backend, reference

from outrider.common.alignment import TokenChain
from outrider.common.errors import RoundTimeoutError
from outrider.common.types import (
    FinishReason,
    GenerateRequest,
    Limits,
    Method,
    Opened,
    OpenRequest,
    Origin,
    RoundErrorCode,
    SamplingParams,
    Signals,
    StopParams,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.controller.depth.stepped import RatioDepth
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.core.stats import RoundOutcome
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.ui.terminal import summary

NEW = TARGET[2:]
STOP, COMMIT = GateUse.STOP, GateUse.COMMIT
MANY_FAULTS = replace(FAULTS, ripe=0.3, lose_kv=0.1, lose_session=0.03)
NEVER: Tell = lambda position: SURE  # noqa: E731


def gated(verifier: FakeVerifier, use: GateUse, tell: Tell, **options: object) -> EdgeSession:
    ratio = options.pop("max_hard_ratio", 0.0)
    text = options.pop("text", TARGET)
    draft = TellingDraft(FakeDraft(text), tell)  # type: ignore[arg-type]
    return make_session(verifier, draft, gate=make_gate(use, ratio), **options)  # type: ignore[arg-type]


def rounds(verifier: FakeVerifier) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each: what was committed with it, and its draft."""
    return [(r.committed_tokens, r.draft_tokens) for r in verifier.of(VerifyRequest)]


# ------------------------------------------------------------------------------------- stop-gate


def test_a_stop_gate_ends_drafts_and_the_text_is_the_same() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, STOP, every(5, HARD_PLACE))
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    # Tokens 5 and 10 of the text are in doubt; the prompt has two, the opening brought a third.
    assert rounds(verifier) == [((), (11, 12)), ((), (14, 15, 16, 17)), ((), (19, 20))]
    assert [len(each.confidences) for each in session.result.stats.rounds] == [2, 4, 2]
    assert all(origin.is_verified for origin in session.result.origins)
    stats = session.result.stats.summary(session.result.origins)
    assert stats["num_escalations"] == 1 and stats["num_gate_tokens"] == stats["num_kept_blocks"] == 0
    assert stats["hard_ratio"] == round(1 / 9, 4), "of the tokens sent and the one left out"
    assert stats["verifier_calls_per_token"] == 3 / 12


def test_where_the_first_place_is_doubted_the_round_asks_for_one_token() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, STOP, lambda position: HARD_PLACE, max_new_tokens=4)
    list(session.generate())
    assert session.result.token_ids == NEW[:4]
    assert rounds(verifier) == [((), ())] * 3
    assert [r.num_dropped_tokens for r in session.result.stats.rounds] == [1, 1, 0]


def test_a_hard_token_is_sent_and_the_verifier_told_which_it_was() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, STOP, every(4, HARD_TOKEN, 1), max_new_tokens=8)
    list(session.generate())
    assert session.result.token_ids == NEW[:8]
    masks = [(len(r.draft_tokens), r.hard_mask) for r in verifier.of(VerifyRequest)]
    assert masks == [(3, b"\x04"), (2, b"\x00")]


def test_without_a_gate_no_mask_is_sent_and_nothing_of_it_is_told() -> None:
    verifier = FakeVerifier()
    session = make_session(verifier, FakeDraft())
    list(session.generate())
    assert {r.hard_mask for r in verifier.of(VerifyRequest)} == {b""}
    stats = session.result.stats.summary(session.result.origins)
    assert stats["hard_ratio"] is None and stats["num_escalations"] == 0
    assert "gate" not in summary(session.result, (), 1, False)


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_what_a_fallback_keeps_is_not_gated(policy: OnTimeout) -> None:
    verifier = FakeVerifier(script={("verify", 2): Silent()})
    session = gated(verifier, STOP, lambda position: HARD_PLACE, on_timeout=policy, max_new_tokens=6)
    list(session.generate())
    assert session.result.token_ids == NEW[:6]
    assert not session.result.origins[2].is_verified, "the token after the silent round is the draft's own"


def random_tell(seed: int, num_kinds: int = 3) -> Tell:
    kinds: tuple[Signals, ...] = (SURE, HARD_PLACE, HARD_TOKEN)[:num_kinds]
    chosen = random.Random(seed).choices(kinds, (3, 1, 1)[:num_kinds], k=400)
    return lambda position: chosen[position % 400]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANY_SEED, st.sampled_from([1, 3]), GREEDY_OR_SAMPLED, st.sampled_from([0.0, 0.5]))
def test_a_stop_gate_changes_no_token_under_any_fault(
    seed: int, window: int, temperature: float, ratio: float
) -> None:
    link = EngineLink(make_backend(), MANY_FAULTS, seed)
    result = decode(
        link,
        window=window,
        seed=seed,
        temperature=temperature,
        gate=make_gate(STOP, ratio),
        tell=random_tell(seed),
    )
    sampling = SamplingParams(temperature=temperature, seed=seed)
    stop = StopParams(max_new_tokens=50, ignore_eos=True)
    assert [*SHORT_PROMPT, *result.token_ids] == reference(sampling, stop)
    assert result.num_unverified_tokens == 0


@pytest.mark.parametrize("method", [Method.SPARSE, Method.CANDIDATES, Method.BLOCK])
@pytest.mark.parametrize("window", [1, 3])
def test_a_stop_gate_goes_with_every_exact_method(method: Method, window: int) -> None:
    link = EngineLink(make_backend())
    result = decode(link, window=window, method=method, gate=make_gate(STOP), tell=random_tell(3))
    assert len(result.token_ids) == 50 and result.num_unverified_tokens == 0
    assert any(r.escalated for r in result.stats.rounds)


def test_no_round_is_sent_behind_a_doubted_place() -> None:
    """The verifier would sample no bonus there, or the edge would draft what the gate takes away again."""
    link = EngineLink(make_backend(), Chances(ripe=0.0))
    decode(link, window=4, accuracy=1.0, gate=make_gate(STOP), tell=every(6, HARD_PLACE))
    short = [r for r in link.sent if 0 < len(r.draft_tokens) < 3]
    ended = [r for r in short if (r.base_position + len(r.draft_tokens)) % 6 == 0]
    assert ended and not any(r.pipelined for r in ended)


# ----------------------------------------------------------------------------------- commit-gate


def test_a_commit_gate_keeps_what_the_draft_is_sure_of_and_sends_it_along_later() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, every(9, HARD_TOKEN))
    events = list(session.generate())
    result = session.result
    assert result.token_ids == NEW[:12]
    kept = (11, 12, 13, 14)
    assert rounds(verifier) == [(kept, (15, 16, 17, 18)), ((20,), ())]
    assert [r.origins for r in verifier.of(VerifyRequest)] == [(Origin.GATE,) * 4, (Origin.GATE,)]
    assert [r.hard_mask for r in verifier.of(VerifyRequest)] == [b"\x04", b""]
    marks = [event.is_verified for event in events if hasattr(event, "is_verified")]
    assert marks == list(result.is_verified) == [origin is not Origin.GATE for origin in result.origins]
    stats = result.stats.summary(result.origins)
    told = {name: stats[name] for name in ("num_gate_tokens", "num_kept_blocks", "num_escalations")}
    assert told == {"num_gate_tokens": 5, "num_kept_blocks": 2, "num_escalations": 1}
    assert stats["num_rounds"] == 2 and stats["verifier_calls_per_token"] == round(2 / 12, 4)
    assert result.num_unverified_tokens == 5
    words = summary(result, (), 1, False)
    assert "gate kept 5 tokens in 2 blocks unasked, 0.17 calls a token" in words
    assert "5 of 12 tokens are the draft's own, unverified" in words


def test_a_share_of_a_block_may_be_hard_before_it_is_sent() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, every(2, HARD_TOKEN), max_hard_ratio=0.5)
    list(session.generate())
    assert rounds(verifier) == [(NEW[1:11], ())], "only the last token is asked for"
    kept = [r for r in session.result.stats.rounds if r.outcome is RoundOutcome.KEPT]
    assert [r.hard_ratio for r in kept] == [0.5, 0.5, 0.5] and not any(r.escalated for r in kept)


def test_the_drafts_own_words_stay_in_the_text_and_the_verifier_goes_on_from_them() -> None:
    """What is kept is the draft's where the target would say something else: lossy."""
    draft_text = [*TARGET[:4], 77, *TARGET[5:]]
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, every(7, HARD_PLACE), text=draft_text, max_new_tokens=9)
    list(session.generate())
    assert session.result.token_ids == (10, 11, 77, 13, 14, 15, 16, 17, 18)
    assert verifier.chain is None, "closed"
    _, last = list(verifier.replies.values())[-1]
    ours = TokenChain((*PROMPT, *session.result.token_ids))
    assert (last.position, last.hash) == (ours.position, ours.hash)


@pytest.mark.parametrize("stop", [{"stop_token_ids": (14,)}, {}])
def test_a_token_that_ends_the_text_is_always_the_targets(stop: dict[str, object]) -> None:
    text = [*TARGET[:6], 14 if stop else EOS, 98, 99]
    verifier = FakeVerifier(target=text)
    session = gated(verifier, COMMIT, NEVER, text=text, **stop)
    list(session.generate())
    result = session.result
    assert (result.token_ids, result.finish_reason) == (tuple(text[2:7]), FinishReason.STOP)
    assert rounds(verifier) == [((), tuple(text[3:7]))] and result.num_unverified_tokens == 0


def test_a_stop_string_ends_a_kept_block_where_it_is_complete() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, NEVER, stop_strings=("<12>",))
    list(session.generate())
    assert (session.result.token_ids, session.result.text) == ((10, 11, 12), "<10><11>")
    assert session.result.finish_reason is FinishReason.STOP and rounds(verifier) == []


@pytest.mark.parametrize("num", [1, 2, 3, 6, 7])
def test_no_text_gets_longer_than_it_may_and_the_last_token_is_the_targets(num: int) -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, NEVER, max_new_tokens=num)
    list(session.generate())
    assert session.result.token_ids == NEW[:num]
    assert session.result.finish_reason is FinishReason.LENGTH and session.result.is_verified[-1]


def test_a_kept_text_ends_at_the_targets_context() -> None:
    model = make_model(limits=Limits(20, 16, 1 << 20, 8, 60_000))
    verifier = FakeVerifier(model=model, max_context=20)
    session = gated(verifier, COMMIT, NEVER, max_new_tokens=40)
    list(session.generate())
    assert session.result.finish_reason is FinishReason.CONTEXT
    assert len(PROMPT) + len(session.result.token_ids) == 20 and session.result.is_verified[-1]


def test_where_the_draft_is_full_the_target_streams_on_behind_what_was_kept() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, NEVER)
    session._draft.model.max_context = 8  # type: ignore[union-attr]
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    (request,) = verifier.of(GenerateRequest)
    assert request.committed_tokens == TARGET[3:8] and set(request.origins) == {Origin.GATE}


def test_no_more_is_kept_than_the_next_request_can_carry() -> None:
    model = make_model(limits=Limits(64, 16, 100, 8, 60_000))  # of a hundred bytes: eight tokens
    verifier = FakeVerifier(model=model)
    session = gated(verifier, COMMIT, NEVER, max_new_tokens=30)
    list(session.generate())
    assert session.result.token_ids == NEW[:30]
    assert max(len(committed) for committed, _ in rounds(verifier)) == 8


def test_a_cancel_is_heard_though_nobody_is_asked() -> None:
    verifier = FakeVerifier()
    session = gated(verifier, COMMIT, NEVER, max_new_tokens=40)
    num_tokens = 0
    for event in session.generate():
        num_tokens += hasattr(event, "token_id")
        if num_tokens == 6:
            session.cancel()
    assert session.result.finish_reason is FinishReason.CANCELLED
    assert len(session.result.token_ids) == 9, "the block under way, and none after it"


def test_kept_blocks_teach_a_depth_policy_nothing() -> None:
    verifier = FakeVerifier()
    policy = RatioDepth(6)
    session = gated(verifier, COMMIT, NEVER, policy=policy, max_new_tokens=30)
    list(session.generate())
    assert policy.next_depth() == 6


@pytest.mark.parametrize("policy", list(OnTimeout))
def test_a_round_without_an_answer_behind_kept_blocks(policy: OnTimeout) -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = gated(verifier, COMMIT, every(9, HARD_TOKEN), on_timeout=policy)
    if policy is OnTimeout.FAIL:
        with pytest.raises(RoundTimeoutError):
            list(session.generate())
        assert session.result.token_ids == NEW[:5], "what was kept stays"
        return
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    origins = set(session.result.origins)
    assert (Origin.FALLBACK in origins) is (policy is OnTimeout.FIRST_TOKEN)
    assert (Origin.EDGE_ONLY in origins) is (policy is OnTimeout.EDGE_ONLY)
    last = verifier.of(VerifyRequest)[-1]
    sent = last.base_position + len(last.committed_tokens) + len(last.draft_tokens)
    assert Origin.GATE in origins
    assert sent >= len(PROMPT) + 11 or policy is OnTimeout.EDGE_ONLY, "or it went on alone to the end"


def test_a_lost_session_is_opened_again_with_what_was_kept() -> None:
    verifier = FakeVerifier(script={("verify", 1): error(RoundErrorCode.UNKNOWN_SESSION)})
    session = gated(verifier, COMMIT, every(9, HARD_TOKEN))
    list(session.generate())
    assert session.result.token_ids == NEW[:12]
    rebuild = verifier.of(OpenRequest)[-1]
    assert rebuild.token_ids == TARGET[:7] and rebuild.is_rebuild


def written(seed: int, temperature: float, faults: Chances) -> tuple[EngineLink, SessionResult]:
    link = EngineLink(make_backend(), faults, seed)
    result = decode(
        link,
        window=1,
        seed=seed,
        temperature=temperature,
        gate=make_gate(COMMIT, 0.25),
        tell=random_tell(seed),
    )
    return link, result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_was_kept_arrives_at_the_engine_marked_and_both_sides_have_one_text(temperature: float) -> None:
    link, result = written(11, temperature, Chances())
    committed = [origin for request in link.sent for origin in request.origins]
    assert committed.count(Origin.GATE) == result.origins.count(Origin.GATE) > 5
    verdict = [reply for reply in link.replies if isinstance(reply, Verdict)][-1]
    ours = TokenChain((*SHORT_PROMPT, *result.token_ids))
    assert (verdict.position, verdict.hash) == (ours.position, ours.hash)
    assert result.stats.num_rebuilds == 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANY_SEED, GREEDY_OR_SAMPLED)
def test_a_commit_gate_keeps_both_sides_together_under_any_fault(seed: int, temperature: float) -> None:
    link, result = written(seed, temperature, MANY_FAULTS)
    assert len(result.token_ids) == 50 and result.finish_reason is FinishReason.LENGTH
    kept = [origin is Origin.GATE for origin in result.origins]
    assert [not is_verified for is_verified in result.is_verified] == kept
    theirs = {reply.hash for reply in link.replies if isinstance(reply, Verdict | Opened)}
    assert TokenChain((*SHORT_PROMPT, *result.token_ids)).hash in theirs
