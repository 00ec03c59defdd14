"""`min_new_tokens` holds back every id that ends a text, end-of-text or `stop_token_ids`, alike on both sides."""

from __future__ import annotations

import pytest
from support.edge.engine_link import Chances, EngineLink
from support.edge.knowing_draft import KnowingDraft
from support.edge.random_runs import FAULTS
from test_pipelined_rounds import PROMPT, make_backend, next_token, whole_text

from outrider.common.types import FinishReason, Method, SamplingParams, StopParams
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

LEAST, MOST = 9, 24
NO_FAULTS = Chances()


def write(
    sampling: SamplingParams,
    stop: StopParams,
    mode: ExecutionMode = ExecutionMode.SPECULATIVE,
    tree: TreeBudget | None = None,
    faults: Chances = NO_FAULTS,
    method: Method = Method.COUPLED,
) -> SessionResult:
    link = EngineLink(make_backend(), faults, seed=1)
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        is_patient=True,
        clock=link.clock,
        threads=link.threads,
    )
    options = SessionOptions(
        sampling=sampling, stop=stop, mode=mode, tree=tree, method=method, on_timeout=OnTimeout.WAIT
    )
    is_alone = mode is ExecutionMode.EDGE_ONLY
    session = EdgeSession(
        PROMPT,
        options,
        decode=lambda token_id: "",
        verifier=None if is_alone else verifier,
        draft=KnowingDraft() if mode.has_draft or is_alone else None,
        depth=FixedDepth(4),
        window=RoundWindow(1 if tree else 3),
    )
    list(session.generate())
    return session.result


def early_stops(temperature: float) -> tuple[int, ...]:
    """Ids of which the target alone writes one before `LEAST` tokens."""
    text = whole_text(SamplingParams(temperature=temperature, seed=1))[len(PROMPT) :]
    return tuple(dict.fromkeys(token_id for token_id in text[2:6] if token_id))


def reference(sampling: SamplingParams, stop: StopParams) -> list[int]:
    """What the target writes alone: its choices among the ids that do not end the text too early."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + stop.max_new_tokens:
        is_short = len(text) - len(PROMPT) < sampling.min_new_tokens
        held = tuple((token_id,) for token_id in (0, *stop.stop_token_ids)) if is_short else ()
        plain = SamplingParams(temperature=sampling.temperature, seed=sampling.seed, bad_words=held)
        text.append(next_token(text, plain))
        if text[-1] in (0, *stop.stop_token_ids):
            break
    return text[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("faults", [NO_FAULTS, FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize(
    ("mode", "tree"),
    [
        (ExecutionMode.CLOUD_ONLY, None),
        (ExecutionMode.SPECULATIVE, None),
        (ExecutionMode.SPECULATIVE, TreeBudget(8, 4, 3)),
        (ExecutionMode.EDGE_ONLY, None),
    ],
    ids=["cloud-only", "chain", "tree", "edge-only"],
)
def test_no_stop_id_comes_before_the_least_tokens_in_any_mode(
    mode: ExecutionMode, tree: TreeBudget | None, faults: Chances, temperature: float
) -> None:
    stop = StopParams(MOST, early_stops(temperature), min_new_tokens=LEAST)
    sampling = SamplingParams(temperature=temperature, seed=1, min_new_tokens=LEAST)
    without = SamplingParams(temperature=temperature, seed=1)
    assert len(write(without, stop, mode, tree).token_ids) < LEAST, "it would have stopped"
    result = write(sampling, stop, mode, tree, faults)
    assert list(result.token_ids) == reference(sampling, stop)
    assert LEAST < len(result.token_ids) <= MOST
    assert not set(result.token_ids[:LEAST]) & {0, *stop.stop_token_ids}
    is_stopped = result.token_ids[-1] in (0, *stop.stop_token_ids)
    assert (result.finish_reason is FinishReason.STOP) is is_stopped


@pytest.mark.parametrize("tree", [None, TreeBudget(8, 4, 3)], ids=["chain", "tree"])
def test_the_draft_holds_back_what_the_verifier_does_and_loses_no_token(tree: TreeBudget | None) -> None:
    stop = StopParams(LEAST, early_stops(0.8), min_new_tokens=LEAST)
    result = write(SamplingParams(seed=1, min_new_tokens=LEAST), stop, tree=tree)
    for each in result.stats.rounds:
        assert tree is not None or each.num_accepted_tokens == each.num_draft_tokens
        assert each.num_accepted_tokens > 0 or not each.num_draft_tokens


@pytest.mark.parametrize("method", list(Method))
def test_no_method_lets_a_stop_id_through_too_early(method: Method) -> None:
    stop = StopParams(MOST, early_stops(0.8), min_new_tokens=LEAST)
    result = write(SamplingParams(seed=1, min_new_tokens=LEAST), stop, method=method)
    assert len(result.token_ids) > LEAST
    assert not set(result.token_ids[:LEAST]) & {0, *stop.stop_token_ids}
