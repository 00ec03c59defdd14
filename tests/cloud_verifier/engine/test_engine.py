"""The engine, step by step, on a fake target: admission, batching, commits, replays, errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from support.fakes import FakeBackend

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.config import QueueLimits
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.finish import MakeRows, make_rows
from outrider.cloud_verifier.engine.gathering import ACTIVE_FOR_S
from outrider.cloud_verifier.engine.idle_time import SWEEP_S
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.common.alignment import TokenChain
from outrider.common.codec.responses_in import decode_open_response
from outrider.common.codec.responses_out import encode_open_response
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.types import (
    CancelRequest,
    Closed,
    CloseRequest,
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Limits,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=11)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)


def make_model(backend: FakeBackend, **limits: int) -> ModelInfo:
    defaults = {
        "max_context": backend.max_context,
        "max_draft_tokens": 16,
        "max_tree_nodes": 16,
        "max_message_bytes": 1 << 20,
        "max_sessions": 8,
        "session_idle_ttl_ms": 60_000,
    }
    return ModelInfo(
        protocol_version=1,
        model_id="fake",
        target_fingerprint=backend.fingerprint,
        tokenizer_fingerprint=backend.tokenizer_fingerprint,
        dtype="float32",
        device="cpu",
        eos_token_ids=backend.eos_token_ids,
        num_tokens=backend.num_tokens,
        limits=Limits(**(defaults | limits)),
        methods=tuple(Method),
        server_version="test",
    )


class Harness:
    """An engine whose steps the test takes itself."""

    def __init__(
        self,
        backend: FakeBackend | None = None,
        max_step_tokens: int = 512,
        queue_limits: QueueLimits | None = None,
        tenant_max_sessions: int = 0,
        tenant_max_sampling_ids: int = 0,
        min_forward_s: float = 0.0,
        drafter: CoLocatedDrafter | None = None,
        methods: tuple[Method, ...] = tuple(Method),
        make_rows: MakeRows = make_rows,
        grammars: GrammarStore | None = None,
        **limits: int,
    ) -> None:
        self.backend = backend or FakeBackend()
        self.clock = Clock()
        model = make_model(self.backend, **limits)
        fingerprint, sources = (drafter.fingerprint, drafter.sources) if drafter else ("", ())
        self.engine = Engine(
            self.backend,
            dataclasses.replace(model, methods=methods, draft_fingerprint=fingerprint, draft_sources=sources),
            drafter=drafter,
            grammars=grammars,
            max_step_tokens=max_step_tokens,
            queue_limits=queue_limits,
            tenant_max_sessions=tenant_max_sessions,
            tenant_max_sampling_ids=tenant_max_sampling_ids,
            min_forward_s=min_forward_s,
            clock=self.clock,
            make_rows=make_rows,
        )

    def submit(
        self, session_id: bytes, request: SessionRequest, tenant: str = "default"
    ) -> list[SessionResponse]:
        replies: list[SessionResponse] = []
        arrival_ns = int(self.clock.now_s * 1e9)
        self.engine.submit(Job(session_id, request, replies.append, arrival_ns, tenant))
        return replies

    def pass_time(self, seconds: float) -> None:
        """Lets time pass at an engine without work, which looks for idle sessions each second."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.now_s = min(end_s, self.clock.now_s + SWEEP_S)
            self.engine.step()

    def settle(self) -> None:
        self.engine.step()
        while self.engine.step():
            pass
        self.engine.check_integrity()
        for session in self.engine.sessions:
            if session.kv is not None:
                kept = session.kv.tokens
                assert kept == session.chain.token_ids[: len(kept)], "KV and text drifted apart"

    def ask(self, session_id: bytes, request: SessionRequest, tenant: str = "default") -> SessionResponse:
        replies = self.submit(session_id, request, tenant)
        self.settle()
        final = [r for r in replies if not isinstance(r, Progress)]
        assert len(final) == 1, final
        return final[0]

    def open(
        self,
        name: int = 1,
        prompt: Sequence[int] = (5, 6, 7),
        sampling: SamplingParams = GREEDY,
        tenant: str = "default",
        **fields: object,
    ) -> tuple[bytes, Opened]:
        session_id = bytes([name]) * 16
        request = OpenRequest(session_id, tuple(prompt), len(prompt), sampling, **fields)  # type: ignore[arg-type]
        opened = self.ask(session_id, request, tenant)
        assert isinstance(opened, Opened), opened
        return session_id, opened

    def reference(self, prompt: Sequence[int], sampling: SamplingParams, num_new: int) -> list[int]:
        """What the target alone writes, computed here and not by the engine."""
        tokens = list(prompt)
        for _ in range(num_new):
            scores = process_logits(
                np,
                self.backend.logits_after(tokens)[None],
                sampling,
                prompt_ids=list(prompt),
                output_ids=tokens[len(prompt) :],
                num_tokens=self.backend.num_tokens,
            )
            tokens.append(int(choose(scores, sampling, [len(tokens)])[0]))
        return tokens[len(prompt) :]


