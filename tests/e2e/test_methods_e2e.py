"""Every verification method over the real wire: edge session, codec, gRPC, engine, method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from support.matrices import one_of
from support.notes import Note
from support.processes.decoding import HostileDraft, Oracle, TieLedger, assert_same_text, decode
from support.processes.faults import Faults, FaultyConnection, FaultyLink
from support.processes.forked import running_verifier
from support.processes.mortal import MortalVerifier
from support.processes.pairs import EMBEDDED, Pair
from test_faults import NUM_NEW, random_rounds
from test_same_text import VOCAB, make_prompt

from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.common.types import (
    FinishReason,
    Method,
    MethodParams,
    Origin,
    SamplingParams,
    SessionRequest,
    StopParams,
    VerifyRequest,
)
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.link.base import Connection, VerifierLink
from outrider.experiments.shared.processes import VerifierProcess
from outrider.experiments.shared.prompts import load_prompts

METHODS = pytest.mark.parametrize("method", list(Method))
FEW_METHODS = pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in (Method.COUPLED, Method.BLOCK) else [pytest.mark.slow])
        for method in Method
    ],
)


@pytest.fixture(scope="module")
def small(tiny_pair: Pair) -> Iterator[VerifierProcess]:
    """A verifier that holds two sessions."""
    with running_verifier("--max-sessions", "2", target=tiny_pair.target) as process:
        yield process


@pytest.fixture(scope="module")
def embedded() -> Iterator[VerifierProcess]:
    with running_verifier() as process:
        yield process


@pytest.fixture(scope="module")
def embedded_draft() -> Iterator[DraftModel]:
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        yield model


def check_whole(result: SessionResult, num_new: int) -> None:
    assert len(result.token_ids) == num_new and result.finish_reason is FinishReason.LENGTH
    assert all(result.is_verified) and result.stats.num_rebuilds == 0 and result.stats.num_timeouts == 0
    assert set(result.origins) <= {Origin.TARGET, Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS}


# ------------------------------------------------------------------------------------------- texts


@METHODS
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_at_temperature_0_every_method_writes_what_cloud_only_writes(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    random_draft: DraftModel,
    tiny_oracle: Oracle,
    method: Method,
    seed: int,
) -> None:
    prompt, sampling, ledger = make_prompt(seed), SamplingParams(temperature=0.0, seed=seed), TieLedger()
    reference = decode(tiny_verifier.address, prompt, sampling, num_new=32).token_ids
    hostile = HostileDraft([*prompt, *reference], VOCAB)
    for draft in (own_draft, random_draft, hostile):

        def again(prefix: Sequence[int], n: int, draft: object = draft) -> Sequence[int]:
            text = [*prompt, *prefix]
            result = decode(
                tiny_verifier.address, text, sampling, draft=draft, num_new=n, depth=4, method=method
            )
            return result.token_ids

        assert_same_text(reference, again, prompt, sampling, tiny_oracle, ledger)
    ledger.check()


@pytest.mark.parametrize(
    ("method", "drafting"), one_of(3, list(Method), [("own", 1), ("own", 4), ("random", 8)])
)
def test_a_text_is_whole_and_a_function_of_its_seed(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    random_draft: DraftModel,
    method: Method,
    drafting: tuple[str, int],
) -> None:
    """Whatever draws a method makes are keyed: the transport and another run change nothing."""
    name, depth = drafting
    draft = own_draft if name == "own" else random_draft

    def write(seed: int, **told: Any) -> SessionResult:
        sampling = SamplingParams(temperature=0.9, seed=seed, top_p=0.95)
        told |= {"draft": draft, "num_new": NUM_NEW, "method": method}
        result = decode(tiny_verifier.address, make_prompt(depth), sampling, **told)
        check_whole(result, NUM_NEW)
        return result

    stream, unary = (write(depth, depth=depth, transport=transport) for transport in ("stream", "unary"))
    assert (stream.token_ids, stream.origins) == (unary.token_ids, unary.origins)
    assert Origin.ACCEPTED in stream.origins or draft is random_draft
    assert write(depth + 100).token_ids != stream.token_ids


@METHODS
def test_copies_are_certain_drafts_for_every_method(tiny_verifier: VerifierProcess, method: Method) -> None:
    """Prompt lookup: q = 1, told as a support of one id where a support is asked for."""
    draft = PromptLookupModel(VOCAB, "")
    prompt = make_prompt(2)[:6] * 4
    for temperature, depth in ((0.0, 4), (0.9, 3)):
        sampling = SamplingParams(temperature=temperature, seed=2, logit_bias=((7, 8.0), (8, 8.0)))
        result = decode(
            tiny_verifier.address, prompt, sampling, draft=draft, num_new=NUM_NEW, depth=depth, method=method
        )
        check_whole(result, NUM_NEW)
        assert any(record.num_draft_tokens for record in result.stats.rounds)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Method.SPARSE, {"support_size": 1}),
        (Method.BLOCK, {"support_size": 64}),
        (Method.THRESHOLD, {"method_params": MethodParams(threshold_pass=0.9, threshold_ratio=0.9)}),
        (Method.TYPICAL, {"method_params": MethodParams(typical_epsilon=0.01, typical_delta=0.01)}),
    ],
)
def test_parameters_of_methods_reach_them(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, method: Method, options: dict[str, object]
) -> None:
    usual, other = (_decode_with(tiny_verifier, own_draft, method, more) for more in ({}, options))
    assert usual.token_ids != other.token_ids


def test_candidates_come_in_lots_of_the_size_asked_for(
    tiny_verifier: VerifierProcess, own_draft: DraftModel
) -> None:
    """The same candidates, so the same text; in small lots more rounds, in large ones more bytes."""
    one, usual, many = (
        _decode_with(
            tiny_verifier, own_draft, Method.CANDIDATES, {"method_params": MethodParams(num_candidates=num)}
        )
        for num in (1, None, 64)
    )
    assert one.token_ids == usual.token_ids == many.token_ids
    assert len(one.stats.rounds) > len(usual.stats.rounds) >= len(many.stats.rounds)
    assert many.stats.bytes_down > 1.5 * usual.stats.bytes_down


def _decode_with(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, method: Method, options: dict[str, object]
) -> SessionResult:
    sampling = SamplingParams(temperature=1.0, seed=3)
    told: dict[str, Any] = {"method": method, "num_new": NUM_NEW, **options}
    result = decode(tiny_verifier.address, make_prompt(3), sampling, draft=own_draft, **told)
    check_whole(result, NUM_NEW)
    return result


@FEW_METHODS
def test_a_stop_token_ends_the_text_wherever_it_falls(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, method: Method
) -> None:
    """The whole text again with each of its tokens as the stop: what comes before is the same."""
    sampling = SamplingParams(temperature=0.8, seed=6)
    whole = decode(tiny_verifier.address, make_prompt(6), sampling, draft=own_draft, num_new=9, method=method)
    for token_id in dict.fromkeys(whole.token_ids):
        stop = StopParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=(token_id,))
        result = decode(
            tiny_verifier.address, make_prompt(6), sampling, draft=own_draft, stop=stop, method=method
        )
        end = whole.token_ids.index(token_id) + 1
        assert result.token_ids == whole.token_ids[:end]
        assert result.finish_reason is FinishReason.STOP


@METHODS
def test_logprobs_come_with_every_token_but_a_chosen_one(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, method: Method
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=9)
    result = decode(
        tiny_verifier.address,
        make_prompt(9),
        sampling,
        draft=own_draft,
        num_new=24,
        method=method,
        num_logprobs=2,
    )
    assert len(result.logprobs) == 24
    for origin, entry in zip(result.origins, result.logprobs, strict=True):
        if method is Method.CANDIDATES and origin is Origin.CORRECTION:
            assert entry is None
            continue
        assert entry is not None and entry.raw_logprob <= 0 and entry.processed_logprob <= 0
        assert len(entry.top_token_ids) == 2 and entry.top_logprobs[0] >= entry.raw_logprob - 1e-6


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("method", "transport"),
    one_of(2, list(Method), ["stream", "unary"]),
)
def test_under_wait_faults_on_the_link_leave_no_trace(
    tiny_verifier: VerifierProcess, random_draft: DraftModel, method: Method, transport: str
) -> None:
    """A replayed round gives the same verdict, so the text is that of a run without faults."""

    def run(wrap: Callable[[VerifierLink], VerifierLink]) -> SessionResult:
        return decode(
            tiny_verifier.address,
            make_prompt(5),
            SamplingParams(temperature=0.8, seed=5),
            draft=random_draft,
            num_new=NUM_NEW,
            depth=2,
            transport=transport,
            deadline_s=0.4,
            method=method,
            wrap=wrap,
        )

    expected = run(lambda link: link)
    faults = Faults(frozenset({4, 9}), frozenset({6}), frozenset({5}), frozenset({7, 10}))
    result = run(lambda link: FaultyLink(link, faults))  # type: ignore[arg-type,return-value]
    assert faults.fired == {"lose_reply": 2, "duplicate": 1, "late_older": 1, "drop_stream": 2}
    assert (result.token_ids, result.origins) == (expected.token_ids, expected.origins)


def test_faults_while_candidates_are_asked_for_leave_no_trace(
    tiny_verifier: VerifierProcess, own_draft: DraftModel
) -> None:
    """One candidate at a time and a draft near its target: most rejections take several rounds."""

    def run(wrap: Callable[[VerifierLink], VerifierLink]) -> SessionResult:
        return decode(
            tiny_verifier.address,
            make_prompt(7),
            SamplingParams(temperature=1.0, seed=7),
            draft=own_draft,
            num_new=NUM_NEW,
            depth=2,
            deadline_s=0.4,
            method=Method.CANDIDATES,
            method_params=MethodParams(num_candidates=1),
            wrap=wrap,
        )

    watched = Faults()
    expected = run(lambda link: FaultyLink(link, watched))  # type: ignore[arg-type,return-value]
    asking = [n for n, request in enumerate(watched.sent, 1) if request.candidates_from]
    assert len(asking) >= 4, "nothing was asked for: the test proves little"
    faults = Faults(
        lose_reply=frozenset(asking[::2]), drop_stream=frozenset(asking[1::2]), duplicate=frozenset(asking)
    )
    result = run(lambda link: FaultyLink(link, faults))  # type: ignore[arg-type,return-value]
    assert faults.fired["lose_reply"] >= 1 and faults.fired["drop_stream"] >= 1
    assert (result.token_ids, result.origins) == (expected.token_ids, expected.origins)


def evict_others(address: str) -> None:
    """Opens as many sessions as `small` holds, so that those of before are gone."""
    with grpc.insecure_channel(address) as channel:
        stub = outrider_pb2_grpc.VerifierStub(channel)
        for name in (1, 2, 3):
            opening = pb.OpenRequest(session_id=bytes([name]) * 16, token_ids=[5, 6], num_prompt_tokens=2)
            assert stub.Open(opening).opened.position == 3


@METHODS
def test_a_session_that_is_lost_is_rebuilt_and_the_text_finished(
    small: VerifierProcess, own_draft: DraftModel, method: Method
) -> None:
    result = decode(
        small.address,
        make_prompt(3),
        SamplingParams(temperature=0.8, seed=3),
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        method=method,
        on_token=lambda index: evict_others(small.address) if index == 15 else None,
    )
    assert result.stats.num_rebuilds == 1, "the eviction did not fire"
    assert len(result.token_ids) == NUM_NEW and all(result.is_verified)


def test_a_session_lost_while_candidates_are_asked_for_leaves_no_trace(
    small: VerifierProcess, own_draft: DraftModel
) -> None:
    """The opening's own token is not taken, and candidates are keyed by position and number."""
    num_evicted = 0

    class Evicting(FaultyConnection):
        def send(self, request: SessionRequest) -> None:
            nonlocal num_evicted
            if isinstance(request, VerifyRequest) and request.candidates_from and num_evicted < 2:
                num_evicted += 1
                evict_others(small.address)
            super().send(request)

    class EvictingLink(FaultyLink):
        def connect(self, timeout_s: float) -> Connection:
            return Evicting(self._link.connect(timeout_s), self._faults)  # type: ignore[return-value]

    def run(wrap: Callable[[VerifierLink], VerifierLink]) -> SessionResult:
        return decode(
            small.address,
            make_prompt(7),
            SamplingParams(temperature=1.0, seed=7),
            draft=own_draft,
            num_new=NUM_NEW,
            depth=2,
            method=Method.CANDIDATES,
            method_params=MethodParams(num_candidates=1),
            wrap=wrap,
        )

    expected = run(lambda link: link)
    result = run(lambda link: EvictingLink(link, Faults()))  # type: ignore[arg-type,return-value]
    assert num_evicted == 2 and result.stats.num_rebuilds == 2
    assert (result.token_ids, result.origins) == (expected.token_ids, expected.origins)


