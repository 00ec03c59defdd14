"""What the edge sends by method, and its choice among candidates, whatever the link does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.edge.edge_fakes import (
    EOS,
    TARGET,
    FakeDraft,
    FakeVerifier,
    Late,
    Lost,
    Silent,
    error,
    make_session,
)

from outrider.common.errors import LinkError, RoundFailedError
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.sampling.support import certain
from outrider.common.types import (
    Candidate,
    CorrectionKind,
    FinishReason,
    Method,
    MethodParams,
    Opened,
    OpenRequest,
    Origin,
    RoundErrorCode,
    SessionResponse,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.core.options import OnTimeout

NEW = TARGET[2:]
WRONG = 99  # what the draft says at position 6
DRAFT = (*TARGET[:6], WRONG, *TARGET[7:])


@dataclass
class CandidatesVerifier(FakeVerifier):
    """Where the draft is wrong it answers `num_failing` times with the drafted id, which the edge never takes
    (its support has nothing else), then with the target's own token."""

    num_failing: int = 0
    lot_size: int = 2
    asked_from: list[int] = field(default_factory=list)

    def _verify(self, request: VerifyRequest) -> SessionResponse:
        if request.round_id in self.replies:
            return super()._verify(request)
        if request.candidates_from:
            assert not request.committed_tokens and not request.draft_tokens
            if (refusal := self._base(request)) is not None:
                return refusal
            verdict = self._with_candidates(request.round_id, 0, request.candidates_from, WRONG)
        else:
            reply = super()._verify(request)
            is_rejected = isinstance(reply, Verdict) and reply.correction_kind is CorrectionKind.CORRECTION
            if not is_rejected:
                return reply
            assert isinstance(reply, Verdict) and self.chain is not None
            self.chain.truncate(self.chain.position - 1)
            wrong = request.draft_tokens[reply.accepted_len]
            verdict = self._with_candidates(request.round_id, reply.accepted_len, 0, wrong)
        self.replies[request.round_id] = (request, verdict)
        return verdict

    def _with_candidates(self, round_id: int, accepted_len: int, first: int, wrong: int) -> Verdict:
        assert self.chain is not None
        self.asked_from.append(first)
        ids = [
            wrong if index < self.num_failing else self._next()
            for index in range(first, first + self.lot_size)
        ]
        candidates = tuple(Candidate(token_id, 0.5) for token_id in ids)
        chain = self.chain
        kind = CorrectionKind.NONE
        return Verdict(round_id, accepted_len, 0, kind, chain.position, chain.hash, candidates=candidates)


def run(verifier: FakeVerifier, text: Sequence[int] = DRAFT, **options: object) -> list[object]:
    options.setdefault("on_timeout", OnTimeout.WAIT)
    options.setdefault("deadline_s", 0.05)
    session = make_session(verifier, FakeDraft(text), depth=4, method=Method.CANDIDATES, **options)  # type: ignore[arg-type]
    events: list[object] = list(session.generate())
    return [session.result, events]


# ------------------------------------------------------------------------------ what is on the wire


@pytest.mark.parametrize("method", list(Method))
def test_a_round_carries_what_its_method_asks_for(method: Method) -> None:
    verifier, draft = FakeVerifier(), FakeDraft()
    list(make_session(verifier, draft, method=method).generate())
    assert verifier.of(OpenRequest)[0].method is method
    assert draft.sequences[0].num_support == num_support(method)
    for request in verifier.of(VerifyRequest):
        num_draft_tokens = len(request.draft_tokens)
        assert len(request.q_token_probs) == (num_draft_tokens if sends_probs(method) else 0)
        wanted = tuple(map(certain, request.draft_tokens)) if sends_support(method) else ()
        assert request.q_support == wanted


def test_parameters_and_logprobs_travel_with_the_opening_and_with_a_rebuild() -> None:
    params = MethodParams(num_candidates=7)
    verifier = FakeVerifier(script={("verify", 2): error(RoundErrorCode.UNKNOWN_SESSION)})
    session = make_session(
        verifier, FakeDraft(), method=Method.CANDIDATES, method_params=params, num_logprobs=3
    )
    list(session.generate())
    openings = verifier.of(OpenRequest)
    assert len(openings) == 2
    for opening in openings:
        assert (opening.method, opening.method_params, opening.num_logprobs) == (Method.CANDIDATES, params, 3)


# ------------------------------------------------------------------------------ choosing a candidate


def check(result: object, num_new: int = 12) -> None:
    assert result.token_ids == NEW[:num_new]  # type: ignore[attr-defined]
    assert result.origins[4] is Origin.CORRECTION  # type: ignore[attr-defined]
    assert all(result.is_verified)  # type: ignore[attr-defined]


