"""Co-located generation, step by step, on a fake target with drafts whose every token is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.edge.knowing_draft import KnowingDraft
from support.fakes import FakeBackend
from support.tiny_grammars import tiny_vocabulary
from test_engine import GREEDY, SAMPLED, Harness

from outrider.cloud_verifier.config import EMBEDDED_DRAFT, ServeConfig
from outrider.cloud_verifier.engine.colocated import drafter
from outrider.cloud_verifier.engine.colocated.draft import DeferredDraft
from outrider.cloud_verifier.engine.colocated.drafter import POOL_FROM_NS, CoLocatedDrafter
from outrider.cloud_verifier.engine.colocated.reader import READ_CHUNK
from outrider.cloud_verifier.kv.blocks import BlockManager
from outrider.cloud_verifier.server.loading import create_drafter
from outrider.common.alignment import TokenChain
from outrider.common.errors import IncompatibleError, ModelError
from outrider.common.grammar import state as state_module
from outrider.common.grammar.state import GrammarBounds, GrammarLimitError, GrammarState, Words
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    Draft,
    GeneratedTokens,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Origin,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Support,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import RowsSequence
from outrider.edge_client.drafting.trees import TreeBudget

PROMPT = (5, 6, 7)


class DraftClock:
    """Time that passes by drafting alone, for each thread by itself."""

    def __init__(self) -> None:
        self._slept = threading.local()

    def now(self) -> float:
        return getattr(self._slept, "seconds", 0.0)

    def sleep(self, seconds: float) -> None:
        self._slept.seconds = self.now() + seconds


class KnownDraft:
    """Proposes `text[position]`, which its maker knows; counts what it was asked and what is open."""

    num_tokens, eos_token_ids = 32, (0,)
    fingerprint, tokenizer_fingerprint = "d" * 16, "t" * 16

    def __init__(self, text: Sequence[int], max_context: int = 10_000) -> None:
        self.clock = DraftClock()
        self.text = list(text)
        self.max_context = max_context
        self.num_proposed: list[int] = []
        self.num_open = 0
        self.may_read = threading.Event()  # a proposal waits for it
        self.may_read.set()
        self.is_asked = threading.Event()  # some proposal has begun
        self.fails_at: int | None = None
        self.failure: Exception = RuntimeError("by the test")
        self.takes_s = 0.0
        self.threads: list[str] = []  # that proposed

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> _KnownSequence:
        self.num_open += 1
        return _KnownSequence(self, num_support)

    def close(self) -> None: ...

    def __enter__(self) -> KnownDraft:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _KnownSequence:
    def __init__(self, model: KnownDraft, num_support: int) -> None:
        self._model = model
        self._num_support = num_support
        self._token_ids: list[int] = []
        self._is_closed = False

    @property
    def position(self) -> int:
        return len(self._token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def truncate(self, position: int) -> None:
        del self._token_ids[position:]

    def propose(self, num_draft_tokens: int) -> Draft:
        assert not self._is_closed, "a closed sequence drafts"
        self._model.is_asked.set()
        assert self._model.may_read.wait(60)
        if self.position == self._model.fails_at:
            raise self._model.failure
        self._model.clock.sleep(self._model.takes_s)
        self._model.threads.append(threading.current_thread().name)
        end = min(self.position + num_draft_tokens, self._model.max_context)
        token_ids = tuple(self._model.text[self.position : end])
        self._model.num_proposed.append(len(token_ids))
        supports = tuple(Support((each,), (1,)) for each in token_ids) if self._num_support else ()
        return Draft(token_ids, (0.5,) * len(token_ids), supports=supports)

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True
        self._model.num_open -= 1

    def check_integrity(self) -> None: ...


class CoLocated(Harness):
    """A harness with a draft; `generate` asks one opened session for text."""

    def __init__(self, draft: KnownDraft, backend: FakeBackend | None = None, **limits: int) -> None:
        backend = backend or FakeBackend()
        drafter = CoLocatedDrafter(draft, clock=draft.clock)
        super().__init__(backend, drafter=drafter, **limits)
        self.draft = draft

    def generate(
        self, session_id: bytes, position: int, hash: int, num_new: int, depth: int = 4, round_id: int = 1
    ) -> list[GeneratedTokens]:
        request = make_request(position, hash, num_new, depth, round_id)
        replies = self.submit(session_id, request)
        self.settle()
        assert all(isinstance(r, GeneratedTokens | Progress) for r in replies), replies
        self.engine.step()  # nothing is active any more
        assert self.draft.num_open == 0, "a draft outlives its generation"
        return [r for r in replies if isinstance(r, GeneratedTokens)]


def make_request(
    position: int, hash: int, num_new: int, depth: int = 4, round_id: int = 1
) -> GenerateRequest:
    return GenerateRequest(
        round_id, position, hash, num_new, is_co_located=True, num_speculative_tokens=depth
    )


def expected_text(sampling: SamplingParams, num_new: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Prompt and what the fake target alone writes after it."""
    context = FakeBackend(max_context=num_new + len(prompt) + 1)
    return [*prompt, *Harness(context).reference(prompt, sampling, num_new)]