def test_under_wait_a_killed_verifier_is_rebuilt_and_the_text_finished(
    mortal: MortalVerifier, own_draft: DraftModel
) -> None:
    result = decode(
        mortal.address,
        make_prompt(3),
        SamplingParams(temperature=0.8, seed=3),
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        method=Method.CANDIDATES,
        on_token=mortal.dies_at(15),
    )
    assert mortal.num_deaths == 1 and result.stats.num_rebuilds == 1
    assert len(result.token_ids) == NUM_NEW and all(result.is_verified)


@METHODS
def test_under_first_token_lost_rounds_are_bridged_and_aligned_again(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, method: Method
) -> None:
    faults = Faults(lose_reply=random_rounds(4))
    result = decode(
        tiny_verifier.address,
        make_prompt(4),
        SamplingParams(temperature=0.8, seed=4),
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        on_timeout=OnTimeout.FIRST_TOKEN,
        deadline_s=0.4,
        method=method,
        wrap=lambda link: FaultyLink(link, faults),  # type: ignore[arg-type,return-value]
    )
    assert faults.fired["lose_reply"] >= 1
    assert len(result.token_ids) == NUM_NEW and result.finish_reason is FinishReason.LENGTH
    assert Origin.FALLBACK in result.origins and result.stats.num_rebuilds == 0


