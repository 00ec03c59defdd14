"""Grammars at the verifier: compiled beside the engine, refused by name, and each at its own session's cost."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeBackend
from support.grammars import EOS, NUM_TOKENS, TOKENIZER, vocabulary
from support.tiny_grammars import AtOnce, Later, cost_by_path, tiny, tiny_store, tiny_vocabulary
from test_engine import GREEDY, SAMPLED, Harness, round_of

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.job import REPORT_S, Disconnect, Job
from outrider.cloud_verifier.server.loading import create_grammars
from outrider.cloud_verifier.verification import grammars as grammars_module
from outrider.cloud_verifier.verification.grammars import (
    MAX_KEPT_OF_TENANT,
    MAX_WAITING,
    Found,
    GrammarStore,
    TooManyGrammarsError,
)
from outrider.common.alignment import TokenChain
from outrider.common.errors import InvalidFieldError
from outrider.common.grammar import checked, worker
from outrider.common.grammar.checked import CheckedCompiler, NotCheckedError
from outrider.common.grammar.memory import NoGrammarRoomError
from outrider.common.grammar.state import UNBOUNDED, CompiledGrammar, GrammarBounds
from outrider.common.methods import drafts_trees, sends_probs, sends_support
from outrider.common.process.extras import how_to_install, needs_extra
from outrider.common.sampling.support import certain
from outrider.common.types import (
    Closed,
    CloseRequest,
    CorrectionKind,
    GeneratedTokens,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Method,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    SessionResponse,
    Support,
    Verdict,
)
from outrider.models import EMBEDDED

LIST = r"([a-f]{2}[0-9],)+"


def raw(pattern: str) -> Grammar:
    """Returns a grammar as it comes from the wire."""
    return Grammar(GrammarKind.REGEX, pattern)


def opening(pattern: str, sampling: SamplingParams = GREEDY, name: int = 1) -> OpenRequest:
    return OpenRequest(bytes([name]) * 16, (5, 6, 7), 3, replace(sampling, grammar=raw(pattern)))


def begin_list(**fields: Any) -> tuple[Harness, OpenRequest, list[int]]:
    """Opens a session whose grammar is `LIST`; returns its opening, and what the target alone writes."""
    harness = Harness(grammars=tiny_store())
    request = replace(opening(LIST), **fields)
    assert isinstance(harness.ask(request.session_id, request), Opened)
    return harness, request, harness.reference((5, 6, 7), replace(GREEDY, grammar=tiny(LIST)), 12)


def refusal(harness: Harness, request: OpenRequest) -> RoundError:
    reply = harness.ask(request.session_id, request)
    assert isinstance(reply, RoundError) and not len(harness.engine.sessions)
    return reply


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rounds_and_generations_write_the_targets_constrained_text(sampling: SamplingParams) -> None:
    harness = Harness(grammars=tiny_store())
    expected = harness.reference((5, 6, 7), replace(sampling, grammar=tiny(LIST)), 24)
    request = opening(LIST, sampling)
    opened = harness.ask(request.session_id, request)
    assert isinstance(opened, Opened)
    chain = TokenChain([5, 6, 7, opened.first_token])
    for round_id in range(1, 4):
        done = chain.position - 3
        draft = [*expected[done : done + 2], 31, 30]  # the last ones are excluded
        verdict = harness.ask(request.session_id, round_of(chain, round_id, draft))
        assert isinstance(verdict, Verdict) and verdict.accepted_len >= 2
        chain.extend([*draft[: verdict.accepted_len], verdict.correction])
    replies = harness.submit(request.session_id, GenerateRequest(9, chain.position, chain.hash, 8))
    harness.settle()
    for reply in replies:
        assert isinstance(reply, GeneratedTokens)
        chain.extend(reply.token_ids)
    assert chain.token_ids[3:] == expected[: chain.position - 3]


def test_a_bad_grammar_is_invalid_and_names_the_place() -> None:
    error = refusal(Harness(grammars=tiny_store()), opening("(ab"))
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "sampling.grammar")
    assert "unclosed group" in error.message


def test_without_llguidance_a_grammar_is_refused_by_name_and_other_sessions_are_served() -> None:
    harness = Harness()
    error = refusal(harness, opening("ab"))
    assert (error.code, error.field) == (RoundErrorCode.UNIMPLEMENTED, "sampling.grammar")
    assert "structured" in error.message
    harness.open(2)


def test_a_sandbox_that_refuses_priorities_does_not_keep_grammars_from_being_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("setpriority")

    monkeypatch.setattr(os, "setpriority", refuse)
    of_process = "import os\n\ndef refuse(_):\n    raise PermissionError\n\nos.nice = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(of_process)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = queue.Queue[Found]()
    with contextlib.closing(GrammarStore(CheckedCompiler(TOKENIZER, NUM_TOKENS, (EOS,)))) as store:
        assert store.get("default", raw("ab"), b"", found.put) is None
        assert isinstance(found.get(timeout=60), Grammar)
        assert isinstance(store.get("default", raw("ab"), b"", found.put), Grammar)


def test_an_opening_waits_for_its_grammar_and_nobody_else_does() -> None:
    pool = Later()
    harness = Harness(grammars=tiny_store(pool))
    request = opening(LIST)
    replies = harness.submit(request.session_id, request)
    harness.settle()
    harness.open(2)
    waits = Progress(request.round_id, 0, 3)
    assert replies == [waits]
    harness.pass_time(2 * REPORT_S)
    assert replies == [waits] * 3, "an edge that hears nothing would send it again"
    pool.run()
    harness.settle()
    assert [type(each) for each in replies[3:]] == [Opened]
    again = harness.ask(bytes([3]) * 16, replace(request, session_id=bytes([3]) * 16))
    assert isinstance(again, Opened), "the second time it is known"


@pytest.mark.parametrize("what", ["close", "disconnect", "newer"])
def test_an_opening_that_nobody_waits_for_any_more_opens_nothing(what: str) -> None:
    pool = Later()
    harness = Harness(grammars=tiny_store(pool))
    request = opening(LIST)
    replies = harness.submit(request.session_id, request)
    harness.settle()
    newer = []
    if what == "close":
        assert harness.ask(request.session_id, CloseRequest()) == Closed(False, 0)
    elif what == "disconnect":
        harness.submit(request.session_id, Disconnect())  # type: ignore[arg-type]
        harness.settle()
    else:
        newer = harness.submit(request.session_id, replace(request, round_id=1))
        harness.settle()
    pool.run()
    harness.settle()
    assert [each.code for each in replies if isinstance(each, RoundError)] == [RoundErrorCode.CANCELLED]
    answers = [each for each in newer if not isinstance(each, Progress)]
    assert len(harness.engine.sessions) == len(answers) == (what == "newer")


def test_an_older_opening_that_waits_for_its_grammar_never_replaces_a_newer_one_without() -> None:
    pool = Later()
    harness = Harness(grammars=tiny_store(pool))
    request = opening(LIST)
    older = harness.submit(request.session_id, request)
    harness.settle()
    harness.open(1, (8, 9), round_id=1)
    pool.run()
    harness.settle()
    assert [each.code for each in older if isinstance(each, RoundError)] == [RoundErrorCode.CANCELLED]
    assert [each.prompt_ids for each in harness.engine.sessions] == [(8, 9)]


def test_an_opening_whose_session_is_busy_when_its_grammar_is_ready_is_answered_after() -> None:
    pool = Later()
    harness = Harness(grammars=tiny_store(pool))
    session_id, opened = harness.open(1)
    again = harness.submit(session_id, replace(opening(LIST), round_id=1))
    harness.settle()
    generation = harness.submit(session_id, GenerateRequest(2, opened.position, opened.hash, 50))
    harness.engine.step()
    pool.run()
    harness.settle()
    assert [type(each) for each in again] == [Progress, Opened]
    assert isinstance(generation[-1], GeneratedTokens) and generation[-1].is_last


def test_masks_that_take_too_long_end_their_own_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(grammars=tiny_store())
    other, opened = harness.open(2)
    monkeypatch.setattr(grammars_module, "MASKS_BUDGET_S", 0.0)
    request = opening(LIST)
    slow = harness.submit(request.session_id, request)
    chain = TokenChain([5, 6, 7, opened.first_token])
    fast = harness.submit(other, round_of(chain, 1, [1, 2]))
    harness.settle()
    assert isinstance(fast[0], Verdict)
    (error,) = slow
    assert isinstance(error, RoundError)
    assert (error.code, error.field) == (RoundErrorCode.INVALID, "sampling.grammar")
    assert [each.opening.session_id for each in harness.engine.sessions] == [other]


@pytest.mark.parametrize(
    ("method", "parents"),
    [(each, ()) for each in Method] + [(each, (-1, 0, 1, 0)) for each in Method if drafts_trees(each)],
)
def test_a_mask_that_drafted_tokens_alone_need_cuts_the_draft_and_ends_no_text(
    method: Method, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, request, expected = begin_list(method=method, num_logprobs=2)
    asked = cost_by_path(monkeypatch, lambda path: (0.01, 0.02, 0.06)[len(path)])
    chain, tokens = TokenChain([5, 6, 7, expected[0]]), (*expected[1:4], 31)
    supports = list(map(certain, tokens))
    if parents:  # of the nodes with children
        supports = [supports[0], Support((tokens[1], 31), (1, 1)), supports[2]]
    round_ = round_of(
        chain,
        1,
        tokens,
        parents=parents,
        q_token_probs=(0.9,) * 4 if sends_probs(method) else (),
        q_support=tuple(supports) if sends_support(method) else (),
    )
    verdict = harness.ask(request.session_id, round_)
    assert isinstance(verdict, Verdict), verdict
    assert asked == [(), tokens[:1], tokens[:2]], "and of no node after these"
    # The last one that is judged has no row, so nothing follows it.
    assert (verdict.accepted_len, verdict.correction_kind) == (2, CorrectionKind.NONE)
    assert verdict.accepted_nodes == ((0, 1) if parents else ()) and len(verdict.logprobs) == 2
    chain.extend(tokens[:2])
    assert (verdict.position, verdict.hash) == (chain.position, chain.hash)
    more = harness.ask(request.session_id, round_of(chain, 2))
    assert isinstance(more, Verdict) and more.correction == expected[3]


def test_a_draft_whose_bonus_has_no_mask_is_accepted_in_full_and_the_next_round_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, request, expected = begin_list()
    cost_by_path(monkeypatch, lambda path: 0.06 if len(path) == 2 else 0.01)
    chain = TokenChain([5, 6, 7, expected[0]])
    first = harness.submit(request.session_id, round_of(chain, 1, expected[1:3], pipelined=True))
    chain.extend(expected[1:3])
    second = harness.submit(request.session_id, round_of(chain, 2, expected[3:4], pipelined=True))
    harness.settle()
    (one,), (other,) = first, second
    assert isinstance(one, Verdict) and (one.accepted_len, one.correction_kind) == (2, CorrectionKind.NONE)
    assert isinstance(other, Verdict) and (other.accepted_len, other.correction) == (1, expected[4])


def test_masks_of_drafts_pay_for_what_earlier_rounds_took_beyond_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, request, expected = begin_list()
    asked = cost_by_path(monkeypatch, lambda path: 0.13 if path else 0.01)
    chain, num_asked = TokenChain([5, 6, 7, expected[0]]), list[int]()
    for round_id in range(1, 7):
        asked.clear()
        verdict = harness.ask(
            request.session_id, round_of(chain, round_id, (expected[chain.position - 3], 31))
        )
        assert isinstance(verdict, Verdict) and verdict.accepted_len == 1
        chain.extend([expected[chain.position - 3]])
        num_asked.append(len(asked))
    assert num_asked == [2, 1, 1, 2, 1, 1]


def test_tenants_take_turns_and_each_has_its_own_grammars() -> None:
    pool, ready = Later(), list[str]()
    store = tiny_store(pool)
    for number in range(3):
        store.get("many", raw(f"a{{{number + 1}}}"), b"s", lambda _: ready.append("many"))
    store.get("one", raw("a{1}"), b"s", lambda _: ready.append("one"))
    pool.run()
    assert ready == ["many", "one", "many", "many"]
    assert store.get("one", raw("a{2}"), b"s", lambda _: None) is None, "it is another tenant's"


def test_an_opening_that_comes_again_replaces_the_one_that_waited() -> None:
    pool, ready = Later(), list[str]()
    store = tiny_store(pool)
    for session_id in (b"s", b"t"):
        for number in range(3):
            store.get(
                "one", raw("ab"), session_id, lambda _, s=session_id, n=number: ready.append(f"{s!r} {n}")
            )
    pool.run()
    assert ready == ["b's' 2", "b't' 2"]


def test_what_nobody_waits_for_any_more_is_neither_kept_nor_compiled() -> None:
    pool = Later()
    harness = Harness(grammars=tiny_store(pool))
    store, calls = harness.engine.grammars, [object() for _ in range(3 * MAX_WAITING)]
    assert store is not None
    for number, call in enumerate(calls):
        session_id, pattern = bytes([number]) * 16, f"a{{{number // 2 + 1}}}"
        for request in (replace(opening(pattern), session_id=session_id), Disconnect()):
            harness.engine.submit(Job(session_id, request, lambda _: None, 0, call=call))
        harness.settle()
    assert not store._told and not store._waiting and not harness.engine.admission._compiling
    assert len(pool.waiting) == 1, "and one function of the pool compiles all that is left"
    store.get("default", raw("ab"), b"s", lambda _: None)
    pool.run()
    assert list(store._kept) == [("default", raw("ab"))]


def test_forgetting_one_that_waits_leaves_the_others_and_what_is_being_compiled() -> None:
    told, order = list[str](), list[str]()

    class Forgetful:
        def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
            store.forget("t", raw("a"), b"1")  # one of two that wait for it, as it is compiled
            order.append(grammar.text)
            return grammar

        def close(self) -> None: ...

    store = GrammarStore(Forgetful(), pool := Later())
    for pattern, session_id in (("a", b"1"), ("a", b"2"), ("b", b"3"), ("c", b"4")):
        store.get("t", raw(pattern), session_id, lambda _, name=session_id: told.append(name.decode()))
    store.forget("t", raw("b"), b"3")
    store.forget("t", raw("b"), b"3")
    store.forget("nobody", raw("b"), b"3")
    pool.run()
    assert order == ["a", "c"] and told == ["2", "4"]


def test_a_tenant_has_only_so_many_waiting_and_kept() -> None:
    pool = Later()
    store = tiny_store(pool)
    for number in range(MAX_WAITING):
        store.get("many", raw(f"a{{{number + 1}}}"), b"s", lambda _: None)
    with pytest.raises(TooManyGrammarsError, match="of this tenant"):
        store.get("many", raw("b"), b"s", lambda _: None)
    store.get("one", raw("b"), b"s", lambda _: None)
    pool.run()
    for number in range(MAX_KEPT_OF_TENANT):
        store.get("many", raw(f"b{{{number + 1}}}"), b"s", lambda _: None)
    pool.run()
    assert isinstance(store.get("one", raw("b"), b"s", lambda _: None), Grammar)
    assert store.get("many", raw("a{1}"), b"s", lambda _: None) is None


def test_compiling_is_on_a_thread_of_its_own_and_a_failure_is_an_answer() -> None:
    class Broken:
        def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
            assert threading.current_thread().name.startswith("grammar")
            raise RuntimeError("a bug")

        def close(self) -> None: ...

    store, told = GrammarStore(Broken()), queue.Queue[Found]()
    for _ in range(2):  # a bug is no verdict on the grammar: it is compiled again
        assert store.get("t", raw("a"), b"s", told.put) is None
        found = told.get(timeout=30)
        assert isinstance(found, InvalidFieldError) and "could not be compiled" in found.reason
    store.close()


def test_a_package_that_is_missing_is_told_to_the_operator_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Bare:
        def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
            with needs_extra("structured", "a grammar"):
                raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")

        def close(self) -> None: ...

    error = refusal(Harness(grammars=GrammarStore(Bare(), AtOnce())), opening("ab"))
    assert (error.code, error.field) == (RoundErrorCode.UNIMPLEMENTED, "sampling.grammar")
    assert "structured" in error.message and how_to_install("structured") not in error.message
    assert how_to_install("structured") in caplog.text


def test_a_grammar_that_never_compiles_is_given_up_and_the_next_one_is_not() -> None:
    compiler = CheckedCompiler(TOKENIZER, NUM_TOKENS, (EOS,), deadline_s=0.3)
    hostile = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 99999989}))
    try:
        with pytest.raises(InvalidFieldError, match=r"takes more (memory|than 0.3 s) to compile"):
            compiler.compile(hostile)
        with pytest.raises(InvalidFieldError, match="unclosed group"):
            compiler.compile(raw("("))
        assert compiler.compile(raw("ab")).compiled is not None
    finally:
        compiler.close()


# Stands for the process that compiles, and does this: `run` counts its starts, `n` is the number of the question.
PROCESS = """#!/bin/sh
run=$(ls {directory} | grep -c run); touch {directory}/run$run
{at_start}
echo ready
while read -r line; do n=$(echo "$line" | sed 's/.*"number": \\([0-9]*\\).*/\\1/')
{answer}
done
"""
ANSWER = (
    'case "$line" in *\'"text": "("\'*) e="bad $n" ;; *) e="" ;; esac; '
    'echo "{\\"number\\": $n, \\"error\\": \\"$e\\", \\"num_bytes\\": 4096, \\"compile_s\\": 0.001}"'
)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CheckedCompiler]]:
    """Returns compilers whose process is a script."""
    with contextlib.ExitStack() as stack:

        def make(at_start: str = "", answer: str = ANSWER) -> CheckedCompiler:
            path = tmp_path / "python"
            path.write_text(PROCESS.format(directory=tmp_path, at_start=at_start, answer=answer))
            path.chmod(0o700)
            monkeypatch.setattr(checked.sys, "executable", str(path))
            compiler = CheckedCompiler(TOKENIZER, NUM_TOKENS, (EOS,))
            compiler._vocabulary = vocabulary()
            stack.callback(compiler.close)
            return compiler

        yield make


def test_a_process_that_starts_too_slowly_is_ended_and_answers_nobody(
    stand_in: Callable[..., CheckedCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = stand_in(at_start='[ "$run" -gt 0 ] || exec sleep 60')
    monkeypatch.setattr(checked, "_MAX_WAIT_S", 0.0)
    with pytest.raises(NotCheckedError, match="too busy"):
        compiler.compile(raw("ab"))
    assert compiler._process is None
    monkeypatch.setattr(checked, "_MAX_WAIT_S", 30.0)
    assert compiler.compile(raw("ab")).compiled is not None
    with pytest.raises(InvalidFieldError, match=r"bad 2$"):
        compiler.compile(raw("("))


def test_a_process_that_does_not_start_says_nothing_of_a_grammar(
    stand_in: Callable[..., CheckedCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = stand_in(at_start="exit 1")
    with pytest.raises(NotCheckedError, match="ended as it started"):
        compiler.compile(raw("ab"))
    monkeypatch.setattr(checked.sys, "executable", str(TOKENIZER))  # no program
    with pytest.raises(NotCheckedError, match="no process"):
        compiler.compile(raw("ab"))
    assert compiler._process is None


def test_each_grammar_has_the_answer_to_it_whatever_became_of_the_process_before(
    stand_in: Callable[..., CheckedCompiler],
) -> None:
    compiler = stand_in()
    assert compiler.compile(raw("ab")).compiled is not None
    for number in (2, 4):
        with pytest.raises(InvalidFieldError, match=f"bad {number}$"):
            compiler.compile(raw("("))
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)  # between two grammars
        os.waitid(os.P_PID, compiler._process.pid, os.WEXITED | os.WNOWAIT)
        assert compiler.compile(raw("abc")).compiled is not None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("kill -KILL $$", NotCheckedError),
        ("kill -TERM $$", NotCheckedError),
        ('echo "{\\"number\\": 77, \\"error\\": \\"another one\'s\\"}"', NotCheckedError),
        ("kill -ABRT $$", InvalidFieldError),
        ("kill -PROF $$", InvalidFieldError),
        ("exit 1", InvalidFieldError),
    ],
)
def test_a_process_that_ends_says_something_of_the_grammar_only_where_that_ended_it(
    stand_in: Callable[..., CheckedCompiler], answer: str, error: type[Exception]
) -> None:
    compiler = stand_in(answer=f'if [ "$run" -eq 0 ]; then {answer}; else {ANSWER}; fi')
    store, told = GrammarStore(compiler, Later()), list[Found]()
    for _ in range(2):
        kept = store.get("t", raw("ab"), b"s", told.append)
        assert isinstance(store._pool, Later)
        store._pool.run()
    assert [type(each) for each in told] == ([error] if error is InvalidFieldError else [error, Grammar])
    assert kept is (told[0] if error is InvalidFieldError else None)


def test_a_grammar_that_could_not_be_looked_at_is_refused_and_served_the_next_time() -> None:
    class Busy:
        num_asked = 0

        def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
            self.num_asked += 1
            if self.num_asked == 1:
                raise NotCheckedError("the machine is too busy", "try again")
            return tiny_vocabulary().compile(grammar, bounds)

        def close(self) -> None: ...

    harness = Harness(grammars=GrammarStore(Busy(), AtOnce()))
    error = refusal(harness, opening(LIST))
    assert error.code is RoundErrorCode.REFUSED and error.retry_after_ms
    assert harness.engine.observer.refusals["grammars"] == 1
    assert isinstance(harness.ask(opening(LIST).session_id, opening(LIST)), Opened)


def test_a_tenant_whose_grammars_hold_what_they_may_is_refused_another_and_no_other_tenant_is() -> None:
    # A lexer of the smallest size counts 650 kB, a sequence 256 KiB; a quarter of the bound is for growth.
    store = GrammarStore(tiny_vocabulary(), AtOnce(), max_bytes=10_000_000, tenant_max_bytes=2_000_000)
    harness = Harness(grammars=store)

    def ask(name: int, pattern: str, tenant: str = "one") -> SessionResponse:
        return harness.ask(bytes([name]) * 16, opening(pattern, name=name), tenant)

    assert isinstance(ask(1, "a[b-d]*"), Opened)
    refused = ask(2, "c[b-d]*")
    assert (
        isinstance(refused, RoundError) and refused.code is RoundErrorCode.REFUSED and refused.retry_after_ms
    )
    assert "of this tenant" in refused.message and harness.engine.observer.refusals["grammars"] == 1
    assert isinstance(ask(2, "c[b-d]*", "two"), Opened)
    assert isinstance(ask(3, "a[b-d]*"), Opened), "another session of the first grammar has room"
    for name in (1, 3):
        harness.ask(bytes([name]) * 16, CloseRequest(), "one")
    for name, pattern in enumerate(("d[b-d]*", "e[b-d]*", "f[b-d]*"), 4):  # what is kept makes room
        harness.open(name, tenant="three")  # the engine knows its last batch until the next one
        assert isinstance(ask(name, pattern), Opened)
        harness.ask(bytes([name]) * 16, CloseRequest(), "one")
    assert [key[1].text for key in store._kept if key[0] == "one"] == ["e[b-d]*", "f[b-d]*"]


def test_an_operator_sets_the_memory_of_grammars() -> None:
    config = ServeConfig(
        target=Path(EMBEDDED) / "target", max_grammar_memory="3MiB", tenant_max_grammar_memory="2MiB"
    )
    store = create_grammars(config, FakeBackend())
    assert store is not None
    store.memory.add("one", 3 << 19)  # three quarters of it, the rest is for growth
    with pytest.raises(NoGrammarRoomError, match="of this tenant"):
        store.memory.make_room("one", 1)
    with pytest.raises(NoGrammarRoomError, match="of all tenants"):
        store.memory.make_room("two", (3 << 18) + 1)
    store.memory.make_room("two", 3 << 18)
    store.close()


def test_a_grammar_whose_lexer_cannot_be_replaced_in_a_round_is_compiled_anew_for_the_next_session() -> None:
    store, told = tiny_store(), list[Found]()
    assert store.get("t", raw("ab"), b"s", told.append) is None
    first = store.get("t", raw("ab"), b"s", told.append)
    assert isinstance(first, Grammar) and isinstance(first.compiled, CompiledGrammar)
    first.compiled.is_used_up = True
    assert store.get("t", raw("ab"), b"s", told.append) is None
    newest = store.get("t", raw("ab"), b"s", told.append)
    assert newest is told[1] and newest.compiled is not first.compiled  # type: ignore[union-attr]


def test_what_a_grammar_takes_is_measured_where_it_is_checked() -> None:
    # Two of the same are compiled after one another in the same process.
    large = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 9999}))
    with contextlib.closing(CheckedCompiler(TOKENIZER, NUM_TOKENS, (EOS,))) as compiler:
        costs = [compiler.compile(each).compiled._cost for each in (raw("ab"), large, large, raw("ab"))]  # type: ignore[attr-defined]
    assert all(each.num_bytes < 1 << 20 for each in (costs[0], costs[3]))
    assert all(1 << 20 < each.num_bytes < 16 << 20 and each.compile_s > 0 for each in costs[1:3])


def test_an_exception_without_a_text_is_an_error() -> None:
    class OutOfMemory:
        def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
            raise MemoryError

    assert worker._check(OutOfMemory(), raw("ab"))["error"] == "MemoryError"  # type: ignore[arg-type]


def test_a_backend_that_computes_elsewhere_masks_the_same_rows() -> None:
    """The masks of a step go up with its other inputs, and are unpacked where the scores are."""
    import numpy as np
    import torch

    from outrider.cloud_verifier.verification.rows import StepRound, penalize, penalties_of_round
    from outrider.common.tree import Tree

    tree = Tree((-1, 0, 0, -1))
    sampling = replace(SAMPLED, grammar=tiny(LIST), repetition_penalty=1.2, logit_bias=((3, 2.0),))
    each = StepRound(sampling, 5, (5, 6, 7), (1, 2), (11, 25, 3, 4), tree)
    logits = np.stack([FakeBackend().logits_after([row]) for row in range(5)])[
        :, : tiny_vocabulary().num_tokens
    ]
    found = penalties_of_round(each)
    expected = penalize(np, logits, each, found, (0,))
    on_torch = [
        of_path._replace(
            penalties=type(of_path.penalties)(*map(torch.from_numpy, of_path.penalties)),
            rows=torch.from_numpy(of_path.rows),
        )
        for of_path in found
    ]
    got = penalize(torch, torch.from_numpy(logits), each, on_torch, (0,))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    assert np.isinf(expected).any(axis=1).all() and np.isfinite(expected).any(axis=1).all()


@pytest.mark.parametrize("parents", [(), (-1, 0, 1, 0, -1, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
def test_a_cut_draft_keeps_the_rows_that_it_has_masks_for(
    num_rows: int, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from outrider.cloud_verifier.verification.rows import StepRound, penalize, penalties_of_round
    from outrider.common.sampling.history import History
    from outrider.common.tree import Tree

    def made(grammar: Grammar) -> StepRound:
        sampling = replace(SAMPLED, grammar=grammar, repetition_penalty=1.2, bad_words=((3, 4), (4,)))
        tree, history = Tree(parents) if parents else None, History(sampling, (5, 6, 7), (1, 2))
        return StepRound(sampling, 5, (5, 6, 7), (1, 2), (11, 31, 3, 1, 2, 4), tree, history=lambda: history)

    logits = np.stack([FakeBackend().logits_after([row]) for row in range(7)])[:, :32]
    whole = made(tiny(LIST))
    expected = penalize(np, logits, whole, penalties_of_round(whole), (0,))
    asked = cost_by_path(monkeypatch, lambda path: 0.06 if len(asked) > num_rows else 0.001)
    cut = made(tiny_vocabulary().compile(raw(LIST), GrammarBounds(0.05)))
    got = penalize(np, logits, cut, penalties_of_round(cut), (0,))
    np.testing.assert_array_equal(got[:num_rows], expected[:num_rows])
    assert cut.is_cut and cut.draft_token_ids == whole.draft_token_ids[:num_rows]
    assert cut.tree is None or cut.tree.parents == parents[:num_rows]
    assert list(cut.row_positions[: num_rows + 1]) == list(whole.row_positions[: num_rows + 1])
    assert cut.num_rows == len(cut.row_positions) == 7


def test_a_compiling_process_whose_parent_is_gone_ends_by_itself() -> None:
    code = (
        "import sys; from outrider.common.grammar import worker; worker.MAX_S, worker.MAX_BYTES = 1, 1 << 33;"
        f"worker.main({str(TOKENIZER)!r}, '{NUM_TOKENS}', '{EOS}')"
    )
    text = json.dumps({"type": "integer", "multipleOf": 99999989})
    hostile = {"kind": "json_schema", "text": text, "has_whitespace": False}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(hostile) + "\n",
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert done.stdout == "ready\n" and done.returncode == -signal.SIGPROF