def ids_of(messages: Sequence[GeneratedTokens]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


@pytest.fixture(params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> Iterator[SamplingParams]:
    yield request.param


@pytest.mark.parametrize("wrong_every", [0, 1, 3])
@pytest.mark.parametrize("depth", [0, 1, 4, 9])
def test_the_text_is_the_targets_own_whatever_is_drafted(
    sampling: SamplingParams, depth: int, wrong_every: int
) -> None:
    text = expected_text(sampling, 60)
    drafted = [(t + 1) % 31 + 1 if wrong_every and i % wrong_every == 0 else t for i, t in enumerate(text)]
    harness = CoLocated(KnownDraft(drafted))
    session_id, opened = harness.open(prompt=PROMPT, sampling=sampling, ignore_eos=True)
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=40, depth=depth)
    assert [opened.first_token, *ids_of(messages)] == text[3 : 3 + 41]
    assert [m.is_last for m in messages] == [False] * (len(messages) - 1) + [True]
    chain = TokenChain([*PROMPT, opened.first_token])
    for message in messages:
        chain.extend(message.token_ids)
        assert (message.position, message.hash) == (chain.position, chain.hash)
        assert message.num_draft_tokens <= depth
        *accepted, last = message.origins
        assert set(accepted) <= {Origin.ACCEPTED}
        is_full = len(accepted) == message.num_draft_tokens
        assert last is (Origin.BONUS if is_full else Origin.CORRECTION)
    if wrong_every == 0:
        assert len(messages) == -(-40 // (depth + 1))
    if wrong_every == 1:
        assert len(messages) == 40


def test_a_round_reports_what_was_drafted_and_what_it_took() -> None:
    draft = KnownDraft(expected_text(GREEDY, 30))
    draft.takes_s = 0.002
    harness = CoLocated(draft)
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    first, *_, last = harness.generate(session_id, opened.position, opened.hash, num_new=12, depth=4)
    assert (first.num_draft_tokens, first.metrics.la_over_k, first.metrics.batch_size) == (4, 1.0, 1)
    assert first.draft_ns == pytest.approx(2e6) and first.metrics.alpha_mean > 0
    assert last.num_draft_tokens == 1, "a draft past the last token wanted"
    assert harness.draft.num_proposed == [4, 4, 1]


def test_a_text_ends_inside_a_draft_at_a_stop_id() -> None:
    text = expected_text(GREEDY, 30)
    stop = next(t for i, t in enumerate(text[5:], 5) if t not in text[3:i])
    harness = CoLocated(KnownDraft(text))
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True, stop_token_ids=(stop,))
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=25, depth=8)
    written = ids_of(messages)
    assert written == text[4 : text.index(stop) + 1] and messages[-1].is_last
    (session,) = harness.engine.sessions
    assert session.chain.token_ids == text[: text.index(stop) + 1]


