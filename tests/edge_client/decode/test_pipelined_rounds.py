"""Several rounds under way: the same text as one at a time, whatever stands, falls or gets lost."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge.engine_link import ChanceDraft, Chances, EngineLink
from support.edge.random_runs import FAULTS, run_fields
from support.edge.telling_draft import Tell, TellingDraft
from support.fakes import FakeBackend

from outrider.common.sampling.processors import choose, process_logits
from outrider.common.types import (
    CorrectionKind,
    FinishReason,
    Grammar,
    Method,
    Origin,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    StopParams,
    Verdict,
)
from outrider.edge_client.controller.acceptance_posterior import ALPHAS
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.gate.gate import Gate
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.shared.decoding import watched

HANGS_S = 60.0  # a session of some milliseconds
PROMPT = (5, 6, 7)
MAX_CONTEXT = 64  # the backend's
BACKEND = FakeBackend()  # for its numbers alone; each link has its own


def make_backend() -> FakeBackend:
    return FakeBackend(kv_tokens=128)  # its integrity is checked at every step


def next_token(text: list[int], sampling: SamplingParams, num_prompt: int = len(PROMPT)) -> int:
    logits = BACKEND.logits_after(text)[None, : BACKEND.num_tokens]
    scores = process_logits(
        np, logits, sampling, prompt_ids=text[:num_prompt], output_ids=text[num_prompt:], eos_token_ids=(0,)
    )
    return int(choose(scores, sampling, (len(text),))[0])


@functools.cache
def whole_text(sampling: SamplingParams) -> tuple[int, ...]:
    """What the target alone writes until its context is full."""
    text = list(PROMPT)
    while len(text) < MAX_CONTEXT:
        text.append(next_token(text, sampling))
    return tuple(text)


def as_target(sampling: SamplingParams) -> list[int]:
    """What the target would choose at each place of the text, its own and the prompt's but the first."""
    places = range(1, len(PROMPT))
    choices = [next_token(list(PROMPT[:place]), sampling, place) for place in places]
    return [PROMPT[0], *choices, *whole_text(sampling)[len(PROMPT) :]]


def reference(sampling: SamplingParams, stop: StopParams) -> list[int]:
    ends = (*stop.stop_token_ids, *(() if stop.ignore_eos else (0,)))
    for length, token_id in enumerate(whole_text(sampling), start=1):
        if length - len(PROMPT) == stop.max_new_tokens or (length > len(PROMPT) and token_id in ends):
            return list(whole_text(sampling)[:length])
    return list(whole_text(sampling))


def decode(
    link: EngineLink,
    *,
    window: int = 3,
    depth: int = 3,
    accuracy: float = 0.8,
    seed: int = 1,
    stop: StopParams = StopParams(max_new_tokens=50, ignore_eos=True),  # noqa: B008
    temperature: float = 0.8,
    on_timeout: OnTimeout = OnTimeout.WAIT,
    draft_context: int = 1000,
    num_logprobs: int = 0,
    method: Method = Method.COUPLED,
    mode: ExecutionMode = ExecutionMode.SPECULATIVE,
    choice: ModePolicy | None = None,
    gate: Gate | None = None,
    tell: Tell | None = None,
    second: float | None = None,
    policy: DepthPolicy | None = None,
    rounds: RoundWindow | None = None,
    acceptance_prior: AcceptancePrior | None = None,
    tree: TreeBudget | None = None,
    is_reverified: bool = False,
    join: Callable[[Any], Any] = lambda draft: draft,
    grammar: Grammar | None = None,
) -> SessionResult:
    """`second`: guesses are made, and the draft's runner-up for a wrong token is right by that chance.
    `join` makes the draft of the model that knows the text.
    `policy` instead of a fixed `depth`, `rounds` instead of a `window` with a `choice`."""
    sampling = SamplingParams(temperature=temperature, seed=seed, grammar=grammar)
    draft = join(ChanceDraft(as_target(sampling), accuracy, seed, draft_context, second or 0.0))
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        is_patient=on_timeout is OnTimeout.WAIT,
        clock=link.clock,
        threads=link.threads,
    )
    options = SessionOptions(
        sampling=sampling,
        stop=stop,
        on_timeout=on_timeout,
        recover_timeout_s=1000.0,
        num_logprobs=num_logprobs,
        method=method,
        mode=mode,
        tree=tree,
        is_reverified=is_reverified,
    )
    session = EdgeSession(
        PROMPT,
        options,
        decode=lambda token_id: f"<{token_id}>",
        verifier=verifier,
        draft=draft if tell is None else TellingDraft(draft, tell),
        depth=policy or FixedDepth(depth),
        window=rounds or RoundWindow(window, choice, may_branch=second is not None),
        gate=gate,
        acceptance_prior=acceptance_prior,
    )
    with watched(session, HANGS_S):
        for _ in session.generate():
            link.check_integrity()
    return session.result