def round_of(chain: TokenChain, round_id: int, draft: Sequence[int] = (), **fields: object) -> VerifyRequest:
    return VerifyRequest(
        round_id,
        chain.position,
        chain.hash,
        draft_tokens=tuple(draft),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafted", [0, 1, 4, 9])
def test_rounds_give_the_targets_own_text_whatever_is_drafted(
    sampling: SamplingParams, num_drafted: int
) -> None:
    harness = Harness()
    prompt = [5, 6, 7]
    expected = harness.reference(prompt, sampling, 40)
    session_id, opened = harness.open(prompt=prompt, sampling=sampling, ignore_eos=True)
    chain = TokenChain([*prompt, opened.first_token])
    rng = np.random.default_rng(num_drafted)
    for round_id in itertools.count(1):
        done = chain.position - len(prompt)
        if done + num_drafted + 1 > len(expected):
            break
        right = expected[done : done + num_drafted]
        num_right = int(rng.integers(0, num_drafted + 1))
        draft = right[:num_right] + [int(i) for i in rng.integers(0, 32, num_drafted - num_right)]
        verdict = harness.ask(session_id, round_of(chain, round_id, draft))
        assert isinstance(verdict, Verdict)
        assert num_right <= verdict.accepted_len <= num_drafted
        is_full = verdict.accepted_len == num_drafted
        kind = CorrectionKind.BONUS if is_full else CorrectionKind.CORRECTION
        assert verdict.correction_kind is kind
        chain.extend([*draft[: verdict.accepted_len], verdict.correction])
        assert (chain.position, chain.hash) == (verdict.position, verdict.hash)
    assert chain.token_ids[3:] == expected[: chain.position - 3]
    assert chain.position > 20


class SlowBackend(FakeBackend):
    clock: Clock

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        self.clock.now_s += 0.005 + 0.001 * sum(len(item.token_ids) for item in items)
        return super().forward(items)


def test_all_times_of_a_round_are_of_the_engines_own_clock() -> None:
    harness = Harness(SlowBackend(), min_forward_s=0.02)
    harness.backend.clock = harness.clock
    session_id, opened = harness.open(1, (5, 6, 7))
    replies = harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash, (), (), (3, 4)))
    harness.clock.now_s += 0.5
    harness.settle()
    (verdict,) = replies
    assert isinstance(verdict, Verdict)
    metrics = verdict.metrics
    assert metrics.queue_ns == pytest.approx(0.5e9, abs=2)
    assert metrics.forward_ns == pytest.approx(0.02e9, abs=2), "8 ms of 3 tokens, and the rest slept"
    assert metrics.total_ns == pytest.approx(0.52e9, abs=2)


def test_an_opening_says_what_a_step_takes_once_steps_of_several_sizes_were_seen() -> None:
    harness = Harness(SlowBackend())
    harness.backend.clock = harness.clock
    _, first = harness.open(1, [5] * 40)
    assert (first.step_fixed_ns, first.step_session_ns, first.step_token_ns) == (0, 0, 0)
    harness.open(2, (5, 6, 7))
    _, third = harness.open(3, (7, 8, 9))
    assert (third.step_fixed_ns, third.step_token_ns) == (pytest.approx(5e6), pytest.approx(1e6))
    same = decode_open_response(encode_open_response(third))
    assert isinstance(same, Opened)
    assert (same.step_fixed_ns, same.step_token_ns) == (third.step_fixed_ns, third.step_token_ns)


