"""Alignment survives faults: the verifier is a real process, and every fault is seen to fire mid-text."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.models import make_tiny_target
from support.processes.decoding import decode
from support.processes.faults import Faults, FaultyLink
from support.processes.forked import running_verifier
from support.processes.mortal import MortalVerifier
from support.processes.pairs import Pair
from support.timed import timed
from test_same_text import make_prompt

from outrider.common.errors import IncompatibleError, RoundTimeoutError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.common.types import Origin, SamplingParams
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.shared.processes import VerifierProcess

NUM_NEW = 40
DEADLINE_S = 0.4


def sampling_of(seed: int) -> SamplingParams:
    return SamplingParams(temperature=(0.0, 0.8)[seed % 2], seed=seed)


def random_rounds(seed: int) -> frozenset[int]:
    """Two rounds in the middle of a text of NUM_NEW tokens at draft length 2 (13 rounds at least)."""
    rng = np.random.default_rng(seed)
    return frozenset(int(r) for r in rng.choice(np.arange(3, 11), size=2, replace=False))


@pytest.mark.parametrize("kind", ["lose_reply", "duplicate", "late_older", "drop_stream"])
@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_wait_a_fault_on_the_link_leaves_no_trace_in_the_text(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, kind: str, transport: str, seed: int
) -> None:
    prompt, sampling = make_prompt(seed), sampling_of(seed)
    expected = decode(tiny_verifier.address, prompt, sampling, num_new=NUM_NEW).token_ids
    faults = Faults(**{kind: random_rounds(seed)})  # type: ignore[arg-type]
    result = decode(
        tiny_verifier.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        transport=transport,
        deadline_s=DEADLINE_S,
        wrap=lambda link: FaultyLink(link, faults),  # type: ignore[arg-type,return-value]
    )
    assert faults.fired == {kind: 2}
    assert result.token_ids == expected
    assert result.num_unverified_tokens == 0


def test_under_wait_all_link_faults_together_leave_no_trace(
    tiny_verifier: VerifierProcess, own_draft: DraftModel
) -> None:
    prompt, sampling = make_prompt(5), sampling_of(5)
    expected = decode(tiny_verifier.address, prompt, sampling, num_new=NUM_NEW).token_ids
    faults = Faults(frozenset({4}), frozenset({6}), frozenset({5}), frozenset({7}))
    result = decode(
        tiny_verifier.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=NUM_NEW,
        depth=2,
        deadline_s=DEADLINE_S,
        wrap=lambda link: FaultyLink(link, faults),  # type: ignore[arg-type,return-value]
    )
    assert faults.fired == {"lose_reply": 1, "duplicate": 1, "late_older": 1, "drop_stream": 1}
    assert result.token_ids == expected


# --------------------------------------------------------------------------- the verifier itself dies


@pytest.mark.parametrize("mode", ["speculative", "cloud-only"])
def test_under_wait_a_killed_and_restarted_verifier_leaves_no_trace(
    mortal: MortalVerifier, own_draft: DraftModel, mode: str
) -> None:
    prompt, sampling = make_prompt(3), sampling_of(3)
    num_new = 400  # of a short text all may be on the way when the verifier dies
    expected = decode(mortal.address, prompt, sampling, num_new=num_new).token_ids
    result = decode(
        mortal.address,
        prompt,
        sampling,
        draft=own_draft if mode == "speculative" else None,
        num_new=num_new,
        depth=2,
        on_token=mortal.dies_at(15),
    )
    assert mortal.num_deaths == 1 and result.stats.num_rebuilds == 1
    assert result.token_ids == expected
    assert result.num_unverified_tokens == 0


def test_under_first_token_a_killed_verifier_is_bridged_and_aligned_on_return(
    mortal: MortalVerifier, own_draft: DraftModel
) -> None:
    prompt, sampling, has_kept = make_prompt(3), sampling_of(3), threading.Event()
    num_kept = itertools.count(1)

    def on_kept() -> None:
        has_kept.set()
        if next(num_kept) >= 8:  # alone, the tiny draft would write all of the text before the link is back
            mortal.wait_until_back()
            time.sleep(0.06)

    result = decode(
        mortal.address,
        prompt,
        sampling,
        draft=own_draft,
        num_new=440,
        depth=2,
        on_timeout=OnTimeout.FIRST_TOKEN,
        deadline_s=2.0,  # where others keep the processors busy a short one would be missed again, at the end too
        on_token=mortal.dies_at(15, after=has_kept),
        on_kept=on_kept,
    )
    assert mortal.num_deaths == 1 and result.stats.num_rebuilds >= 1
    check_bridged(mortal.address, prompt, sampling, result)


def test_a_verifier_that_comes_back_with_another_target_is_refused(
    mortal: MortalVerifier, own_draft: DraftModel, tmp_path: Path
) -> None:
    other = make_tiny_target(tmp_path / "target", max_context=512, seed=99)
    with pytest.raises(IncompatibleError, match="another target"):
        decode(
            mortal.address,
            make_prompt(3),
            sampling_of(3),
            draft=own_draft,
            num_new=NUM_NEW,
            on_token=mortal.dies_at(10, comes_back_with=other),
        )
    assert mortal.num_deaths == 1


def test_an_evicted_session_is_rebuilt_and_leaves_no_trace(tiny_pair: Pair, own_draft: DraftModel) -> None:
    prompt, sampling = make_prompt(4), sampling_of(4)
    with running_verifier("--max-sessions", "2", target=tiny_pair.target) as verifier:
        expected = decode(verifier.address, prompt, sampling, num_new=NUM_NEW).token_ids

        def evict(index: int) -> None:
            if index == 12:
                with grpc.insecure_channel(verifier.address) as channel:
                    stub = outrider_pb2_grpc.VerifierStub(channel)
                    for name in (1, 2, 3):
                        opening = pb.OpenRequest(
                            session_id=bytes([name]) * 16, token_ids=[5, 6], num_prompt_tokens=2
                        )
                        assert stub.Open(opening).opened.position == 3

        result = decode(
            verifier.address, prompt, sampling, draft=own_draft, num_new=NUM_NEW, depth=2, on_token=evict
        )
    assert result.stats.num_rebuilds == 1, "the eviction did not fire"
    assert result.token_ids == expected


def test_kv_taken_by_others_is_recomputed_and_leaves_no_trace(tiny_pair: Pair, own_draft: DraftModel) -> None:
    prompt, sampling = make_prompt(6), sampling_of(6)
    with running_verifier("--kv-memory", "768KiB", target=tiny_pair.target) as verifier:
        expected = decode(verifier.address, prompt, sampling, num_new=NUM_NEW).token_ids

        def fill(index: int) -> None:
            if index == 12:
                with grpc.insecure_channel(verifier.address) as channel:
                    opening = pb.OpenRequest(
                        session_id=b"\1" * 16, token_ids=[7] * 480, num_prompt_tokens=480
                    )
                    assert outrider_pb2_grpc.VerifierStub(channel).Open(opening).opened.position == 481

        result = decode(
            verifier.address, prompt, sampling, draft=own_draft, num_new=NUM_NEW, depth=2, on_token=fill
        )
    assert result.token_ids == expected
    assert result.stats.num_rebuilds == 0, "only KV was lost: the edge sees a slower round, nothing else"


# ------------------------------------------------------------------------------------ going on alone


class Outage:
    """Nothing passes from new token `start` on, until `num_tokens` others have come without the verifier."""

    def __init__(self, start: int, num_tokens: int = 8) -> None:
        self._start, self._end, self._index = start, start + num_tokens, 0
        self.faults = Faults(black_hole=self.is_on)

    def on_token(self, index: int) -> None:
        self._index = index

    def on_kept(self) -> None:
        time.sleep(0.06)  # alone, the tiny draft would write all of the text before the link is back

    def is_on(self) -> bool:
        return self._start <= self._index < self._end


def check_bridged(
    address: str, prompt: list[int], sampling: SamplingParams, result: SessionResult
) -> list[int]:
    """Tokens were kept and marked, and after the outage the text is the target's. Returns which were kept."""
    kept = [i for i, origin in enumerate(result.origins) if origin in (Origin.FALLBACK, Origin.EDGE_ONLY)]
    assert kept, "nothing was kept"
    assert all(result.is_verified[i] or i in kept for i in range(len(result.origins)))
    last = kept[-1] + 1
    assert last < len(result.token_ids) - 5, "the link never came back"
    rest = len(result.token_ids) - last
    expected = decode(address, [*prompt, *result.token_ids[:last]], sampling, num_new=rest).token_ids
    assert result.token_ids[last:] == expected
    return kept