def test_a_co_located_draft_holds_back_the_stop_ids_that_the_verifier_does() -> None:
    text = expected_text(GREEDY, 20)
    sampling, stops = replace(GREEDY, min_new_tokens=12), tuple({*text[4:9]} - {0})

    class Draft(KnowingDraft):
        clock, num_open = DraftClock(), 0

    harness = CoLocated(Draft())  # type: ignore[arg-type]
    session_id, opened = harness.open(prompt=PROMPT, sampling=sampling, stop_token_ids=stops)
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=11)
    written = [opened.first_token, *ids_of(messages)]
    assert len(written) == 12 and not {0, *stops} & {*written}
    assert sum(each.origins.count(Origin.CORRECTION) for each in messages) == 0, "each draft was right"


@pytest.mark.parametrize("session_limit", [20, 64])
def test_a_text_fills_the_context_to_the_last_token(session_limit: int) -> None:
    """The context is the target's, or what an operator lets a session hold (`--session-max-tokens`)."""
    target = FakeBackend(max_context=84 - session_limit)
    harness = CoLocated(KnownDraft(expected_text(GREEDY, 80)), target, max_context=20)
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=50, depth=7)
    assert messages[-1].position == 20 and messages[-1].is_last


def test_past_the_drafts_own_context_the_target_goes_on_alone() -> None:
    text = expected_text(GREEDY, 30)
    harness = CoLocated(KnownDraft(text, max_context=12))
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=20)
    assert ids_of(messages) == text[4:24]
    assert [m.num_draft_tokens for m in messages][-8:] == [0] * 8


def test_a_draft_that_fails_costs_speed_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    text = expected_text(GREEDY, 30)
    draft = KnownDraft(text)
    draft.fails_at = 9
    harness = CoLocated(draft)
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    messages = harness.generate(session_id, opened.position, opened.hash, num_new=20)
    assert ids_of(messages) == text[4:24]
    assert [m.num_draft_tokens for m in messages] == [4] + [0] * 15
    assert caplog.text.count("the draft failed") == 1


def with_slow_grammar(fails_at: int) -> tuple[list[int], KnownDraft, CoLocated]:
    """Returns a text, the draft that knows it until its grammar takes too long, and their harness."""
    text = expected_text(GREEDY, 30)
    draft = KnownDraft(text)
    draft.fails_at, draft.failure = fails_at, GrammarLimitError("the grammar took 60 ms in one round")
    return text, draft, CoLocated(draft)


def test_a_draft_whose_grammar_takes_too_long_costs_speed_and_no_line_for_an_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text, _, harness = with_slow_grammar(9)
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    with caplog.at_level("INFO", logger=drafter.log.name):
        messages = harness.generate(session_id, opened.position, opened.hash, num_new=20)
    assert ids_of(messages) == text[4:24]
    (told,) = [each for each in caplog.records if "target alone" in each.message]
    assert told.levelname == "INFO" and told.exc_info is None