def test_a_steps_times_are_noted_after_its_answers_and_before_the_next_step() -> None:
    harness = Harness(SlowBackend())
    harness.backend.clock, engine = harness.clock, harness.engine
    replies = harness.submit(b"\1" * 16, OpenRequest(b"\1" * 16, (5, 6, 7), 3, GREEDY))
    assert engine.step() and len(replies) == 1
    assert engine.observer.batch_size.total == 0 and engine.backlog.step_s(3) == math.inf
    engine.observe()
    assert engine.observer.batch_size.total == 1 and engine.backlog.step_s(3) == pytest.approx(0.008)
    opened = replies[0]
    assert isinstance(opened, Opened)
    harness.submit(b"\1" * 16, VerifyRequest(1, opened.position, opened.hash, (), (), (3, 4)))
    engine.step()
    assert engine.observer.batch_size.total == 1
    engine.step()
    assert engine.observer.batch_size.total == 2, "nobody else asked for it"


@pytest.mark.parametrize("num_streams", [1, 2])
def test_what_passes_between_steps_of_several_sessions_counts_as_their_steps(num_streams: int) -> None:
    """Answers are written then, and requests read: 7 ms, of which a stream alone keeps nobody waiting."""
    harness = Harness(SlowBackend())
    harness.backend.clock = harness.clock
    opened = [harness.open(name, prompt=[5] * 20 * name) for name in range(1, num_streams + 1)]
    for session_id, opening in opened:
        harness.submit(session_id, GenerateRequest(1, opening.position, opening.hash, max_new_tokens=400))
    for _ in range(300):
        harness.engine.step()
        harness.clock.now_s += 0.007
    fixed_ns, session_ns, token_ns = harness.engine.backlog.step_parts_ns()
    step_ms = 1e-6 * (fixed_ns + num_streams * (session_ns + token_ns))
    assert step_ms == pytest.approx(5 + num_streams + (7 if num_streams > 1 else 0), rel=0.1)
    if num_streams == 1:
        _, later = harness.open(3, prompt=(4, 6, 7))
        assert later.stream_gap_ns == pytest.approx(7e6)


def test_ready_sessions_share_one_packed_forward_without_padding() -> None:
    harness = Harness()
    sessions = [harness.open(name, prompt=range(1, 3 + name)) for name in (1, 2, 3)]
    harness.backend.batches.clear()
    replies = []
    for (session_id, opened), draft in zip(sessions, ([4], [1, 2, 3], []), strict=True):
        request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=tuple(draft))
        replies.append(harness.submit(session_id, request))
    harness.settle()
    assert harness.backend.batches == [[2, 4, 1]]
    assert all(isinstance(r[0], Verdict) and r[0].metrics.batch_size == 3 for r in replies)


def test_answers_tell_how_many_sessions_were_answered_lately() -> None:
    harness = Harness()
    (first, opened), (second, _), _ = [harness.open(name, prompt=(5, 6, 7)) for name in (1, 2, 3)]

    def num_active() -> int:
        nonlocal opened
        request = VerifyRequest(opened.position, opened.position, opened.hash)
        reply = harness.ask(first, request)
        assert isinstance(reply, Verdict)
        opened = reply
        return reply.metrics.num_active_sessions

    assert num_active() == 3
    assert isinstance(harness.ask(second, CloseRequest()), Closed)
    assert num_active() == 2
    harness.clock.sleep(ACTIVE_FOR_S + 0.1)
    assert num_active() == 1, "one is idle"


def test_a_long_prompt_is_computed_in_chunks_while_others_get_their_rounds() -> None:
    harness = Harness(FakeBackend(max_context=600), max_step_tokens=100)
    session_id, opened = harness.open(1)
    harness.backend.batches.clear()
    long_id = b"L" * 16
    prompt = tuple(i % 31 + 1 for i in range(400))
    opening = harness.submit(long_id, OpenRequest(long_id, prompt, 400, GREEDY))
    harness.engine.step()
    verdict = harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=(3, 3)))
    harness.engine.step()
    assert isinstance(verdict[0], Verdict), "the round waited for the prompt"
    harness.settle()
    assert harness.backend.batches[:3] == [[32], [3, 32], [32]], "small chunks: a round may come any time"
    *progress, opened_long = opening
    assert [p.done for p in progress if isinstance(p, Progress)] == list(range(0, 400, 32))
    assert isinstance(opened_long, Opened)
    assert opened_long.first_token == harness.reference(prompt, GREEDY, 1)[0]


