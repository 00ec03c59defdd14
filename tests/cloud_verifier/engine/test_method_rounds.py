"""Rounds of every method through the engine: exchanges of candidates, replays, mixed batches, generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.fakes import FakeBackend
from test_colocated_drafts import CoLocated, KnownDraft
from test_engine import GREEDY, SAMPLED, Harness

from outrider.common.alignment import TokenChain
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.noise.draws import uniform
from outrider.common.noise.philox import Purpose, first_word
from outrider.common.sampling.support import choose_candidate, make_support, sample_support, support_prob
from outrider.common.types import (
    CorrectionKind,
    Draft,
    GeneratedTokens,
    GenerateRequest,
    Method,
    MethodParams,
    Opened,
    OpenRequest,
    Origin,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
    Support,
    Verdict,
    VerifyRequest,
)

PROMPT = (5, 6, 7)


def draft_after(
    backend: FakeBackend, text: Sequence[int], num: int, seed: int, noise: float = 1.0
) -> tuple[tuple[int, ...], tuple[Support, ...]]:
    """A draft that thinks like the target, but for some noise of its own."""
    tokens, supports = list(text), []
    for offset in range(num):
        scores = backend.logits_after(tokens)[: backend.num_tokens]
        rng = np.random.default_rng(len(tokens))
        scores = scores + rng.normal(scale=noise, size=scores.size).astype(np.float32)
        supports.append(make_support(scores, 16))
        word = first_word(seed, Purpose.DRAFT, len(text), offset)
        tokens.append(sample_support(supports[-1], word))
    return tuple(tokens[len(text) :]), tuple(supports)


class Edge:
    """One session's edge, as docs/protocol.md has it, round by round."""

    def __init__(
        self, harness: Harness, name: int, method: Method, sampling: SamplingParams, depth: int = 4
    ) -> None:
        self.harness, self.method, self.sampling, self.depth = harness, method, sampling, depth
        self.session_id, opened = harness.open(name, PROMPT, sampling, method=method, ignore_eos=True)
        self.chain = TokenChain([*PROMPT, opened.first_token])
        self.round_id = 0
        self.choice: int | None = None  # to commit with the next round
        self.num_seen = 0  # candidates at this position that did not pass
        self.support: Support | None = None  # at the rejected position
        self.drafted: tuple[tuple[int, ...], tuple[Support, ...]] = ((), ())

    def request(self) -> VerifyRequest:
        self.round_id += 1
        base = VerifyRequest(self.round_id, self.chain.position, self.chain.hash)
        if self.num_seen:
            self.drafted = ((), ())
            return replace(base, candidates_from=self.num_seen)
        committed = () if self.choice is None else (self.choice,)
        self.chain.extend(committed)
        text = self.chain.token_ids
        draft, supports = draft_after(self.harness.backend, text, self.depth, self.sampling.seed)
        self.drafted = draft, supports
        probs = tuple(support_prob(s, t) for s, t in zip(supports, draft, strict=True))
        return replace(
            base,
            committed_tokens=committed,
            origins=(Origin.CORRECTION,) * len(committed),
            draft_tokens=draft,
            q_token_probs=probs if sends_probs(self.method) else (),
            q_support=supports if sends_support(self.method) else (),
        )

    def take(self, verdict: SessionResponse) -> None:
        assert isinstance(verdict, Verdict), verdict
        draft, supports = self.drafted
        self.chain.extend(draft[: verdict.accepted_len])
        self.choice = None
        if verdict.correction_kind is not CorrectionKind.NONE:
            self.chain.extend([verdict.correction])
        if verdict.candidates:
            if not self.num_seen:
                self.support = supports[verdict.accepted_len]
            assert self.support is not None
            position, seed = self.chain.position, self.sampling.seed
            found = choose_candidate(self.support, verdict.candidates, seed, position, self.num_seen)
            self.choice, self.num_seen = (
                found,
                0 if found is not None else self.num_seen + len(verdict.candidates),
            )
        assert (self.chain.position, self.chain.hash) == (verdict.position, verdict.hash)


SAMPLINGS = (
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=6),
    SamplingParams(temperature=1.3, top_k=12, min_p=0.01, frequency_penalty=0.4, seed=7),
    GREEDY,
)


def bare(reply: SessionResponse) -> SessionResponse:
    """Without what depends on the clock and the neighbours."""
    assert isinstance(reply, Verdict), reply
    return replace(reply, metrics=replace(reply.metrics, queue_ns=0, forward_ns=0, total_ns=0, batch_size=0))


