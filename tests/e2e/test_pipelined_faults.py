"""Pipelined rounds and the mode chosen on the way, over a real verifier, under the main job's faults."""

from __future__ import annotations

import pytest
from support.processes.decoding import decode
from support.processes.faults import Faults, FaultyLink
from support.processes.mortal import MortalVerifier
from support.timed import timed
from test_faults import (
    DEADLINE_S,
    NUM_NEW,
    Outage,
    check_bridged,
    check_steady,
    sampling_of,
)
from test_same_text import make_prompt

from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.window import RoundWindow, create_window
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, Pipelining
from outrider.edge_client.drafting.base import DraftModel
from outrider.experiments.shared.processes import VerifierProcess


def auto_window() -> RoundWindow:
    return create_window(Pipelining.AUTO, None, "fixed", has_stream_too=True)


def pipelined_window() -> RoundWindow:
    return RoundWindow(3)


@pytest.mark.parametrize("kind", ["lose_reply", "duplicate", "late_older", "drop_stream"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_wait_a_fault_on_the_link_leaves_no_trace_in_a_pipelined_text(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, kind: str, seed: int
) -> None:
    prompt, sampling = make_prompt(seed), sampling_of(seed)
    expected = decode(tiny_verifier.address, prompt, sampling, num_new=NUM_NEW).token_ids
    # Consecutive ones: of four at least one is asked for, whichever are stale by then.
    faults = Faults(**{kind: frozenset(range(4 + seed, 8 + seed))})  # type: ignore[arg-type]
    result = decode(
        tiny_verifier.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        deadline_s=DEADLINE_S,
        wrap=lambda link: FaultyLink(link, faults),  # type: ignore[arg-type,return-value]
        window=pipelined_window(),
    )
    assert faults.fired.get(kind, 0) >= 1
    assert result.token_ids == expected
    assert result.num_unverified_tokens == 0
    assert any(r.pipelined_hit is not None for r in result.stats.rounds)


@pytest.mark.parametrize("make_window", [pipelined_window, auto_window])
def test_under_wait_a_killed_and_restarted_verifier_leaves_no_trace(
    mortal: MortalVerifier, own_draft: DraftModel, make_window: object
) -> None:
    prompt, sampling = make_prompt(3), sampling_of(3)
    expected = decode(mortal.address, prompt, sampling, num_new=NUM_NEW).token_ids
    window = make_window()  # type: ignore[operator]
    result = decode(
        mortal.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        mode=ExecutionMode.AUTO if window.policy is not None else None,
        window=window,
        on_token=mortal.dies_at(15),
    )
    assert mortal.num_deaths == 1
    assert result.token_ids == expected and result.num_unverified_tokens == 0


class StreamFirst(ModePolicy):
    """The stream, whatever is measured, until it breaks."""

    def __init__(self) -> None:
        super().__init__((ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY))
        self.current = ExecutionMode.CLOUD_ONLY

    def choose(self, num_remaining: int) -> ExecutionMode:
        return self.current


@timed
@pytest.mark.parametrize(
    ("is_streamed", "policy"),
    [
        (True, OnTimeout.FIRST_TOKEN),
        (False, OnTimeout.EDGE_ONLY),
        pytest.param(False, OnTimeout.FIRST_TOKEN, marks=pytest.mark.slow),
        pytest.param(True, OnTimeout.EDGE_ONLY, marks=pytest.mark.slow),
    ],
)
def test_an_outage_is_bridged_as_the_policy_says_whatever_was_under_way(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    policy: OnTimeout,
    is_streamed: bool,
    is_timed: bool,
) -> None:
    prompt, sampling = make_prompt(8), sampling_of(9)
    outage = Outage(start=15)
    result = decode(
        tiny_verifier.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=440,
        depth=2,
        on_timeout=policy,
        deadline_s=0.2,
        wrap=lambda link: FaultyLink(link, outage.faults),  # type: ignore[arg-type,return-value]
        on_token=outage.on_token,
        on_kept=outage.on_kept,
        mode=ExecutionMode.AUTO if is_streamed else None,
        window=RoundWindow(None, StreamFirst()) if is_streamed else pipelined_window(),
    )
    assert outage.faults.fired["black_hole"] >= 1
    kept = check_bridged(tiny_verifier.address, prompt, sampling, result)
    if (
        is_timed
    ):  # a stream is silent for its deadline before rounds take over, and they have one of their own
        check_steady(result, kept, deadline_s=0.4 if is_streamed else 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", DEPTH_POLICIES)
@pytest.mark.parametrize("make_window", [pipelined_window, auto_window])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_depth_policy_gives_the_same_text_pipelined_and_auto(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, policy: str, make_window: object, seed: int
) -> None:
    from outrider.edge_client.controller.depth.registry import create_depth_policy

    prompt, sampling = make_prompt(seed), sampling_of(seed)
    expected = decode(tiny_verifier.address, prompt, sampling, num_new=200).token_ids
    window = make_window()  # type: ignore[operator]
    faults = Faults(frozenset({4}), frozenset({6}), frozenset({5}), frozenset({7}))
    result = decode(
        tiny_verifier.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=200,
        deadline_s=DEADLINE_S,
        mode=ExecutionMode.AUTO if window.policy is not None else None,
        wrap=lambda link: FaultyLink(link, faults),  # type: ignore[arg-type,return-value]
        window=window,
        policy=create_depth_policy(policy),
    )
    assert result.token_ids == expected