def test_the_same_round_twice_is_applied_once() -> None:
    harness = Harness()
    session_id, opened = harness.open()
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=(9, 9))
    first = harness.ask(session_id, request)
    num_forwards = harness.backend.num_forwards
    assert harness.ask(session_id, dataclasses.replace(request, deadline_ms=77)) == first
    assert harness.backend.num_forwards == num_forwards


def test_a_duplicate_that_arrives_while_the_round_computes_gets_the_same_answer() -> None:
    harness = Harness()
    session_id, opened = harness.open()
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=(9, 9))
    replies = [harness.submit(session_id, request) for _ in range(2)]
    harness.settle()
    assert replies[0] == replies[1]
    assert isinstance(replies[0][0], Verdict)


def test_a_round_id_with_other_content_is_invalid_and_an_older_one_stale() -> None:
    harness = Harness()
    session_id, opened = harness.open()
    request = VerifyRequest(5, opened.position, opened.hash, draft_tokens=(9,))
    verdict = harness.ask(session_id, request)
    other = harness.ask(session_id, dataclasses.replace(request, draft_tokens=(8,)))
    assert isinstance(other, RoundError) and (other.code, other.field) == (RoundErrorCode.INVALID, "round_id")
    older = harness.ask(session_id, dataclasses.replace(request, round_id=4))
    assert isinstance(older, RoundError) and older.code is RoundErrorCode.STALE
    assert isinstance(verdict, Verdict)
    assert (older.position, older.hash) == (verdict.position, verdict.hash)


def test_a_wrong_base_is_refused_with_where_the_verifier_is_and_changes_nothing() -> None:
    harness = Harness()
    session_id, opened = harness.open()
    for position, hash_ in ((opened.position, opened.hash ^ 1), (opened.position + 1, opened.hash)):
        error = harness.ask(session_id, VerifyRequest(1, position, hash_))
        assert isinstance(error, RoundError) and error.code is RoundErrorCode.UNKNOWN_PREFIX
        assert (error.position, error.hash) == (opened.position, opened.hash)
    assert isinstance(harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash)), Verdict)


def test_tokens_the_edge_kept_are_committed_and_the_text_goes_on_from_them() -> None:
    harness = Harness()
    session_id, opened = harness.open(sampling=SAMPLED)
    harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=(1, 2)))
    kept = (17, 23)
    chain = TokenChain([5, 6, 7, opened.first_token, *kept])
    request = VerifyRequest(
        2, opened.position, opened.hash, committed_tokens=kept, origins=(Origin.FALLBACK,) * 2
    )
    verdict = harness.ask(session_id, request)
    assert isinstance(verdict, Verdict)
    scores = harness.backend.logits_after(chain.token_ids)[None, :32]
    assert verdict.correction == int(choose(scores, SAMPLED, [6])[0])
    chain.extend([verdict.correction])
    assert verdict.hash == chain.hash


def test_nothing_after_a_stop_is_accepted() -> None:
    harness = Harness()
    expected = harness.reference([5, 6, 7], GREEDY, 6)
    session_id, opened = harness.open(stop_token_ids=(expected[3],))
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=tuple(expected[1:6]))
    verdict = harness.ask(session_id, request)
    assert isinstance(verdict, Verdict)
    assert (verdict.accepted_len, verdict.correction_kind) == (3, CorrectionKind.NONE)
    assert verdict.position == 3 + 4