def test_a_mixed_batch_gives_each_session_what_it_gets_alone() -> None:
    cases = [(method, sampling) for method in Method for sampling in SAMPLINGS]
    limits = {"max_sessions": len(cases)}
    together = Harness(FakeBackend(max_context=200), max_step_tokens=4096, **limits)
    edges = [Edge(together, 1 + i, *case) for i, case in enumerate(cases)]
    alone = Harness(FakeBackend(max_context=200), **limits)
    others = [Edge(alone, 1 + i, *case) for i, case in enumerate(cases)]
    num_accepted, num_steps = 0, together.engine.num_steps
    for _ in range(12):
        replies = [together.submit(edge.session_id, edge.request()) for edge in reversed(edges)][::-1]
        together.settle()
        for edge, other, (reply,) in zip(edges, others, replies, strict=True):
            expected = alone.ask(other.session_id, other.request())
            # alpha of a round where nothing was judged is NaN, and equal to nothing
            assert str(bare(reply)) == str(bare(expected)), (edge.method, edge.sampling)
            edge.take(reply)
            other.take(expected)
            assert isinstance(reply, Verdict)
            num_accepted += reply.accepted_len
    assert together.engine.num_steps - num_steps == 12, "all of them in one forward a round"
    assert num_accepted > 12 * len(cases), "hardly anything was accepted: the comparison proves little"
    greedy = [edge.chain.token_ids for edge in edges if edge.sampling is GREEDY and edge.method.is_exact]
    reference = together.reference(PROMPT, GREEDY, 200 - 3)
    for text in greedy:
        assert text[3:] == reference[: len(text) - 3]


def rejected(harness: Harness, **fields: object) -> tuple[bytes, Verdict, VerifyRequest]:
    """A session of `candidates` whose first round was rejected after one accepted token."""
    session_id, opened = harness.open(
        prompt=PROMPT, sampling=SAMPLED, method=Method.CANDIDATES, ignore_eos=True, **fields
    )
    scores = harness.backend.logits_after([*PROMPT, opened.first_token])[:32]
    draft = (int(scores.argmax()), int(scores.argmin()))
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=draft, q_token_probs=(1e-6, 1.0))
    verdict = harness.ask(session_id, request)
    assert isinstance(verdict, Verdict)
    assert (verdict.accepted_len, verdict.correction_kind) == (1, CorrectionKind.NONE)
    assert verdict.position == opened.position + 1
    return session_id, verdict, request


def test_candidates_are_replayed_continued_and_one_of_them_committed() -> None:
    harness = Harness()
    session_id, verdict, request = rejected(harness)
    assert len(verdict.candidates) == 4
    assert harness.ask(session_id, request) is verdict, "a replay computes nothing"
    more_of = VerifyRequest(2, verdict.position, verdict.hash, candidates_from=4)
    more = harness.ask(session_id, more_of)
    assert isinstance(more, Verdict)
    assert (more.accepted_len, more.correction_kind) == (0, CorrectionKind.NONE)
    assert (more.position, more.hash) == (verdict.position, verdict.hash)
    assert len(more.candidates) == 4 and more.candidates != verdict.candidates
    assert harness.ask(session_id, more_of) is more
    eight = Harness()
    _, again, _ = rejected(eight, method_params=MethodParams(num_candidates=8))
    assert again.candidates == verdict.candidates + more.candidates, "the draws are numbered on"
    chosen = more.candidates[1].token_id
    done = harness.ask(
        session_id,
        VerifyRequest(3, more.position, more.hash, committed_tokens=(chosen,), origins=(Origin.CORRECTION,)),
    )
    assert isinstance(done, Verdict) and done.position == more.position + 2
    assert done.correction_kind is CorrectionKind.BONUS


def test_candidates_are_samples_of_the_target_with_their_probability() -> None:
    harness = Harness()
    _, verdict, _ = rejected(harness, method_params=MethodParams(num_candidates=64))
    text = next(iter(harness.engine.sessions)).chain.token_ids
    logits = harness.backend.logits_after(text)[:32].astype(np.float64)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    for candidate in verdict.candidates:
        assert candidate.target_prob == pytest.approx(probs[candidate.token_id], rel=1e-5)
    counts = np.bincount([c.token_id for c in verdict.candidates], minlength=32)
    assert abs(counts / 64 - probs).sum() / 2 < 0.35


@pytest.mark.parametrize("kind", ["draft", "nothing", "generate"])
def test_a_round_that_leaves_the_choice_out_is_invalid_and_the_choice_can_still_be_made(kind: str) -> None:
    harness = Harness()
    session_id, verdict, _ = rejected(harness)
    base = (verdict.position, verdict.hash)
    requests = {
        "draft": VerifyRequest(2, *base, draft_tokens=(1,), q_token_probs=(0.5,)),
        "nothing": VerifyRequest(2, *base),
        "generate": GenerateRequest(2, *base, max_new_tokens=3),
    }
    error = harness.ask(session_id, requests[kind])
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "committed_tokens")
    assert "candidates_from" in error.message and (error.position, error.hash) == base
    more = harness.ask(session_id, VerifyRequest(2, *base, candidates_from=4))
    assert isinstance(more, Verdict), "asking for more leaves what is owed as it is"
    error = harness.ask(session_id, replace(requests[kind], round_id=3))
    assert isinstance(error, RoundError) and error.field == "committed_tokens"
    settled = harness.ask(session_id, VerifyRequest(3, *base, committed_tokens=(4,)))
    assert isinstance(settled, Verdict)
    after = harness.ask(session_id, VerifyRequest(4, settled.position, settled.hash))
    assert isinstance(after, Verdict)