def test_the_first_candidate_that_passes_is_the_correction_and_rides_up_with_the_next_round() -> None:
    verifier = CandidatesVerifier()
    result, events = run(verifier)
    check(result)
    assert verifier.asked_from == [0]
    second = verifier.of(VerifyRequest)[1]
    assert second.base_position == 6
    assert second.committed_tokens == (TARGET[6],) and second.origins == (Origin.CORRECTION,)
    assert second.draft_tokens == TARGET[7:11]
    tokens = [event for event in events if isinstance(event, TokenEvent)]  # type: ignore[attr-defined]
    assert [token.token_id for token in tokens] == list(NEW[:12])
    assert tokens[4].origin is Origin.CORRECTION and tokens[4].is_verified


@pytest.mark.parametrize(("num_failing", "asked"), [(1, [0]), (2, [0, 2]), (5, [0, 2, 4]), (6, [0, 2, 4, 6])])
def test_the_edge_asks_until_one_passes_and_never_settles(num_failing: int, asked: list[int]) -> None:
    verifier = CandidatesVerifier(num_failing=num_failing)
    result, _ = run(verifier)
    check(result)
    assert verifier.asked_from == asked
    asking = [r for r in verifier.of(VerifyRequest) if r.candidates_from]
    assert [r.candidates_from for r in asking] == asked[1:]
    assert {(r.base_position, r.committed_tokens, r.draft_tokens) for r in asking} <= {(6, (), ())}
    stats = result.stats.summary(result.origins)  # type: ignore[attr-defined]
    assert stats["num_rounds"] == len(verifier.of(VerifyRequest))
    assert stats["num_draft_tokens"] == sum(len(r.draft_tokens) for r in verifier.of(VerifyRequest))


@pytest.mark.parametrize("action", [Silent(), Lost(), Late()])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_under_wait_a_fault_at_any_round_of_it_leaves_no_trace(number: int, action: object) -> None:
    """Round 1 rejects, 2 and 3 ask again, 4 carries the choice."""
    verifier = CandidatesVerifier(num_failing=4, script={("verify", number): action})  # type: ignore[dict-item]
    result, _ = run(verifier)
    check(result)
    assert verifier.asked_from == [0, 2, 4], "a replayed round was answered anew"


@pytest.mark.parametrize("code", [RoundErrorCode.UNKNOWN_SESSION, RoundErrorCode.INTERNAL])
@pytest.mark.parametrize("number", [2, 3])
def test_a_session_lost_while_choosing_is_rebuilt_and_the_openings_token_is_not_taken(
    number: int, code: RoundErrorCode
) -> None:
    """The rejection has happened: the target's own token there would be a sample of p, not of the residual.
    The opening of this verifier says 55 where its candidates say otherwise."""
    verifier = CandidatesVerifier(num_failing=4, script={("verify", number): error(code)})
    answer = verifier.answer

    def opening_says_55(request: object) -> list[SessionResponse]:
        replies = answer(request)  # type: ignore[arg-type]
        if isinstance(request, OpenRequest) and request.is_rebuild:
            assert verifier.chain is not None
            assert request.token_ids == TARGET[:6], "all that was accepted is sent again, and nothing else"
            verifier.chain.truncate(6)
            verifier.chain.extend((55,))
            opened = replies[0]
            assert isinstance(opened, Opened)
            replies = [replace(opened, first_token=55, hash=verifier.chain.hash)]
        return replies

    verifier.answer = opening_says_55  # type: ignore[method-assign]
    result, _ = run(verifier)
    check(result)
    assert len(verifier.of(OpenRequest)) == 2
    assert [r.candidates_from for r in verifier.of(VerifyRequest) if r.candidates_from][-1] == 4


def test_a_session_lost_after_the_choice_is_rebuilt_with_it() -> None:
    verifier = CandidatesVerifier(script={("verify", 2): error(RoundErrorCode.UNKNOWN_SESSION)})
    result, _ = run(verifier)
    check(result)
    rebuilt = verifier.of(OpenRequest)[1]
    assert rebuilt.token_ids == TARGET[:7]
    assert result.origins[5] is Origin.TARGET  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [2, 3])
def test_an_unknown_prefix_while_choosing_or_after_is_repaired(number: int) -> None:
    """Whatever position the verifier names: candidates are asked for behind all of the text or not at all."""
    unknown = error(RoundErrorCode.UNKNOWN_PREFIX, position=3, hash=1)
    verifier = CandidatesVerifier(num_failing=2, script={("verify", number): unknown})
    result, _ = run(verifier)
    check(result)