def test_generate_streams_the_same_text_and_a_later_round_builds_on_it() -> None:
    harness = Harness()
    expected = harness.reference([5, 6, 7], SAMPLED, 12)
    session_id, opened = harness.open(sampling=SAMPLED, ignore_eos=True)
    replies = harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=9))
    harness.settle()
    tokens = [t for r in replies if isinstance(r, GeneratedTokens) for t in r.token_ids]
    assert [opened.first_token, *tokens] == expected[:10]
    last = replies[-1]
    assert isinstance(last, GeneratedTokens) and last.is_last
    verdict = harness.ask(
        session_id, VerifyRequest(2, last.position, last.hash, draft_tokens=(expected[10],))
    )
    assert isinstance(verdict, Verdict) and verdict.correction == expected[11]


@pytest.mark.parametrize("num_tenants", [1, 2])
def test_sessions_that_do_not_fit_together_go_on_one_after_the_other(num_tenants: int) -> None:
    """Each asks again at once after a refusal: whoever is refused must not cost the others what they have."""
    backend, num_sessions, num_rounds = FakeBackend(kv_tokens=100), 4, 10
    harness = Harness(backend)
    requests: list[SessionRequest] = []
    for i in range(num_sessions):
        requests.append(OpenRequest(bytes([i]) * 16, (5 + i,) * 30, 30, SAMPLED, ignore_eos=True))

    def submit(i: int) -> list[SessionResponse]:
        return harness.submit(bytes([i]) * 16, requests[i], tenant=str(i % num_tenants))

    replies, num_done = [submit(i) for i in range(num_sessions)], [0] * num_sessions
    for _ in range(600):
        harness.engine.step()
        for i in range(num_sessions):
            final = [each for each in replies[i] if not isinstance(each, Progress)]
            if not final or isinstance(final[0], Closed):
                continue
            answer = final[0]
            if isinstance(answer, RoundError):
                assert answer.code is RoundErrorCode.REFUSED
            elif num_done[i] == num_rounds:
                requests[i] = CloseRequest()
            else:
                assert isinstance(answer, Opened | Verdict)
                num_done[i] += 1
                requests[i] = VerifyRequest(num_done[i], answer.position, answer.hash, draft_tokens=(1, 2))
            replies[i] = submit(i)
    assert num_done == [num_rounds] * num_sessions
    harness.engine.check_integrity()


def test_a_newer_request_ends_a_running_generate() -> None:
    harness = Harness()
    session_id, opened = harness.open(ignore_eos=True)
    replies = harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=40))
    harness.engine.step()
    harness.engine.step()
    so_far = replies[-1]
    assert isinstance(so_far, GeneratedTokens) and not so_far.is_last
    verdict = harness.ask(session_id, VerifyRequest(2, so_far.position, so_far.hash))
    assert isinstance(verdict, Verdict)
    assert isinstance(replies[-1], GeneratedTokens) and replies[-1].is_last


def test_cancel_ends_a_generate_and_close_ends_the_session() -> None:
    harness = Harness()
    session_id, opened = harness.open(ignore_eos=True)
    replies = harness.submit(session_id, GenerateRequest(1, opened.position, opened.hash, max_new_tokens=40))
    harness.engine.step()
    harness.submit(session_id, CancelRequest(1))
    harness.settle()
    assert isinstance(replies[-1], GeneratedTokens) and replies[-1].is_last
    closed = harness.ask(session_id, CloseRequest())
    assert closed.was_open and not harness.backend.sequences
    error = harness.ask(session_id, VerifyRequest(2, opened.position, opened.hash))
    assert isinstance(error, RoundError) and error.code is RoundErrorCode.UNKNOWN_SESSION


def test_opening_is_idempotent_and_a_rebuild_returns_the_next_token() -> None:
    harness = Harness()
    expected = harness.reference([5, 6, 7], SAMPLED, 6)
    session_id, opened = harness.open(sampling=SAMPLED, ignore_eos=True)
    _, again = harness.open(sampling=SAMPLED, ignore_eos=True)
    assert again.is_existing and again.first_token == opened.first_token
    for is_known in (True, False):
        if not is_known:
            harness.ask(session_id, CloseRequest())
        request = OpenRequest(
            session_id, (5, 6, 7, *expected[:4]), 3, SAMPLED, is_rebuild=True, ignore_eos=True
        )
        rebuilt = harness.ask(session_id, request)
        assert isinstance(rebuilt, Opened) and rebuilt.first_token == expected[4]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (5, 32)}, "token_ids"),
        ({"token_ids": (1,) * 64}, "token_ids"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
        ({"session_id": b"short"}, "session_id"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint"),
        ({"target_fingerprint": "other"}, "target_fingerprint"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
        ({"sampling": SamplingParams(temperature=math.nan)}, "sampling.temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": SamplingParams(logit_bias=((40, 1.0),))}, "sampling.logit_bias"),
    ],
)
def test_a_bad_opening_is_invalid_and_names_the_field(change: dict[str, object], field: str) -> None:
    harness = Harness()
    request = dataclasses.replace(OpenRequest(b"s" * 16, (5, 6, 7), 3, GREEDY), **change)  # type: ignore[arg-type]
    error = harness.ask(request.session_id, request)
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, field)
    assert len(harness.engine.sessions) == 0