def test_rounds_are_sent_ahead_and_the_text_is_the_targets() -> None:
    link = EngineLink(make_backend())
    result = decode(link, accuracy=1.0)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), StopParams(50, ignore_eos=True))
    stats = result.stats
    assert sum(r.pipelined_hit is True for r in stats.rounds) > 5
    assert stats.num_stale_rounds == stats.num_wasted_draft_tokens == 0
    assert all(r.pipelined for r in link.sent[:5])


def test_a_later_round_builds_on_the_assumed_prefix_and_repeats_no_bonus() -> None:
    link = EngineLink(make_backend(), Chances(ripe=0.0))
    result = decode(link, accuracy=1.0, depth=4, window=2)
    first, second = link.sent[:2]
    assert second.base_position == first.base_position + 4 and not second.committed_tokens
    assert result.origins[:6] == (Origin.TARGET, *(Origin.ACCEPTED,) * 4, Origin.BONUS)
    num_kept = sum(len(r.draft_tokens) for r in link.sent)
    assert num_kept >= len(result.token_ids) - 2, "a bonus that was guessed is a draft token that stands"
    assert result.stats.summary(result.origins)["acceptance_rate"] == 1.0


def test_rounds_behind_a_rejection_are_stale_and_cost_no_forward() -> None:
    backend = make_backend()
    link = EngineLink(backend, Chances(ripe=0.0))
    result = decode(link, accuracy=0.5, window=4)
    stale = [r for r in link.replies if isinstance(r, RoundError)]
    assert stale and {r.code for r in stale} == {RoundErrorCode.STALE}
    assert result.stats.num_stale_rounds == len(stale)
    assert result.stats.num_rebuilds == 0
    answered = [r for r in result.stats.rounds if r.is_answered]
    assert backend.num_forwards == len(answered) + 1, "one a judged round, one for the opening"
    assert backend.num_query_rows == len(PROMPT) + sum(
        r.num_draft_tokens + 1 - (r.pipelined_hit is True) for r in answered
    ), "a guessed bonus is not fed twice"


def test_the_verifier_is_told_that_a_round_may_wait_for_those_before_it() -> None:
    link = EngineLink(make_backend(), Chances(ripe=0.0))
    decode(link, accuracy=1.0, window=3, on_timeout=OnTimeout.FIRST_TOKEN)
    assert [r.deadline_ms for r in link.sent[:4]] == [500, 1000, 1500, 1500], "the first was answered by then"


@pytest.mark.parametrize(("accuracy", "is_higher"), [(1.0, True), (0.0, False)])
def test_the_openings_own_token_is_the_first_that_a_draft_is_judged_by(
    accuracy: float, is_higher: bool
) -> None:
    choice = ModePolicy(CHOOSABLE_MODES)
    usual = choice.posterior.prior_mean
    decode(
        EngineLink(make_backend()),
        mode=ExecutionMode.AUTO,
        choice=choice,
        accuracy=accuracy,
        stop=StopParams(1, ignore_eos=True),
    )
    assert choice.posterior.has_observed
    mean = sum(a * weight for a, weight in zip(ALPHAS, choice.posterior.probabilities, strict=True))
    assert (mean > usual) is is_higher and mean != usual


def test_log_probabilities_come_once_a_token() -> None:
    alone = decode(EngineLink(make_backend()), window=1, num_logprobs=2)
    ahead = decode(EngineLink(make_backend()), window=4, num_logprobs=2)
    assert ahead.token_ids == alone.token_ids
    assert ahead.logprobs == alone.logprobs and None not in ahead.logprobs


@pytest.mark.parametrize("window", [1, 3])
def test_a_stop_string_ends_the_text_whatever_is_under_way(window: int) -> None:
    text = reference(SamplingParams(seed=1), StopParams(50, ignore_eos=True))
    stop = StopParams(50, stop_strings=(f"<{text[20]}>",), ignore_eos=True)
    result = decode(EngineLink(make_backend()), window=window, stop=stop, accuracy=0.9)
    assert result.finish_reason is FinishReason.STOP
    assert [*PROMPT, *result.token_ids] == text[: text.index(text[20], len(PROMPT)) + 1]


def test_a_draft_at_its_context_limit_hands_over_after_what_is_under_way() -> None:
    link = EngineLink(make_backend())
    result = decode(link, draft_context=20, accuracy=1.0)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), StopParams(50, ignore_eos=True))
    assert result.origins[-1] is Origin.TARGET