def test_an_unknown_prefix_at_a_place_of_our_text_is_a_rebuild_while_choosing() -> None:
    verifier = CandidatesVerifier(num_failing=2)

    def behind(request: VerifyRequest) -> list[SessionResponse]:
        assert verifier.chain is not None
        verifier.chain.truncate(4)
        code, position, hash_ = RoundErrorCode.UNKNOWN_PREFIX, 4, verifier.chain.hash
        return [replace(error(code, position=position, hash=hash_), round_id=request.round_id)]

    verifier.script[("verify", 2)] = behind  # type: ignore[assignment]
    result, _ = run(verifier)
    check(result)
    assert len(verifier.of(OpenRequest)) == 2


def test_under_first_token_a_timeout_while_choosing_keeps_a_marked_token_and_goes_on() -> None:
    verifier = CandidatesVerifier(num_failing=2, script={("verify", 2): Silent()})
    result, _ = run(verifier, on_timeout=OnTimeout.FIRST_TOKEN)
    assert result.token_ids[4] == WRONG and result.origins[4] is Origin.FALLBACK  # type: ignore[attr-defined]
    assert result.is_verified.count(False) == 1  # type: ignore[attr-defined]
    third = verifier.of(VerifyRequest)[2]
    assert third.candidates_from == 0 and third.committed_tokens == (WRONG,)
    assert third.origins == (Origin.FALLBACK,)


def test_under_fail_a_timeout_while_choosing_ends_the_text() -> None:
    verifier = CandidatesVerifier(num_failing=2, script={("verify", 2): Silent()})
    with pytest.raises(LinkError):
        run(verifier, on_timeout=OnTimeout.FAIL)


def test_a_chosen_stop_token_ends_the_text() -> None:
    target = (*TARGET[:6], EOS, *TARGET[7:])
    verifier = CandidatesVerifier(target=target)
    result, _ = run(verifier)
    assert result.token_ids == (*NEW[:4], EOS)  # type: ignore[attr-defined]
    assert result.origins[-1] is Origin.CORRECTION  # type: ignore[attr-defined]
    assert result.finish_reason is FinishReason.STOP  # type: ignore[attr-defined]
    assert len(verifier.of(VerifyRequest)) == 1


def test_a_stop_string_in_the_accepted_tokens_asks_for_no_correction() -> None:
    verifier = CandidatesVerifier(num_failing=9)
    result, _ = run(verifier, stop_strings=("<13>",))
    assert result.token_ids == NEW[:4] and result.finish_reason is FinishReason.STOP  # type: ignore[attr-defined]
    assert verifier.asked_from == [0]


@pytest.mark.parametrize("num_new", [5, 6])
def test_a_chosen_token_counts_towards_the_length(num_new: int) -> None:
    result, _ = run(CandidatesVerifier(num_failing=3), max_new_tokens=num_new)
    assert result.token_ids == NEW[:num_new]  # type: ignore[attr-defined]
    assert result.finish_reason is FinishReason.LENGTH  # type: ignore[attr-defined]


def test_candidates_nobody_can_choose_from_are_no_verdict() -> None:
    def misplaced(request: VerifyRequest) -> list[SessionResponse]:
        assert verifier.chain is not None
        reply = verifier.answer(replace(request, draft_tokens=()))[0]
        assert isinstance(reply, Verdict)
        return [replace(reply, candidates=(Candidate(5, 0.5),))]

    verifier = FakeVerifier()
    verifier.script = {("verify", n): misplaced for n in range(1, 9)}  # type: ignore[misc]
    session = make_session(verifier, FakeDraft(), depth=0, method=Method.CANDIDATES)
    with pytest.raises(RoundFailedError, match="candidates"):
        list(session.generate())


# ----------------------------------------------------------------------------------------- logprobs


def test_logprobs_belong_to_their_tokens() -> None:
    def entry(position: int) -> TokenLogprobs:
        return TokenLogprobs(-float(position), -0.5, (position,), (-0.1,))

    verifier = FakeVerifier()
    answer = verifier.answer

    def with_logprobs(request: object) -> list[SessionResponse]:
        replies = answer(request)  # type: ignore[arg-type]
        if isinstance(replies[0], Opened):
            return [replace(replies[0], logprobs=entry(replies[0].position - 1))]
        if isinstance(replies[0], Verdict):
            num = replies[0].accepted_len + (replies[0].correction_kind is not CorrectionKind.NONE)
            first = replies[0].position - num
            return [replace(replies[0], logprobs=tuple(entry(first + i) for i in range(num)))]
        return replies

    verifier.answer = with_logprobs  # type: ignore[method-assign]
    verifier.script = {("verify", 2): Silent()}
    session = make_session(verifier, FakeDraft(), num_logprobs=1)
    tokens = [event for event in session.generate() if isinstance(event, TokenEvent)]
    for token in tokens:
        position = token.index + 2
        assert token.logprobs == (None if token.origin is Origin.FALLBACK else entry(position))
    assert [token.logprobs for token in tokens] == list(session.result.logprobs)
    assert sum(token.logprobs is None for token in tokens) == 1