def test_a_wrong_tokenizer_is_refused_with_both_fingerprints() -> None:
    harness = Harness()
    request = OpenRequest(b"s" * 16, (5,), 1, GREEDY, tokenizer_fingerprint="abc")
    error = harness.ask(request.session_id, request)
    assert isinstance(error, RoundError)
    assert "abc" in error.message and "t" * 16 in error.message


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"draft_tokens": (32,)}, RoundErrorCode.INVALID, "draft_tokens"),
        ({"draft_tokens": (1,) * 17}, RoundErrorCode.INVALID, "draft_tokens"),
        ({"committed_tokens": (1,) * 60}, RoundErrorCode.INVALID, "draft_tokens"),
        ({"committed_tokens": (32,)}, RoundErrorCode.INVALID, "committed_tokens"),
        ({"base_position": 2}, RoundErrorCode.INVALID, "base_position"),
        ({"round_id": 0}, RoundErrorCode.INVALID, "round_id"),
        ({"parents": (-1,), "draft_tokens": (1, 2)}, RoundErrorCode.INVALID, "parents"),
        ({"parents": (-1, 1), "draft_tokens": (1, 2)}, RoundErrorCode.INVALID, "parents"),
        ({"parents": (-1, -2), "draft_tokens": (1, 2)}, RoundErrorCode.INVALID, "parents"),
        ({"parents": (-1, -1), "draft_tokens": (1, 1)}, RoundErrorCode.INVALID, "parents"),
        ({"parents": (-1,) * 17, "draft_tokens": tuple(range(17))}, RoundErrorCode.INVALID, "parents"),
        ({"candidates_from": 1}, RoundErrorCode.INVALID, "candidates_from"),
    ],
)
def test_a_bad_round_is_refused_and_the_next_good_one_works(
    change: dict[str, object], code: RoundErrorCode, field: str
) -> None:
    harness = Harness()
    session_id, opened = harness.open()
    good = VerifyRequest(1, opened.position, opened.hash)
    error = harness.ask(session_id, dataclasses.replace(good, **change))  # type: ignore[arg-type]
    assert isinstance(error, RoundError), error
    assert (error.code, error.field) == (code, field)
    assert isinstance(harness.ask(session_id, good), Verdict)


@pytest.mark.parametrize("kind", ["verify", "generate"])
def test_a_round_of_no_id_is_told_so_also_later_in_a_session(kind: str) -> None:
    harness = Harness()
    session_id, opened = harness.open()
    asked: VerifyRequest | GenerateRequest = VerifyRequest(0, opened.position, opened.hash)
    if kind == "generate":
        asked = GenerateRequest(0, opened.position, opened.hash, 4)
    for _ in range(2):
        error = harness.ask(session_id, asked)
        assert isinstance(error, RoundError)
        assert (error.code, error.field) == (RoundErrorCode.INVALID, "round_id")
        verdict = harness.ask(session_id, VerifyRequest(2, opened.position, opened.hash))
        assert isinstance(verdict, Verdict)


def test_the_least_recently_used_kv_is_evicted_and_recomputed() -> None:
    harness = Harness(FakeBackend(kv_tokens=40))
    prompt = tuple(range(1, 26))
    first_id, first = harness.open(1, prompt)
    harness.open(2, prompt[::-1])  # does not fit beside the first
    assert len(harness.backend.sequences) == 1
    verdict = harness.ask(first_id, VerifyRequest(1, first.position, first.hash))
    assert isinstance(verdict, Verdict)
    assert verdict.correction == harness.reference(prompt, GREEDY, 2)[1]