# -------------------------------------------------------------------------------- the embedded pair


@METHODS
@pytest.mark.parametrize("num_prompts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_embedded_pair_writes_whole_texts_within_100_bytes_a_drafted_token(
    embedded: VerifierProcess,
    embedded_draft: DraftModel,
    num_prompts: int,
    method: Method,
    note: Note,
) -> None:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    results = []
    for seed, prompt in enumerate(load_prompts(limit=num_prompts)):
        faults = Faults()
        result = decode(
            embedded.address,
            tokenizer.encode(prompt.text),
            SamplingParams(temperature=0.7, seed=seed),
            draft=embedded_draft,
            num_new=48,
            method=method,
            wrap=lambda link, faults=faults: FaultyLink(link, faults),  # type: ignore[misc]
        )
        check_whole(result, 48)
        results.append(result)
        drafting = [request for request in faults.sent if request.draft_tokens]
        assert drafting
        has_supports = method in (Method.SPARSE, Method.BLOCK)
        has_probs = not has_supports and method is not Method.TYPICAL
        for request in drafting:
            num_draft_tokens = len(request.draft_tokens)
            assert len(request.q_support) == has_supports * num_draft_tokens
            assert len(request.q_token_probs) == has_probs * num_draft_tokens
            assert all(len(s.token_ids) <= 16 for s in request.q_support)
    stats = [result.stats.summary(result.origins) for result in results]
    bytes_up = [float(s["bytes_up_per_draft_token"]) for s in stats]  # type: ignore[arg-type]
    assert max(bytes_up) <= 100
    drafted = sum(int(s["num_draft_tokens"]) for s in stats)  # type: ignore[call-overload]
    accepted = sum(int(s["num_accepted_tokens"]) for s in stats)  # type: ignore[call-overload]
    assert accepted / drafted > 0.2
    up = sum(bytes_up) / len(bytes_up)
    note(f"{method}: {up:.1f} bytes up a drafted token, {accepted}/{drafted} accepted")


@FEW_METHODS
def test_the_embedded_pair_at_temperature_0_writes_what_cloud_only_writes(
    embedded: VerifierProcess, embedded_draft: DraftModel, method: Method
) -> None:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    oracle, ledger = Oracle(EMBEDDED / "target"), TieLedger()
    prompt_ids = tokenizer.encode(load_prompts(limit=1)[0].text)
    sampling = SamplingParams(temperature=0.0)
    reference = decode(embedded.address, prompt_ids, sampling, num_new=48).token_ids

    def again(prefix: Sequence[int], n: int) -> Sequence[int]:
        text = [*prompt_ids, *prefix]
        result = decode(
            embedded.address, text, sampling, draft=embedded_draft, num_new=n, depth=5, method=method
        )
        return result.token_ids

    assert_same_text(reference, again, prompt_ids, sampling, oracle, ledger)
    ledger.check()
