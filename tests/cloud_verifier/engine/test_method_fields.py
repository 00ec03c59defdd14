"""What a method wants in a request, and that no request whatever gets anything but a verdict or INVALID."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import FakeBackend
from test_engine import GREEDY, Harness

from outrider.cloud_verifier.config import SCOPE, ServeConfig, parse_methods
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common import codec
from outrider.common.alignment import TokenChain
from outrider.common.config.loader import load_config
from outrider.common.errors import InvalidFieldError, UsageError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CorrectionKind,
    GeneratedTokens,
    Method,
    MethodParams,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Support,
    Verdict,
    VerifyRequest,
)

NAME = b"s" * 16
CERTAIN = Support((4,), (1,))
WITH_SUPPORT = (Method.SPARSE, Method.BLOCK)
WITH_PROBS = (Method.CANDIDATES, Method.SHORTCUT, Method.SCALAR_RESIDUAL, Method.THRESHOLD)
HUGE = 2**32 - 1


def ask(method: Method, **fields: Any) -> Verdict | RoundError:
    """One round in a new session of `method`; whatever was wrong with it, a good one works after it."""
    harness = Harness()
    session_id, opened = harness.open(
        method=method, sampling=SamplingParams(temperature=1.0), ignore_eos=True
    )
    reply = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash, **fields))
    assert isinstance(reply, Verdict | RoundError)
    if isinstance(reply, RoundError):
        after = harness.ask(session_id, VerifyRequest(2, opened.position, opened.hash))
        assert isinstance(after, Verdict) and after.position == opened.position + 1
    return reply


def field_of(reply: object) -> str:
    assert isinstance(reply, RoundError) and reply.code is RoundErrorCode.INVALID, reply
    return reply.field


@pytest.mark.parametrize("method", list(Method))
def test_each_method_takes_what_it_looks_at_and_refuses_what_it_would_ignore(method: Method) -> None:
    draft = {"draft_tokens": (4,)}
    with_support = ask(method, **draft, q_support=(CERTAIN,))
    with_probs = ask(method, **draft, q_token_probs=(0.5,))
    plain = ask(method, **draft)
    if method in WITH_SUPPORT:
        assert isinstance(with_support, Verdict)
        assert field_of(plain) == "q_support" and field_of(with_probs) == "q_support"
        both = ask(method, **draft, q_support=(CERTAIN,), q_token_probs=(1.0,))
        assert field_of(both) == "q_token_probs"
    else:
        assert field_of(with_support) == "q_support"
        assert str(method) in with_support.message  # type: ignore[union-attr]
    if method in WITH_PROBS:
        assert isinstance(with_probs, Verdict) and field_of(plain) == "q_token_probs"
    elif method is Method.TYPICAL:
        assert isinstance(plain, Verdict) and field_of(with_probs) == "q_token_probs"
    elif method is Method.COUPLED:
        assert isinstance(plain, Verdict) and isinstance(with_probs, Verdict)
    assert isinstance(ask(method), Verdict), "no draft needs nothing"


@pytest.mark.parametrize("method", list(Method))
def test_candidates_are_asked_for_in_their_method_alone_and_with_nothing_else(method: Method) -> None:
    reply = ask(method, candidates_from=4)
    if method is not Method.CANDIDATES:
        assert field_of(reply) == "candidates_from"
        return
    assert isinstance(reply, Verdict) and len(reply.candidates) == 4
    assert field_of(ask(method, candidates_from=4, committed_tokens=(3,))) == "candidates_from"
    fields = {"draft_tokens": (3,), "q_token_probs": (0.5,)}
    assert field_of(ask(method, candidates_from=4, **fields)) == "candidates_from"
    assert isinstance(ask(method, candidates_from=HUGE), Verdict)


def test_ids_of_a_support_are_the_tokenizers() -> None:
    support = Support((4, 32), (1, 1))
    assert field_of(ask(Method.SPARSE, draft_tokens=(4,), q_support=(support,))) == "q_support"
    largest = Support((4, 31), (1, HUGE))
    assert isinstance(ask(Method.SPARSE, draft_tokens=(4,), q_support=(largest,)), Verdict)


@pytest.mark.parametrize(
    ("method", "name", "good", "bad"),
    [
        (Method.THRESHOLD, "threshold_pass", (1e-6, 1.0), (0.0, -0.1, 1.01, math.inf, math.nan)),
        (Method.THRESHOLD, "threshold_ratio", (1e-6, 1.0, 50.0), (0.0, -1.0, math.inf, math.nan)),
        (Method.TYPICAL, "typical_epsilon", (1e-6, 1.0), (0.0, -0.1, 1.01, math.nan)),
        (Method.TYPICAL, "typical_delta", (1e-6, 1.0), (0.0, -0.1, 1.01, math.nan)),
        (Method.CANDIDATES, "num_candidates", (1, 64), (0, 65, HUGE)),
    ],
)
def test_a_methods_parameters_have_a_range_and_belong_to_it(
    method: Method, name: str, good: tuple[float, ...], bad: tuple[float, ...]
) -> None:
    def opened(method: Method, value: float) -> object:
        params = MethodParams(**{name: value})  # type: ignore[arg-type]
        return Harness().ask(NAME, OpenRequest(NAME, (5, 6), 2, GREEDY, method, params))

    for value in good:
        assert isinstance(opened(method, value), Opened), value
    for value in bad:
        assert field_of(opened(method, value)) == f"method_params.{name}"
    for other in Method:
        if other is not method:
            assert field_of(opened(other, good[0])) == f"method_params.{name}"


# ------------------------------------------------------------------------------------------ any request

MAX_CONTEXT = 64
token_ids = st.one_of(st.integers(0, 31), st.integers(0, 31), st.sampled_from((32, 34, HUGE)))
probs = st.one_of(
    st.floats(2.0**-149, 1.0, width=32),
    st.sampled_from((1.0, 2.0**-149, 0.0, -1.0, 2.0, math.nan, math.inf)),
)
weights = st.one_of(st.integers(1, 2**14), st.sampled_from((0, 1, HUGE)))


@st.composite
def drafts(draw: st.DrawFn) -> dict[str, Any]:
    """A draft and what may come with it: often fitting, sometimes not."""
    is_wild = draw(st.booleans())
    ids = token_ids if is_wild else st.integers(0, 31)
    tokens = draw(st.lists(ids, max_size=18 if is_wild else 6))
    fields: dict[str, Any] = {"draft_tokens": tokens}
    num = len(tokens) if draw(st.integers(0, 4)) else draw(st.integers(0, 7))
    if draw(st.booleans()):
        fields["q_token_probs"] = [
            draw(probs if is_wild else st.floats(2.0**-20, 1.0, width=32)) for _ in range(num)
        ]
    if draw(st.booleans()):
        fields["q_support"] = [draw(supports(tokens[i] if i < len(tokens) else 0)) for i in range(num)]
    if is_wild and draw(st.booleans()):
        fields["hard_mask"] = draw(st.binary(max_size=3))
    if draw(st.integers(0, 7)) == 0:
        fields["parents"] = [draw(st.integers(-1, max(i - 1, -1))) for i in range(num)]
    return fields


@st.composite
def supports(draw: st.DrawFn, drafted: int) -> pb.Support:
    if draw(st.integers(0, 9)) == 0:
        return pb.Support(token_ids=draw(st.lists(token_ids, max_size=70)), weights=draw(st.lists(weights)))
    ids = draw(st.lists(st.integers(0, 31), max_size=8, unique=True))
    ids = [drafted, *(i for i in ids if i != drafted)]
    return pb.Support(token_ids=ids, weights=[draw(weights) for _ in ids])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """What of a request does not depend on where the session is, and where it builds on."""
    fields = draw(drafts()) if draw(st.integers(0, 3)) else {}
    if draw(st.integers(0, 2)) == 0:
        fields["committed_tokens"] = draw(st.lists(token_ids, min_size=1, max_size=4))
        if draw(st.booleans()):
            fields["origins"] = [pb.ORIGIN_CORRECTION] * len(fields["committed_tokens"])
    if draw(st.integers(0, 3)) == 0:
        fields["candidates_from"] = draw(st.sampled_from((1, 4, HUGE)))
    fields["pipelined"] = draw(st.booleans())
    fields["go_back"] = draw(st.sampled_from((0, 0, 0, 0, 1, 5)))
    fields["is_generate"] = draw(st.integers(0, 7)) == 0
    return fields


ALL_BUT_31 = tuple((token_id,) for token_id in range(31))
samplings = st.sampled_from(
    (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.001, seed=2**64 - 1),
        SamplingParams(temperature=1000.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=2, min_p=0.2, repetition_penalty=1.3, min_new_tokens=30),
        SamplingParams(temperature=0.8, logit_bias=((3, 1e4), (4, -1e4)), bad_words=((3,), (5, 6))),
        SamplingParams(temperature=1.0, bad_words=(*ALL_BUT_31, (31, 31))),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(list(Method)),
    sampling=samplings,
    rounds=st.lists(requests(), min_size=1, max_size=6),
    ignore_eos=st.booleans(),
    num_logprobs=st.sampled_from((0, 0, 1, 20)),
)
def test_any_request_gets_a_verdict_or_invalid_and_the_session_stays_aligned(
    method: Method,
    sampling: SamplingParams,
    rounds: list[dict[str, Any]],
    ignore_eos: bool,
    num_logprobs: int,
) -> None:
    harness = Harness(FakeBackend(max_context=MAX_CONTEXT))
    _, opened = harness.open(
        NAME[0], sampling=sampling, method=method, ignore_eos=ignore_eos, num_logprobs=num_logprobs
    )
    session_id = NAME[:1] * 16
    chain = TokenChain([5, 6, 7, opened.first_token])
    for round_id, fields in enumerate(rounds, 1):
        base = max(3, chain.position - fields.pop("go_back"))
        message = {"round_id": round_id, "base_position": base, "base_hash": chain.hash_at(base)}
        if fields.pop("is_generate"):
            num_new = len(fields.get("draft_tokens", ()))
            committed = fields.get("committed_tokens", ())
            generate(harness, session_id, chain, message | {"committed_tokens": committed}, num_new)
            continue
        try:
            request = codec.decode_verify(pb.VerifyRequest(**message, **fields))
        except InvalidFieldError as error:
            assert error.field in fields
            continue
        reply = harness.ask(session_id, request)
        if isinstance(reply, RoundError):
            assert reply.code in (RoundErrorCode.INVALID, RoundErrorCode.UNIMPLEMENTED), reply
            assert reply.field in (
                *message,
                *fields,
                "q_support",
                "q_token_probs",
                "committed_tokens",
                "draft_tokens",
            )
            assert (reply.position, reply.hash) == (chain.position, chain.hash), "nothing was changed"
            continue
        assert isinstance(reply, Verdict)
        follow(chain, request, reply)
        num_new = reply.accepted_len + (reply.correction_kind is not CorrectionKind.NONE)
        assert len(reply.logprobs) == (num_new if num_logprobs else 0)
        assert harness.ask(session_id, request) is reply
    (session,) = harness.engine.sessions
    assert session.chain.token_ids == chain.token_ids


def follow(chain: TokenChain, request: VerifyRequest, verdict: Verdict) -> None:
    chain.truncate(request.base_position)
    chain.extend([*request.committed_tokens, *request.draft_tokens[: verdict.accepted_len]])
    if verdict.correction_kind is not CorrectionKind.NONE:
        assert 0 <= verdict.correction < 32
        chain.extend([verdict.correction])
    assert (chain.position, chain.hash) == (verdict.position, verdict.hash)
    assert all(0 <= c.token_id < 32 and 0 <= c.target_prob <= 1 + 1e-6 for c in verdict.candidates)
    assert codec.decode_verify_response(codec.encode_verify_response(verdict)).position == verdict.position


def generate(
    harness: Harness, session_id: bytes, chain: TokenChain, message: dict[str, Any], num_new: int
) -> None:
    try:
        request = codec.decode_generate(pb.GenerateRequest(**message, max_new_tokens=num_new))
    except InvalidFieldError as error:
        assert error.field in message
        return
    replies = harness.submit(session_id, request)
    harness.settle()
    (first, *_) = replies
    if isinstance(first, RoundError):
        assert first.code is RoundErrorCode.INVALID and first.field in (*message, "max_new_tokens")
        return
    chain.truncate(request.base_position)
    chain.extend(request.committed_tokens)
    for reply in replies:
        assert isinstance(reply, GeneratedTokens)
        chain.extend(reply.token_ids)
        assert (chain.position, chain.hash) == (reply.position, reply.hash)


@pytest.mark.parametrize("method", list(Method))
def test_where_bad_words_leave_no_token_id_0_is_certain(method: Method) -> None:
    harness = Harness()
    sampling = SamplingParams(temperature=1.0, bad_words=(*ALL_BUT_31, (31, 31)))
    session_id, opened = harness.open(prompt=(5,), sampling=sampling, method=method, ignore_eos=True)
    assert opened.first_token == 31
    for round_id, drafted in enumerate((7, 0), 1):
        support = (Support((drafted,), (1,)),) if method in WITH_SUPPORT else ()
        probs = (1.0,) if method in WITH_PROBS else ()
        request = VerifyRequest(
            round_id, opened.position, opened.hash, (), (), (drafted,), probs, q_support=support
        )
        verdict = harness.ask(session_id, request)
        assert isinstance(verdict, Verdict) and verdict.accepted_len == (drafted == 0)
        found = {c.token_id for c in verdict.candidates} or {verdict.correction}
        assert found == ({31} if drafted == 0 else {0})


def test_a_method_the_operator_left_out_is_refused_by_name() -> None:
    harness = Harness(methods=(Method.COUPLED, Method.SPARSE))
    error = harness.ask(NAME, OpenRequest(NAME, (5,), 1, GREEDY, Method.THRESHOLD))
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.UNIMPLEMENTED, "method")
    assert "coupled, sparse" in error.message


def test_an_operator_names_the_methods_and_a_name_that_is_none_is_an_error_with_the_nearest() -> None:
    def described(methods: str) -> list[str]:
        return list(make_model_info(FakeBackend(), ServeConfig(methods=methods)).methods)

    assert described("") == list(Method)
    assert described("sparse, coupled,") == ["coupled", "sparse"]
    with pytest.raises(UsageError, match="'spars'; did you mean sparse"):
        parse_methods("coupled,spars")


def test_a_variable_or_a_file_restricts_them_too(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("methods: coupled, block\n")
    loaded = load_config(ServeConfig, scope=SCOPE, yaml_path=file, env={})
    assert parse_methods(loaded.value.methods) == (Method.COUPLED, Method.BLOCK)
    env = {"OUTRIDER_VERIFIER_METHODS": "typical"}
    loaded = load_config(ServeConfig, scope=SCOPE, yaml_path=file, env=env)
    assert parse_methods(loaded.value.methods) == (Method.TYPICAL,)