def test_many_generations_whose_drafts_grammar_takes_too_long_are_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text, draft, harness = with_slow_grammar(4)
    with caplog.at_level("INFO", logger=drafter.log.name):
        for name in range(1, 6):
            session_id, opened = harness.open(name, PROMPT, ignore_eos=True)
            assert ids_of(harness.generate(session_id, opened.position, opened.hash, num_new=3)) == text[4:7]
            if name == 4:
                draft.clock.sleep(1.0)
    told = [each for each in caplog.records if "target alone" in each.message]
    assert [getattr(each, "num_left_out", 0) for each in told] == [0, 3]


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_each_draft_has_the_time_of_one_round_for_its_masks(
    is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, find = 0.0, GrammarState._allowed

    def slow(self: GrammarState, path: TokenIds) -> Words:
        nonlocal now_s
        now_s += 0.02
        return find(self, path)

    monkeypatch.setattr(state_module.time, "thread_time", lambda: now_s)
    monkeypatch.setattr(GrammarState, "_allowed", slow)
    bounds = GrammarBounds(budget_s=0.05)
    grammar = tiny_vocabulary().compile(Grammar(GrammarKind.REGEX, "[a-e]{100}"), bounds)
    sequence = Flat(DraftSampler(replace(SAMPLED, grammar=grammar), (0,)), 32, 400, 3)
    sequence.commit(PROMPT)

    def propose(num_tokens: int) -> Draft:
        if not is_tree:
            return sequence.propose(num_tokens)
        return sequence.propose_tree(TreeBudget(num_tokens, num_tokens, 1), NodeValues())

    for _ in range(3):
        sequence.commit(propose(2).token_ids)
    assert len(propose(20).token_ids) == 2, "the third mask took too much"
    sequence.commit(propose(2).token_ids)


class Flat(RowsSequence):
    """A draft to which all tokens are alike."""

    def feed_root(self) -> Rows:
        return rows_of(np.zeros((1, 32), np.float32), SAMPLED.temperature)

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        return ((self.feed_root(), 1) for _ in paths)

    def _begin(self) -> Rows:
        return self.feed_root()

    def _go_on(self, drafted: Sequence[int]) -> Rows:
        return self.feed_root()


def test_a_long_text_is_read_beside_the_steps_and_drafted_for_once_it_is_read() -> None:
    prompt = tuple(i % 30 + 1 for i in range(READ_CHUNK * 2 + 10))
    text = expected_text(GREEDY, 40, prompt)
    draft = KnownDraft(text)
    harness = CoLocated(draft, FakeBackend(max_context=700))
    session_id, opened = harness.open(prompt=prompt, ignore_eos=True)
    draft.may_read.clear()
    replies = harness.submit(session_id, make_request(opened.position, opened.hash, 30))
    for _ in range(5):
        harness.engine.step()
    assert [r.num_draft_tokens for r in replies] == [0] * 5, "a step waited for the reading"  # type: ignore[union-attr]
    draft.may_read.set()
    harness.settle()
    messages = [r for r in replies if isinstance(r, GeneratedTokens)]
    assert ids_of(messages) == text[len(prompt) + 1 : len(prompt) + 31]
    harness.engine.drafter.close()  # type: ignore[union-attr]
    assert draft.num_open == 0


def test_a_session_closed_while_its_text_is_read_frees_the_draft_afterwards() -> None:
    prompt = tuple(i % 30 + 1 for i in range(READ_CHUNK * 3))
    draft = KnownDraft(expected_text(GREEDY, 40, prompt))
    harness = CoLocated(draft, FakeBackend(max_context=900))
    session_id, opened = harness.open(prompt=prompt, ignore_eos=True)
    draft.may_read.clear()
    harness.submit(session_id, make_request(opened.position, opened.hash, 30))
    harness.engine.step()
    assert draft.is_asked.wait(60), "a reading that has not begun is cancelled"
    harness.ask(session_id, CloseRequest())
    assert draft.num_open == 1
    draft.may_read.set()
    harness.engine.drafter.close()  # type: ignore[union-attr]
    assert draft.num_open == 0 and len(draft.num_proposed) <= 1, "it read on after the end"


def test_rounds_and_co_located_generations_share_a_forward() -> None:
    text = expected_text(GREEDY, 40)
    harness = CoLocated(KnownDraft(text))
    sessions = [harness.open(name, prompt=PROMPT, ignore_eos=True) for name in (1, 2, 3)]
    harness.backend.batches.clear()
    generations = [
        harness.submit(session_id, make_request(opened.position, opened.hash, 15))
        for session_id, opened in sessions[:2]
    ]
    session_id, opened = sessions[2]
    verdict = harness.submit(session_id, VerifyRequest(1, opened.position, opened.hash, draft_tokens=(1, 2)))
    harness.settle()
    assert harness.backend.batches == [[5, 5, 3], [5, 5], [5, 5]]
    assert isinstance(verdict[0], Verdict)
    for replies in generations:
        assert ids_of(replies) == text[4:19]  # type: ignore[arg-type]


@pytest.mark.parametrize("is_slow", [False, True])
def test_slow_drafts_for_several_are_made_side_by_side_and_quick_ones_in_the_engine(is_slow: bool) -> None:
    text = expected_text(GREEDY, 40)
    draft = KnownDraft(text)
    draft.takes_s = 1.5 * POOL_FROM_NS / 1e9 if is_slow else 0.0
    harness = CoLocated(draft)
    session_id, opened = harness.open(1, prompt=PROMPT, ignore_eos=True)
    harness.generate(session_id, opened.position, opened.hash, num_new=10)
    assert not any(name.startswith("draft") for name in draft.threads), "one generation needs no pool"
    sessions = [harness.open(name, prompt=PROMPT, ignore_eos=True) for name in (2, 3)]
    generations = [
        harness.submit(id, make_request(opened.position, opened.hash, 15)) for id, opened in sessions
    ]
    draft.threads.clear()
    harness.engine.step()
    assert [name.startswith("draft") for name in draft.threads] == [is_slow, is_slow]
    harness.settle()
    for replies in generations:
        assert ids_of(replies) == text[4:19]  # type: ignore[arg-type]


def test_a_cancel_keeps_what_was_sent_and_a_new_generation_goes_on_from_there() -> None:
    text = expected_text(GREEDY, 40)
    harness = CoLocated(KnownDraft(text))
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    replies = harness.submit(session_id, make_request(opened.position, opened.hash, 30))
    harness.engine.step()
    harness.submit(session_id, CancelRequest(1))
    harness.settle()
    *sent, end = replies
    assert isinstance(end, GeneratedTokens) and end.is_last and end.token_ids == ()
    assert ids_of(sent) == text[4:9] and end.position == 9  # type: ignore[arg-type]
    messages = harness.generate(session_id, end.position, end.hash, num_new=10, round_id=2)
    assert ids_of(messages) == text[9:19]


def test_a_stream_that_lost_tokens_is_resumed_from_the_edges_position() -> None:
    text = expected_text(GREEDY, 40)
    harness = CoLocated(KnownDraft(text))
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    first, *_ = harness.generate(session_id, opened.position, opened.hash, num_new=20)
    again = harness.generate(session_id, first.position, first.hash, num_new=12, round_id=2)
    assert ids_of(again) == text[first.position : first.position + 12]


def test_a_generation_refused_in_mid_text_has_lost_nothing() -> None:
    text = expected_text(GREEDY, 60)
    harness = CoLocated(KnownDraft(text), FakeBackend(kv_tokens=24))
    session_id, opened = harness.open(prompt=PROMPT, ignore_eos=True)
    replies = harness.submit(session_id, make_request(opened.position, opened.hash, 40))
    harness.settle()
    *sent, error = replies
    assert isinstance(error, RoundError) and error.code is RoundErrorCode.REFUSED
    assert ids_of(sent) == text[4 : error.position]  # type: ignore[arg-type]
    harness.engine.step()
    assert harness.draft.num_open == 0


def test_progress_of_an_evicted_session_never_runs_backwards() -> None:
    prompt = tuple(i % 30 + 1 for i in range(150))
    text = expected_text(GREEDY, 30, prompt)
    harness = CoLocated(KnownDraft(text), FakeBackend(max_context=300), max_step_tokens=20)
    session_id, opened = harness.open(prompt=prompt, ignore_eos=True)
    (session,) = harness.engine.sessions
    harness.engine.sessions.free(session)
    harness.backend.blocks = BlockManager(harness.backend.kv_tokens, block_size=1)  # no prefix either
    replies = harness.submit(session_id, make_request(opened.position, opened.hash, 10))
    harness.settle()
    progress = [r.done for r in replies if isinstance(r, Progress)]
    assert progress == sorted(progress) and progress[0] >= 0
    assert ids_of([r for r in replies if isinstance(r, GeneratedTokens)]) == text[151:161]


def test_without_a_draft_the_mode_is_refused_and_the_flag_named() -> None:
    harness = Harness()
    session_id, opened = harness.open()
    error = harness.ask(session_id, make_request(opened.position, opened.hash, 10))
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.UNIMPLEMENTED, "mode") and "--draft" in error.message