def test_a_round_may_be_drafted_again_from_where_it_began() -> None:
    """Its verdict was lost: with the same keys the same draft is judged alike."""
    harness = Harness()
    session_id, verdict, request = rejected(harness)
    again = harness.ask(session_id, replace(request, round_id=2))
    assert isinstance(again, Verdict)
    assert (again.accepted_len, again.candidates) == (verdict.accepted_len, verdict.candidates)


def test_a_rebuilt_session_goes_on_asking_for_the_candidates_that_are_owed() -> None:
    harness = Harness()
    session_id, verdict, _ = rejected(harness)
    text = tuple(next(iter(harness.engine.sessions)).chain.token_ids)
    more = harness.ask(session_id, VerifyRequest(2, verdict.position, verdict.hash, candidates_from=4))
    other = Harness()  # the verifier restarted
    opening = OpenRequest(session_id, text, 3, SAMPLED, Method.CANDIDATES, is_rebuild=True, ignore_eos=True)
    opened = other.ask(session_id, opening)
    assert isinstance(opened, Opened) and opened.position == verdict.position + 1
    asked = other.ask(session_id, VerifyRequest(3, verdict.position, verdict.hash, candidates_from=4))
    assert isinstance(asked, Verdict) and isinstance(more, Verdict)
    assert asked.candidates == more.candidates, "the token the opening gave is taken back"
    assert (asked.position, asked.hash) == (verdict.position, verdict.hash)


@pytest.mark.parametrize("method", list(Method))
def test_cloud_only_generation_writes_the_targets_own_text_in_a_session_of_any_method(method: Method) -> None:
    harness = Harness()
    session_id, opened = harness.open(prompt=PROMPT, sampling=SAMPLED, method=method, ignore_eos=True)
    request = GenerateRequest(1, opened.position, opened.hash, max_new_tokens=12)
    replies = harness.submit(session_id, request)
    harness.settle()
    text = [opened.first_token]
    for reply in replies:
        assert isinstance(reply, GeneratedTokens) and reply.origins == (Origin.TARGET,)
        text += reply.token_ids
    assert text == harness.reference(PROMPT, SAMPLED, 13)


# ------------------------------------------------------------------------------------------ co-located


class NearDraft(KnownDraft):
    """Thinks like the target, but for noise of its own; samples as the session's method wants it."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__([])
        self.backend = backend
        self.num_supports: list[int] = []

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> _NearSequence:
        self.num_open += 1
        self.num_supports.append(num_support)
        return _NearSequence(self, sampling, num_support)


class _NearSequence:
    def __init__(self, model: NearDraft, sampling: SamplingParams, num_support: int) -> None:
        self._model, self._sampling, self._num_support = model, sampling, num_support
        self._token_ids: list[int] = []

    @property
    def position(self) -> int:
        return len(self._token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def truncate(self, position: int) -> None:
        del self._token_ids[position:]

    def propose(self, num_draft_tokens: int, should_stop: object = None) -> Draft:
        seed = self._sampling.seed
        token_ids, supports = draft_after(self._model.backend, self._token_ids, num_draft_tokens, seed)
        probs = tuple(support_prob(s, t) for s, t in zip(supports, token_ids, strict=True))
        return Draft(token_ids, probs, supports=supports if self._num_support else ())

    def close(self) -> None:
        self._model.num_open -= 1

    def check_integrity(self) -> None: ...


@pytest.mark.parametrize("method", list(Method))
def test_co_located_and_over_the_wire_a_method_writes_the_same_text(method: Method) -> None:
    """One draft, one seed, the same keys: only who asks whom differs."""
    backend = FakeBackend(max_context=200)
    harness = CoLocated(NearDraft(backend), backend)
    sampling = SamplingParams(temperature=1.0, seed=9)
    session_id, opened = harness.open(1, PROMPT, sampling, method=method, ignore_eos=True)
    replies = harness.generate(session_id, opened.position, opened.hash, 100)
    co_located = [opened.first_token, *(t for reply in replies for t in reply.token_ids)]
    assert harness.draft.num_supports == [num_support(method)] and not harness.draft.num_open
    origins = {origin for reply in replies for origin in reply.origins}
    assert origins == {Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS}
    edge = Edge(Harness(FakeBackend(max_context=200)), 1, method, sampling)
    while edge.chain.position < 80:
        edge.take(edge.harness.ask(edge.session_id, edge.request()))
    assert edge.chain.token_ids[3:] == co_located[: edge.chain.position - 3]


def test_the_coins_of_acceptance_and_of_the_choice_are_different_numbers() -> None:
    keys = [(9, start, offset, purpose) for purpose in Purpose for start in range(8) for offset in range(8)]
    assert len({uniform(*key) for key in keys}) == len(keys)