def check_steady(result: SessionResult, kept: list[int], deadline_s: float) -> None:
    """While the link is down a token comes within each deadline; scheduling is on top."""
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(result.stats.token_times_ns)]
    assert max(gaps[kept[0] - 1 : kept[-1]]) < deadline_s + 0.6


@timed
@pytest.mark.parametrize(
    ("transport", "policy"),
    [
        ("stream", OnTimeout.FIRST_TOKEN),
        ("unary", OnTimeout.EDGE_ONLY),
        pytest.param("unary", OnTimeout.FIRST_TOKEN, marks=pytest.mark.slow),
        pytest.param("stream", OnTimeout.EDGE_ONLY, marks=pytest.mark.slow),
    ],
)
def test_an_outage_is_bridged_by_marked_tokens_and_the_text_is_aligned_again_on_return(
    tiny_verifier: VerifierProcess, own_draft: DraftModel, policy: OnTimeout, transport: str, is_timed: bool
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
        transport=transport,
        wrap=lambda link: FaultyLink(link, outage.faults),  # type: ignore[arg-type,return-value]
        on_token=outage.on_token,
        on_kept=outage.on_kept,
    )
    assert outage.faults.fired["black_hole"] >= 1
    kept = check_bridged(tiny_verifier.address, prompt, sampling, result)
    if is_timed:
        check_steady(result, kept, deadline_s=0.2)


def test_under_fail_the_first_missed_deadline_ends_the_generation(
    tiny_verifier: VerifierProcess, own_draft: DraftModel
) -> None:
    outage = Outage(start=10, num_tokens=NUM_NEW)
    start = time.monotonic()
    with pytest.raises(RoundTimeoutError):
        decode(
            tiny_verifier.address,
            make_prompt(1),
            sampling_of(1),
            draft=own_draft,
            depth=2,
            num_new=NUM_NEW,
            on_timeout=OnTimeout.FAIL,
            deadline_s=0.3,
            recover_timeout_s=600.0,
            wrap=lambda link: FaultyLink(link, outage.faults),  # type: ignore[arg-type,return-value]
            on_token=outage.on_token,
        )
    assert time.monotonic() - start < 60, "it waited for a recovery"