def test_more_drafted_tokens_than_a_round_takes_are_refused_by_name() -> None:
    harness = CoLocated(KnownDraft(()))
    session_id, opened = harness.open()
    error = harness.ask(session_id, make_request(opened.position, opened.hash, 10, depth=17))
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "num_speculative_tokens")


def test_the_embedded_target_has_its_draft_and_another_target_none_unless_named(tmp_path: Path) -> None:
    assert ServeConfig().draft_dir == EMBEDDED_DRAFT
    assert ServeConfig(draft="none").draft_dir is None
    assert ServeConfig(target=tmp_path).draft_dir is None
    assert ServeConfig(target=tmp_path, draft="drafts/mine").draft_dir == Path("drafts/mine")


def test_an_embedded_draft_that_cannot_be_loaded_is_done_without_and_a_named_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.config.EMBEDDED_DRAFT", tmp_path)
    assert create_drafter(ServeConfig(), FakeBackend()) is None
    assert "no co-located draft" in caplog.text
    with pytest.raises(ModelError, match=r"draft\.json"):
        create_drafter(ServeConfig(draft=str(tmp_path)), FakeBackend())


def test_the_embedded_draft_says_what_it_is_and_is_loaded_with_its_first_sequence() -> None:
    loaded = create_draft_model("model", EMBEDDED_DRAFT)
    draft = DeferredDraft(EMBEDDED_DRAFT, num_threads=1)
    for name in ("num_tokens", "max_context", "eos_token_ids", "signal_names", "fingerprint"):
        assert getattr(draft, name) == getattr(loaded, name), name
    assert draft.tokenizer_fingerprint == loaded.tokenizer_fingerprint and not draft.is_loaded
    drafts = []
    models: tuple[DraftModel, ...] = (draft, loaded)
    for model in models:
        sequence = model.sequence(SamplingParams(temperature=0.0))
        sequence.commit([5, 6, 7])
        drafts.append(sequence.propose(4).token_ids)
        sequence.close()
    assert draft.is_loaded and drafts[0] == drafts[1]
    draft.close()
    loaded.close()


