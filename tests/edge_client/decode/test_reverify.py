"""`--reverify`: what was kept unverified is judged in the end, and taken back where the target disagrees."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge.edge_fakes import PROMPT, TARGET, FakeDraft, FakeVerifier, Late, Silent, error, make_session
from support.edge.engine_link import ChanceDraft, EngineLink
from support.edge.random_runs import FAULTS, run_fields
from support.edge.telling_draft import HARD_TOKEN, TellingDraft, every, make_gate
from support.fakes import FakeBackend

from outrider.common.errors import LinkError, UsageError
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.stopping import TextStopper
from outrider.common.types import (
    FinishReason,
    OpenRequest,
    Origin,
    RoundErrorCode,
    SamplingParams,
    StopParams,
    VerifyRequest,
)
from outrider.edge_client.config.methods import check_method
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.core.unverified import buffer_unverified, without_dropped
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.session.generation import Generation
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import Connection
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

NEW = TARGET[2:]
WRONG_FROM_3 = [*TARGET[:3], 77, 78, *TARGET[5:]]


class PromptReconnector:
    """Connects when it is asked, once it was asked in vain as often as `num_vain` says."""

    last_error = None
    has_failed = False

    def __init__(self, link: Any, num_vain: Callable[[], int], pass_time: Callable[[], None]) -> None:
        self._link, self._num_vain, self._pass_time = link, num_vain, pass_time
        self._left: int | None = None

    def start(self) -> None:
        if self._left is None:
            self._left = self._num_vain()

    def take(self, timeout_s: float = 0.0) -> Connection | None:
        if self._left is None:
            return None
        if self._left:
            self._left -= 1
            self._pass_time()
            return None
        self._left = None
        connection: Connection = self._link.connect(1.0)
        return connection

    def stop(self) -> None:
        self._left = None


def reconnect_with(remote: RemoteVerifier, reconnector: PromptReconnector) -> None:
    remote._connections._reconnector = reconnector  # type: ignore[assignment]


def make(verifier: FakeVerifier, draft: FakeDraft, num_vain: int = 0, **given: Any) -> EdgeSession:
    session = make_session(verifier, draft, is_reverified=True, **given)
    reconnect_with(session._state.remote, PromptReconnector(verifier, lambda: num_vain, lambda: None))
    return session


def shown(events: list[SessionEvent]) -> str:
    """The text as a reader of the events has it."""
    text, num_tokens = "", 0
    for event in events:
        match event:
            case TokenEvent():
                assert event.index == num_tokens, "tokens come in order, again after a roll-back"
                text, num_tokens = text + event.text, num_tokens + 1
            case RolledBackEvent():
                assert event.num_tokens < num_tokens
                text, num_tokens = text[: event.num_chars], event.num_tokens
            case EndEvent():
                text += event.text
    return text


# ------------------------------------------------------------------------------------ single cases


def test_a_kept_token_comes_first_in_the_next_draft_and_loses_its_mark() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = make(verifier, FakeDraft(), depth=3)
    events = list(session.generate())
    second = verifier.of(VerifyRequest)[1]
    assert second.base_position == 3 and second.committed_tokens == ()
    assert second.draft_tokens == TARGET[3:6] and second.q_token_probs == ()
    assert MarkClearedEvent(1) in events and session.result.num_unverified_tokens == 0
    assert session.result.origins[1] is Origin.FALLBACK, "where it came from stays true"
    assert session.result.token_ids == NEW[:12]
    stats = session.result.stats
    assert stats.num_reverified_tokens == 1 and stats.num_rolled_back_tokens == 0
    assert sum(each.num_draft_tokens for each in stats.rounds if each.is_answered) == (
        sum(each.num_accepted_tokens for each in stats.rounds)
    ), "a kept token is no draft"


def test_a_kept_token_that_the_target_would_not_have_chosen_is_taken_back() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = make(verifier, FakeDraft(WRONG_FROM_3), depth=3)
    events = list(session.generate())
    assert RolledBackEvent(1, len("<10>")) in events
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0
    assert session.result.text == shown(events) == "".join(f"<{token}>" for token in NEW[:12])
    assert session.result.origins[1] is Origin.CORRECTION
    assert session.result.stats.num_rolled_back_tokens == 1
    assert len(session.result.stats.token_times_ns) == 12


def test_more_tokens_than_a_round_takes_are_judged_in_several() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = make(verifier, FakeDraft(), 9, on_timeout=OnTimeout.EDGE_ONLY, max_new_tokens=50)
    events = list(session.generate())
    judging = verifier.of(VerifyRequest)[1:4]
    assert [len(each.draft_tokens) for each in judging] == [16, 16, 6], "16 are what this verifier takes"
    assert session.result.token_ids == NEW[:50] and session.result.num_unverified_tokens == 0
    assert sum(isinstance(event, MarkClearedEvent) for event in events) == 40


def test_the_end_of_an_unverified_text_waits_for_its_verdict() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    draft = FakeDraft([*TARGET[:9], 99, *TARGET[10:]])
    session = make(verifier, draft, 20, on_timeout=OnTimeout.EDGE_ONLY, max_new_tokens=12)
    events = list(session.generate())
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0
    assert session.result.finish_reason is FinishReason.LENGTH
    assert RolledBackEvent(7, 7 * len("<10>")) in events and session.result.text == shown(events)


def test_a_stop_string_in_unverified_text_ends_it_only_if_the_target_wrote_it() -> None:
    verifier = FakeVerifier(script={("verify", 1): Silent()})
    session = make(
        verifier,
        FakeDraft(WRONG_FROM_3),
        3,
        on_timeout=OnTimeout.EDGE_ONLY,
        stop_strings=("<78>", "<17>"),
        max_new_tokens=30,
    )
    events = list(session.generate())
    assert session.result.finish_reason is FinishReason.STOP
    assert session.result.text == shown(events) == "".join(f"<{token}>" for token in NEW[:7])
    assert session.result.token_ids == NEW[:8]


def test_a_text_that_nobody_judges_ends_marked_after_the_recover_timeout() -> None:
    verifier = FakeVerifier(script={("verify", number): Silent() for number in range(1, 100)})
    session = make(
        verifier,
        FakeDraft(),
        on_timeout=OnTimeout.EDGE_ONLY,
        deadline_s=0.02,
        recover_timeout_s=0.1,
        max_new_tokens=4,
    )
    list(session.generate())
    assert session.result.token_ids == NEW[:4] and session.result.num_unverified_tokens == 3
    assert session.result.finish_reason is FinishReason.LENGTH


def test_a_cancel_ends_the_wait_for_the_last_verdict() -> None:
    verifier = FakeVerifier(script={("verify", number): Silent() for number in range(1, 100)})
    session = make(
        verifier, FakeDraft(), on_timeout=OnTimeout.EDGE_ONLY, recover_timeout_s=60.0, max_new_tokens=4
    )
    for event in session.generate():
        if isinstance(event, TokenEvent) and event.index == 3:
            session.cancel()
    assert session.result.finish_reason is FinishReason.CANCELLED
    assert session.result.token_ids == NEW[:4] and session.result.num_unverified_tokens == 3


def test_a_late_verdict_that_disagrees_takes_the_text_back_at_once() -> None:
    verifier = FakeVerifier(script={("verify", 1): Late()})
    session = make(verifier, FakeDraft(WRONG_FROM_3), depth=3)
    list(session.generate())
    assert session.result.token_ids == NEW[:12] and session.result.num_unverified_tokens == 0
    assert session.result.stats.num_late_verdicts == 1


def test_a_session_that_is_opened_again_begins_before_what_is_to_be_judged() -> None:
    verifier = FakeVerifier(
        script={("verify", 1): Silent(), ("verify", 2): error(RoundErrorCode.UNKNOWN_SESSION)}
    )
    session = make(verifier, FakeDraft(WRONG_FROM_3), depth=3)
    events = list(session.generate())
    rebuild = verifier.of(OpenRequest)[1]
    assert rebuild.token_ids == TARGET[:3], "without the kept token"
    assert RolledBackEvent(1, 4) in events and session.result.token_ids == NEW[:12]


def test_a_text_begun_without_any_contact_is_judged_from_its_first_token() -> None:
    verifier = FakeVerifier()
    is_down = [True]
    verifier.is_down = lambda: is_down[0]
    draft = FakeDraft([*PROMPT, 77, *TARGET[3:]])
    session = make_session(verifier, draft, on_timeout=OnTimeout.EDGE_ONLY, is_reverified=True)
    reconnect_with(session._state.remote, FailingReconnector(verifier, is_down))
    events = list(session.generate())
    assert isinstance(events[0], TokenEvent) and events[0].token_id == 77
    assert verifier.of(OpenRequest)[0].token_ids == PROMPT
    assert session.result.token_ids == NEW[:12] and session.result.text == shown(events)


class FailingReconnector(PromptReconnector):
    """The first attempt fails; the next ones find the link after three looks."""

    has_failed = True
    last_error = LinkError("no link")  # type: ignore[assignment]

    def __init__(self, link: Any, is_down: list[bool]) -> None:
        super().__init__(link, lambda: 3, lambda: None)
        self._is_down = is_down
        self._num_starts = 0

    def start(self) -> None:
        self._num_starts += 1
        if self._num_starts == 1:
            return
        self._is_down[0] = False
        super().start()


# ----------------------------------------------------------------------- what a reader who cannot unread gets


def token(index: int, *, is_verified: bool) -> TokenEvent:
    origin = Origin.ACCEPTED if is_verified else Origin.FALLBACK
    return TokenEvent(index, index, f"{index}", origin, is_verified, 0)


def test_unverified_text_is_held_back_until_it_is_verified_or_taken_back() -> None:
    given_events = [
        token(0, is_verified=True),
        token(1, is_verified=False),
        token(2, is_verified=False),
        MarkClearedEvent(1),
        RolledBackEvent(2, 2),
        token(2, is_verified=True),
        token(3, is_verified=False),
        EndEvent(FinishReason.LENGTH, "x"),
    ]
    seen: list[tuple[int, str]] = []

    def events() -> Iterator[SessionEvent]:
        for number, event in enumerate(given_events):
            seen.append((number, "".join(each.text for each in out)))
            yield event

    out: list[TokenEvent | EndEvent] = []
    for event in buffer_unverified(events()):
        assert isinstance(event, TokenEvent | EndEvent)
        out.append(event)
    assert [text for _, text in seen] == ["", "0", "0", "0", "01", "01", "012", "012"]
    assert [getattr(event, "is_verified", None) for event in out] == [True, True, True, False, None]


def test_of_tokens_taken_back_only_those_sent_before_are_counted() -> None:
    given_events = [token(3, is_verified=False), token(4, is_verified=False), RolledBackEvent(2, 2)]
    kept, num_dropped = without_dropped([*given_events, token(2, is_verified=True)], num_sent=3)
    assert kept == [RolledBackEvent(2, 2), token(2, is_verified=True)]
    assert num_dropped == 1
    assert without_dropped([token(0, is_verified=True)], 0) == ([token(0, is_verified=True)], 0)


def test_what_was_held_back_comes_before_the_error_that_ends_the_text() -> None:
    def events() -> Iterator[SessionEvent]:
        yield token(0, is_verified=False)
        raise LinkError("gone")

    out = []
    with pytest.raises(LinkError):
        for event in buffer_unverified(events()):
            out.append(event)
    assert [event.index for event in out if isinstance(event, TokenEvent)] == [0]


def test_the_daemons_clients_never_get_what_is_taken_back() -> None:
    session = make(FakeVerifier(script={("verify", 1): Silent()}), FakeDraft(WRONG_FROM_3), depth=3)

    async def run() -> list[SessionEvent]:
        generation, events = Generation(session, is_reverified=True), []
        while batch := await generation.next_batch():
            events += batch
        return events

    events = asyncio.run(run())
    assert session.result.stats.num_rolled_back_tokens == 1
    assert all(isinstance(event, TokenEvent | EndEvent) for event in events)
    assert shown(events) == session.result.text == "".join(f"<{token}>" for token in NEW[:12])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"method": "sparse"}, "--reverify goes with --method coupled, not with --method sparse"),
        ({"mode": "cloud-only"}, "--reverify goes with --mode speculative or auto"),
        ({"mode": "edge-only"}, "--reverify goes with --mode speculative or auto"),
        ({"on_timeout": "wait"}, "--on-timeout wait keeps none"),
    ],
)
def test_what_it_cannot_go_with_is_refused_by_name(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_method(run_config(reverify=True, **flags))
    check_method(run_config(reverify=True, mode="auto", on_timeout="edge_only"))


# --------------------------------------------------------------------- any text, any fault: cloud-only's text

ENGINE_PROMPT = (5, 6, 7)
BACKEND = FakeBackend()


class PairDecoder:
    """A character takes two tokens: what it shows depends on all that came before."""

    def __init__(self) -> None:
        self._held: int | None = None

    def __call__(self, token_id: int) -> str:
        if self._held is None:
            self._held = token_id
            return ""
        first, self._held = self._held, None
        return f"<{first},{token_id}>"


def reference_ids(sampling: SamplingParams, num_tokens: int, max_context: int = 64) -> list[int]:
    text = list(ENGINE_PROMPT)
    while len(text) - len(ENGINE_PROMPT) < num_tokens and len(text) < max_context:
        logits = BACKEND.logits_after(text)[None, : BACKEND.num_tokens]
        num_prompt = len(ENGINE_PROMPT)
        scores = process_logits(
            np, logits, sampling, prompt_ids=text[:num_prompt], output_ids=text[num_prompt:]
        )
        text.append(int(choose(scores, sampling, (len(text),))[0]))
    return text[len(ENGINE_PROMPT) :]


def expected(sampling: SamplingParams, stop: StopParams) -> tuple[list[int], str, FinishReason]:
    stopper, kept, text = TextStopper(stop, (0,), PairDecoder()), [], ""
    for token_id in reference_ids(sampling, stop.max_new_tokens):
        step = stopper.push(token_id)
        kept.append(token_id)
        text += step.text
        if step.finish is not None:
            return kept, text, step.finish
    return kept, text + stopper.flush(), FinishReason.CONTEXT


class Restless(ModePolicy):
    """Changes its mind by chance, whatever was measured."""

    def __init__(self, seed: int) -> None:
        super().__init__(CHOOSABLE_MODES)
        self._random = random.Random(seed)

    def choose(self, num_remaining: int) -> ExecutionMode:
        if self._random.random() < 0.3:
            self.current = self._random.choice(self._modes)
        return self.current


def decode(
    link: EngineLink, run: dict[str, Any], on_timeout: OnTimeout
) -> tuple[SessionResult, list[SessionEvent]]:
    sampling = SamplingParams(temperature=run["temperature"], seed=run["seed"])
    target_text = [*ENGINE_PROMPT, *reference_ids(sampling, 200)]
    draft = ChanceDraft(target_text, run["accuracy"], run["seed"], run["draft_context"])
    is_gated, is_auto = run.get("is_gated", False), run.get("is_auto", False)
    choice = Restless(run["seed"]) if is_auto else None
    window = RoundWindow(run["window"], choice, run.get("may_branch", False))
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        clock=link.clock,
        threads=link.threads,
    )
    chance = random.Random(run["seed"])
    num_vain = partial(chance.choice, (0, 0, 1, 3, 12))
    reconnect_with(verifier, PromptReconnector(link, num_vain, lambda: link.clock.sleep(0.02)))
    options = SessionOptions(
        mode=ExecutionMode.AUTO if is_auto and not is_gated else ExecutionMode.SPECULATIVE,
        sampling=sampling,
        stop=run["stop"],
        on_timeout=on_timeout,
        recover_timeout_s=1000.0,
        is_reverified=True,
    )
    session = EdgeSession(
        ENGINE_PROMPT,
        options,
        decode=PairDecoder(),
        renew_decode=PairDecoder,
        verifier=verifier,
        draft=TellingDraft(draft, every(11, HARD_TOKEN)) if is_gated else draft,  # type: ignore[arg-type]
        depth=FixedDepth(run["depth"]),
        window=RoundWindow() if is_gated else window,
        gate=make_gate(GateUse.COMMIT) if is_gated else None,
    )
    events = []
    for event in session.generate():
        link.check_integrity()
        events.append(event)
    return session.result, events


def runs() -> st.SearchStrategy[dict[str, Any]]:
    endings = st.sampled_from([(), (",9>",), ("<3,", "7>")])
    fields = run_fields(4, (0.0, 0.5, 0.9, 1.0), short_context=20, stop_strings=endings)
    return st.fixed_dictionaries(fields | dict.fromkeys(("is_gated", "is_auto", "may_branch"), st.booleans()))


def check(run: dict[str, Any], on_timeout: OnTimeout) -> SessionResult:
    link = EngineLink(FakeBackend(kv_tokens=128), replace(FAULTS, lose_answer=0.12), seed=run["seed"])
    result, events = decode(link, run, on_timeout)
    token_ids, text, finish = expected(
        SamplingParams(temperature=run["temperature"], seed=run["seed"]), run["stop"]
    )
    assert result.num_unverified_tokens == 0
    assert list(result.token_ids) == token_ids
    assert result.text == shown(events) == text and result.finish_reason is finish
    assert len(result.stats.token_times_ns) == len(result.logprobs) == len(token_ids)
    held = "".join(e.text for e in buffer_unverified(iter(events)) if isinstance(e, TokenEvent | EndEvent))
    assert held == text
    return result


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), on_timeout=st.sampled_from([OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY]))
def test_under_any_fault_the_text_is_cloud_onlys_in_the_end(
    run: dict[str, Any], on_timeout: OnTimeout
) -> None:
    check(run, on_timeout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), on_timeout=st.sampled_from([OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY]))
def test_under_many_faults_many_texts_are_cloud_onlys(run: dict[str, Any], on_timeout: OnTimeout) -> None:
    check(run, on_timeout)


def test_what_a_commit_gate_keeps_is_judged_in_fewer_and_longer_rounds() -> None:
    stop = StopParams(max_new_tokens=50, ignore_eos=True)
    run = {"window": 1, "depth": 3, "accuracy": 1.0, "temperature": 0.8, "draft_context": 1000, "stop": stop}
    num_rounds = []
    for is_gated in (False, True):
        link = EngineLink(FakeBackend(kv_tokens=128))
        result, _ = decode(link, run | {"seed": 1, "is_gated": is_gated}, OnTimeout.FIRST_TOKEN)
        assert result.num_unverified_tokens == 0
        assert list(result.token_ids) == reference_ids(SamplingParams(seed=1), 50)
        num_rounds.append(len(link.sent))
    assert num_rounds[1] < 0.5 * num_rounds[0]


def test_the_faults_of_these_tests_do_make_texts_that_are_taken_back() -> None:
    stop = StopParams(max_new_tokens=50, ignore_eos=True)
    base = {"window": 2, "depth": 3, "accuracy": 0.5, "temperature": 0.8, "draft_context": 1000, "stop": stop}
    results = [check(base | {"seed": seed}, OnTimeout.EDGE_ONLY) for seed in range(10)]
    assert sum(result.stats.num_rolled_back_tokens for result in results) > 20
    assert sum(result.stats.num_reverified_tokens for result in results) > 5