def runs() -> st.SearchStrategy[dict[str, Any]]:
    fields = run_fields(max_window=6, accuracies=(0.0, 0.3, 0.7, 0.9, 1.0), short_context=10)
    return st.fixed_dictionaries(fields | {"second": st.sampled_from([None, 0.0, 0.6, 1.0])})


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), ripe=st.sampled_from([0.0, 0.2, 0.8]))
def test_any_window_and_draft_gives_the_targets_text(run: dict[str, Any], ripe: float) -> None:
    check_exact(run, Chances(ripe=ripe))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_under_wait_no_fault_leaves_a_trace_in_a_pipelined_text(run: dict[str, Any]) -> None:
    check_exact(run, FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), faults=st.sampled_from([Chances(), FAULTS]))
def test_no_fault_leaves_a_trace_in_many_pipelined_texts(run: dict[str, Any], faults: Chances) -> None:
    check_exact(run, faults)


@pytest.mark.parametrize(("seed", "length", "second"), [(961_834, 36, 1.0), (423_633, 41, 0.0)])
def test_a_round_lost_behind_a_known_bonus_is_no_wrong_guess(seed: int, length: int, second: float) -> None:
    # Found by chance: the text ended where the lost round's draft began.
    stop = StopParams(length, ignore_eos=True)
    run = {"window": 12, "depth": 1, "accuracy": 0.9, "seed": seed, "temperature": 0.0}
    check_exact(run | {"second": second, "stop": stop}, FAULTS)


def check_exact(run: dict[str, Any], chances: Chances) -> None:
    link = EngineLink(make_backend(), chances, seed=run["seed"])
    result = decode(link, **run)
    sampling = SamplingParams(temperature=run["temperature"], seed=run["seed"])
    assert [*PROMPT, *result.token_ids] == reference(sampling, run["stop"])
    assert result.num_unverified_tokens == 0
    for session in link.engine.sessions:
        session.check_integrity()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), policy=st.sampled_from([OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY]))
def test_what_is_marked_verified_is_the_targets_after_the_text_before_it(
    run: dict[str, Any], policy: OnTimeout
) -> None:
    link = EngineLink(make_backend(), FAULTS, seed=run["seed"])
    result = decode(link, on_timeout=policy, **run)
    sampling = SamplingParams(temperature=run["temperature"], seed=run["seed"])
    text = [*PROMPT, *result.token_ids]
    for index, is_verified in enumerate(result.is_verified):
        position = len(PROMPT) + index
        if is_verified:
            assert text[position] == next_token(text[:position], sampling)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), method=st.sampled_from([m for m in Method if m is not Method.COUPLED]))
def test_the_other_methods_pipeline_without_a_bonus(run: dict[str, Any], method: Method) -> None:
    link = EngineLink(make_backend(), FAULTS, seed=run["seed"])
    result = decode(link, method=method, **run)
    assert result.num_unverified_tokens == 0
    assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.CONTEXT)
    ahead = {round_.round_id for round_ in link.sent if round_.pipelined}
    for reply in link.replies:
        if isinstance(reply, Verdict) and reply.round_id in ahead:
            assert reply.correction_kind is not CorrectionKind.BONUS


# -------------------------------------------------------------------------------- the mode chosen on the way


class Restless(ModePolicy):
    """Changes its mind by chance, whatever was measured."""

    def __init__(self, seed: int) -> None:
        super().__init__((ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED, ExecutionMode.CLOUD_ONLY))
        self._random = random.Random(seed)
        self.taken: set[ExecutionMode] = set()

    def choose(self, num_remaining: int) -> ExecutionMode:
        if self._random.random() < 0.5:
            self.current = self._random.choice(self._modes)
        self.taken.add(self.current)
        return self.current


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), faults=st.sampled_from([Chances(), FAULTS]))
def test_any_change_of_mode_at_any_time_leaves_the_text_alone(run: dict[str, Any], faults: Chances) -> None:
    check_exact(run | {"mode": ExecutionMode.AUTO, "choice": Restless(run["seed"])}, faults)


def test_a_restless_choice_mixes_streamed_tokens_and_rounds() -> None:
    num_mixed = 0
    for seed in range(10):
        choice = Restless(seed)
        result = decode(
            EngineLink(make_backend(), seed=seed), mode=ExecutionMode.AUTO, choice=choice, seed=seed
        )
        num_streamed = result.stats.num_generate_tokens
        num_mixed += 0 < num_streamed < 45 and choice.taken == {*CHOOSABLE_MODES}
    assert num_mixed >= 3


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.COUPLED])
def test_other_methods_change_modes_too_and_owe_no_correction(method: Method) -> None:
    for seed in range(8):
        link = EngineLink(make_backend(), seed=seed)
        result = decode(
            link, mode=ExecutionMode.AUTO, choice=Restless(seed), method=method, accuracy=0.5, seed=seed
        )
        assert len(result.token_ids) == 50 and result.num_unverified_tokens == 0