def test_a_draft_of_another_tokenizer_is_refused_with_what_to_do() -> None:
    with pytest.raises(IncompatibleError, match="tokenizer"):
        create_drafter(ServeConfig(), FakeBackend())


class _BigSequence(_KnownSequence):
    num_kv_bytes = 100


def test_generations_beyond_the_bound_of_the_drafts_kv_go_on_without_a_draft() -> None:
    draft = KnownDraft([9] * 100)
    draft.sequence = lambda *_, **__: _BigSequence(draft, 0)  # type: ignore[method-assign, assignment]
    draft.num_open = 3
    drafter = CoLocatedDrafter(draft, max_kv_bytes=250)  # type: ignore[arg-type]
    harness = Harness(FakeBackend(), drafter=drafter)
    opened = [harness.open(name, prompt=[1 + name, 2, 3]) for name in range(3)]
    replies = [harness.submit(each, make_request(one.position, one.hash, 20)) for each, one in opened]
    for _ in range(3):
        harness.engine.step()
    last = [[r for r in each if isinstance(r, GeneratedTokens)][-1] for each in replies]
    assert [each.num_draft_tokens > 0 for each in last] == [True, True, False]
    assert draft.num_open == 2
    harness.settle()
    assert all(each[-1].is_last for each in replies)  # type: ignore[union-attr]


def test_beside_another_tenant_drafts_take_no_longer_than_their_share_of_a_step() -> None:
    draft = KnownDraft([9] * 100)
    harness = CoLocated(draft)
    for session_id, one in [harness.open(name, prompt=[1 + name, 2, 3]) for name in range(3)]:
        harness.submit(session_id, make_request(one.position, one.hash, 20, 4))
    harness.engine.step()
    works = list(harness.engine.sessions.active.values())
    drafter = harness.engine.drafter
    assert drafter is not None
    drafter._token_s = 0.01
    for budget_s, expected in ((1.0, [4, 4, 4]), (0.065, [4, 2, 0]), (0.001, [1, 0, 0])):
        for work in works:
            work.draft_tokens = ()
        drafter.draft_for(works, 64, harness.engine.sessions.isolate, budget_s)
        assert [len(work.draft_tokens) for work in works] == expected
        drafter._token_s = 0.01
