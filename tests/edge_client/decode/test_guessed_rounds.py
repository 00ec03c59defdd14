"""Rounds behind guesses at a rejection: they save trips, and cost no forward when wrong.

That the text stays the target's whatever is guessed is `test_pipelined_rounds`' business, with `second` set.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.edge.engine_link import Chances, ChanceSequence, EngineLink
from test_pipelined_rounds import PROMPT, decode, make_backend, reference

from outrider.common.noise.draws import gumbel_row
from outrider.common.types import (
    Method,
    Origin,
    RoundError,
    RoundErrorCode,
    RunnerUp,
    SamplingParams,
    StopParams,
    Verdict,
)
from outrider.edge_client.decode.branch_tree import BranchAcceptance, BranchTree
from outrider.edge_client.drafting.onnx.runner import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler

STOP = StopParams(max_new_tokens=50, ignore_eos=True)
CLOSE, FAR = RunnerUp(1, 0.05), RunnerUp(2, 6.0)


def test_a_guess_that_comes_true_is_judged_right_behind_the_rejection() -> None:
    link = EngineLink(make_backend(), Chances(ripe=0.0))
    result = decode(link, accuracy=0.6, second=1.0, window=12)
    assert [*PROMPT, *result.token_ids] == reference(SamplingParams(seed=1), STOP)
    assert result.stats.num_guess_hits > 3
    corrections = [len(PROMPT) + i for i, origin in enumerate(result.origins) if origin is Origin.CORRECTION]
    behind = {r.round_id for r in link.sent if r.base_position - 1 in corrections and r.base_hash}
    judged = {reply.round_id for reply in link.replies if isinstance(reply, Verdict)}
    assert len(behind & judged) > 3


def test_fewer_answers_are_waited_for_in_vain_with_right_guesses_than_without() -> None:
    def num_starts(second: float | None) -> int:
        """Rounds that were sent with nothing under way: each costs the edge a whole trip."""
        link = EngineLink(make_backend(), Chances(ripe=0.0))
        result = decode(link, accuracy=0.6, second=second, window=12)
        return sum(r.is_answered and r.pipelined_hit is None for r in result.stats.rounds)

    assert num_starts(1.0) < 0.7 * num_starts(None)


def test_wrong_guesses_cost_no_forward() -> None:
    backend = make_backend()
    link = EngineLink(backend, Chances(ripe=0.0))
    result = decode(link, accuracy=0.6, second=0.0, window=12)
    stats = result.stats
    assert stats.num_guessed_rounds > 5 and stats.num_guess_hits == 0 and stats.num_rebuilds == 0
    answered = [r for r in stats.rounds if r.is_answered]
    assert backend.num_forwards == len(answered) + 1, "one a judged round, one for the opening"
    codes = {r.code for r in link.replies if isinstance(r, RoundError)}
    assert codes <= {RoundErrorCode.STALE, RoundErrorCode.UNKNOWN_PREFIX}


def test_no_more_is_under_way_than_the_verifier_lets_wait() -> None:
    for seed in range(5):
        link = EngineLink(make_backend(), Chances(ripe=0.0))
        decode(link, accuracy=0.9, second=0.5, window=24, depth=2, seed=seed)
        assert not [r for r in link.replies if isinstance(r, RoundError) and r.code is RoundErrorCode.REFUSED]
        assert len({r.base_hash for r in link.sent}) == len(link.sent), "nothing is guessed twice"


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.COUPLED])
def test_methods_whose_noise_the_edge_does_not_know_guess_nothing(method: Method) -> None:
    result = decode(EngineLink(make_backend()), method=method, second=1.0, accuracy=0.5)
    assert result.stats.num_guessed_rounds == 0


def test_one_round_at_a_time_guesses_nothing() -> None:
    result = decode(EngineLink(make_backend()), window=1, second=1.0, accuracy=0.5)
    assert result.stats.num_guessed_rounds == result.stats.num_stale_rounds == 0


def test_runner_ups_are_asked_for_only_while_rounds_are_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft with them takes longer."""
    wanted: list[bool] = []
    monkeypatch.setattr(ChanceSequence, "keep_runner_ups", lambda self, is_wanted: wanted.append(is_wanted))
    for window in (1, 3):
        decode(EngineLink(make_backend()), window=window, second=0.6)
        assert set(wanted) == {window > 1}
        wanted.clear()