def test_work_that_cannot_get_kv_is_refused_with_a_retry_hint_and_others_go_on() -> None:
    harness = Harness(FakeBackend(kv_tokens=40))
    requests = [OpenRequest(bytes([i]) * 16, tuple(range(1, 26)), 25, GREEDY) for i in (1, 2)]
    replies = [harness.submit(r.session_id, r) for r in requests]
    harness.settle()
    assert isinstance(replies[0][-1], Opened)
    refused = replies[1][-1]
    assert isinstance(refused, RoundError) and refused.code is RoundErrorCode.REFUSED
    assert refused.retry_after_ms > 0


def test_a_refused_round_changes_nothing_and_may_be_sent_again_as_it_was() -> None:
    harness = Harness(FakeBackend(kv_tokens=60))
    prompt = tuple(range(1, 26))
    other_id, other = harness.open(2, prompt[:4:-1])
    session_id, opened = harness.open(1, prompt)
    first = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash))
    assert isinstance(first, Verdict)
    before = harness.submit(other_id, VerifyRequest(1, other.position, other.hash, draft_tokens=(7,) * 9))
    again = VerifyRequest(2, opened.position, opened.hash, committed_tokens=(9,) * 10, draft_tokens=(7,) * 8)
    refused = harness.submit(session_id, again)
    harness.settle()
    assert isinstance(before[0], Verdict)
    assert isinstance(refused[0], RoundError) and refused[0].code is RoundErrorCode.REFUSED
    assert (refused[0].position, refused[0].hash) == (first.position, first.hash)
    harness.ask(other_id, CloseRequest())
    assert isinstance(harness.ask(session_id, again), Verdict)


def test_idle_sessions_expire_and_give_their_kv_back() -> None:
    harness = Harness(session_idle_ttl_ms=1000)
    harness.open()
    harness.pass_time(5.0)
    assert len(harness.engine.sessions) == 0 and not harness.backend.sequences


def test_a_full_store_forgets_the_oldest_idle_session() -> None:
    harness = Harness(max_sessions=2)
    oldest, opened = harness.open(1)
    harness.open(2)
    harness.open(3)
    error = harness.ask(oldest, VerifyRequest(1, opened.position, opened.hash))
    assert isinstance(error, RoundError) and error.code is RoundErrorCode.UNKNOWN_SESSION


def test_a_failing_forward_answers_internal_and_the_engine_lives(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    session_id, opened = harness.open()
    harness.backend.fail_next = RuntimeError("boom")
    error = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash))
    assert isinstance(error, RoundError) and error.code is RoundErrorCode.INTERNAL
    assert "boom" in caplog.text
    harness.open(2)


def test_new_sessions_are_refused_while_draining_and_open_ones_go_on() -> None:
    harness = Harness()
    session_id, opened = harness.open(1)
    harness.engine.is_draining = True
    error = harness.ask(b"n" * 16, OpenRequest(b"n" * 16, (5,), 1, GREEDY))
    assert isinstance(error, RoundError) and error.code is RoundErrorCode.DRAINING
    assert isinstance(harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash)), Verdict)


def test_another_tenant_cannot_tell_a_session_id_from_an_unknown_one() -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=(5, 6, 7), ignore_eos=True)
    requests: list[SessionRequest] = [
        VerifyRequest(1, opened.position, opened.hash),
        GenerateRequest(1, opened.position, opened.hash, max_new_tokens=3),
        CloseRequest(),
    ]
    for request in requests:
        theirs = harness.ask(session_id, request, tenant="other")
        assert theirs == harness.ask(b"?" * 16, request, tenant="other")
    harness.submit(session_id, CancelRequest(1), tenant="other")
    own = harness.ask(session_id, OpenRequest(session_id, (9, 9), 2, GREEDY), tenant="other")
    assert isinstance(own, Opened) and not own.is_existing, "the id names a session of each tenant"
    verdict = harness.ask(session_id, VerifyRequest(1, opened.position, opened.hash))
    assert isinstance(verdict, Verdict) and verdict.position == opened.position + 1