def test_what_is_known_of_gaps_decides_what_is_guessed() -> None:
    rates = BranchAcceptance()
    assert rates.runner_up_rate(CLOSE.gap) > 5 * rates.runner_up_rate(FAR.gap)
    assert rates.accept_rate(CLOSE.gap) < rates.accept_rate(FAR.gap)
    for _ in range(200):
        rates.observe((FAR, CLOSE), 0, FAR.token_id)  # falls at once, and the runner-up is right
    assert rates.runner_up_rate(FAR.gap) > 0.9 and rates.accept_rate(FAR.gap) < 0.1
    assert rates.accept_rate(CLOSE.gap) == BranchAcceptance().accept_rate(CLOSE.gap), (
        "no token behind a fallen one is judged"
    )


def test_the_likeliest_branch_comes_first_and_chances_grow_once_a_verdict_is_known() -> None:
    branches: BranchTree[str] = BranchTree(BranchAcceptance())
    branches.add("first", 3, 1.0, (FAR, CLOSE, FAR))
    best = branches.best()
    assert best is not None and (best.host, len(best.nodes), best.correction) == ("first", 3, None)
    branches.close(best)
    branches.add("second", 2, best.chance, (FAR, FAR), ("first", 3))
    behind_both = branches.best()
    assert behind_both is not None and (behind_both.host, behind_both.correction) == ("second", None)
    branches.close(behind_both)
    guess = branches.best()
    assert guess is not None and (guess.host, len(guess.nodes), guess.correction) == (
        "first",
        1,
        CLOSE.token_id,
    )
    branches.retain(lambda host: host == "second", best.chance)
    left = branches.best()
    assert left is not None and left.host == "second", "the bonus before it is known: its first stands"
    assert len(left.nodes) == 1


# ------------------------------------------------------------------------------------------ the runner-up


def make_rows(logits: NDArray[np.float32], temperature: float) -> Rows:
    tempered = logits / np.float32(temperature or 1.0)
    return Rows(logits, softmax(logits), tempered, softmax(tempered))


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    exps = np.exp(logits - logits.max())
    return np.asarray(exps / exps.sum(), np.float32)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 0.7, 1.0]), top_k=st.sampled_from([0, 5]))
def test_the_runner_up_is_what_would_be_drafted_were_the_token_not_there(
    seed: int, temperature: float, top_k: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 1 + seed % 6, (1, 50)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
    sampler, rows = DraftSampler(params, ()), make_rows(logits, temperature)
    alone = sampler.sample(rows, 10, 2)
    assert sampler.runner_up is None
    sampler.keeps_runner_ups = True
    assert sampler.sample(rows, 10, 2) == alone
    token_id, runner_up = alone[0], sampler.runner_up
    sums = logits[0].astype(np.float64)
    if temperature:
        sums = rows.tempered_logits[0].astype(np.float64) + gumbel_row(seed, 12, 50)
        if top_k:
            sums[np.argsort(logits[0])[:-top_k]] = -math.inf
    first, second = np.argsort(-sums)[:2]
    assert runner_up is not None and (token_id, runner_up.token_id) == (first, second)
    assert runner_up.gap == pytest.approx(sums[first] - sums[second], abs=1e-4)


def test_a_token_without_a_rival_has_an_endless_gap() -> None:
    sampler = DraftSampler(SamplingParams(temperature=1.0, top_k=1), ())
    sampler.keeps_runner_ups = True
    sampler.sample(make_rows(np.arange(8, dtype=np.float32)[None], 1.0), 0)
    assert sampler.runner_up is not None and sampler.runner_up.gap == math.inf
