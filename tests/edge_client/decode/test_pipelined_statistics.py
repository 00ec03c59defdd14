"""Texts of the exact methods that sample, with several rounds under way, against the target's distribution.

`coupled` has one right text, which `test_pipelined_rounds` compares. Here each token, given the one before,
must be a sample of the target, whatever fell, was sent again or was refused: by chi-square, with fixed seeds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from support.edge.engine_link import Chances, EngineLink
from support.edge.random_runs import FAULTS
from support.exact.continuations import EOS, PROMPT, Tables, make_tables, target_probs
from support.fakes import FakeBackend

from outrider.common.types import Draft, Method, SamplingParams, StopParams, Support
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import OnTimeout, SessionOptions
from outrider.edge_client.drafting.base import ShouldStop
from outrider.edge_client.drafting.onnx.runner import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

SIZE, ALPHA, LEAST_EXPECTED = 6, 0.001, 5
NUM_TEXTS, NUM_SLOW_TEXTS, NUM_NEW = 120, 10_000, 8
TEMPERATURE = 0.9
TABLES = make_tables(SIZE, seed=3)
SAMPLED = [m for m in Method if m.is_exact and m is not Method.COUPLED]
KEPT_SESSIONS = replace(FAULTS, lose_session=0.0)


class TableBackend(FakeBackend):
    """What follows depends on the last token alone."""

    def __init__(self) -> None:
        super().__init__(num_tokens=SIZE, kv_tokens=128)

    def logits_after(self, context: Sequence[int]) -> NDArray[np.float32]:
        padded = np.full(self.vocab_size, 100.0, np.float32)
        padded[:SIZE] = TABLES.target[context[-1]]
        return padded


@functools.cache
def draft_rows(last: int) -> Rows:
    logits = TABLES.draft[last][None]
    tempered = logits / np.float32(TEMPERATURE)
    return Rows(logits, softmax(logits), tempered, softmax(tempered))


def softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), np.float32)


class TableDraft:
    """A model and a sequence of it, with the product's own sampler."""

    num_tokens, max_context, eos_token_ids = SIZE, 1000, EOS
    fingerprint = tokenizer_fingerprint = ""

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> TableDraft:
        made = TableDraft()
        made.token_ids = []
        made.sampler = DraftSampler(sampling, EOS, num_support)
        return made

    token_ids: list[int]
    sampler: DraftSampler

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def truncate(self, position: int) -> None:
        del self.token_ids[position:]

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        text, probs = list(self.token_ids), list[float]()
        supports: list[Support] = []
        for offset in range(num_draft_tokens):
            token_id, prob, _, support = self.sampler.sample(draft_rows(text[-1]), self.position, offset)
            text.append(token_id)
            probs.append(prob)
            assert support is not None
            supports.append(support)
        return Draft(tuple(text[self.position :]), tuple(probs), supports=tuple(supports))

    def close(self) -> None: ...


class RandomDepth(FixedDepth):
    def __init__(self, seed: int) -> None:
        super().__init__(2)
        self._random = random.Random(seed)

    def next_depth(self, num_assumed: int = 0) -> int:
        return self._random.choice((1, 2, 3))


def write(method: Method, seed: int, faults: Chances) -> tuple[tuple[int, ...], int]:
    """New tokens, and how many rounds that were sent ahead were judged."""
    link = EngineLink(TableBackend(), faults, seed=seed)
    link.check_integrity = lambda: None  # type: ignore[method-assign]
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        is_patient=True,
        clock=link.clock,
        threads=link.threads,
    )
    options = SessionOptions(
        sampling=SamplingParams(temperature=TEMPERATURE, seed=seed * 0x9E3779B97F4A7C15 % 2**64),
        stop=StopParams(NUM_NEW, ignore_eos=True),
        method=method,
        on_timeout=OnTimeout.WAIT,
        recover_timeout_s=1000.0,
    )
    session = EdgeSession(
        PROMPT,
        options,
        decode=str,
        verifier=verifier,
        draft=TableDraft(),  # type: ignore[arg-type]
        depth=RandomDepth(seed),
        window=RoundWindow(3),
    )
    for _ in session.generate():
        pass
    rounds = session.result.stats.rounds
    return session.result.token_ids, sum(each.pipelined_hit is True for each in rounds)


def count_pairs(method: Method, num_texts: int, faults: Chances) -> NDArray[np.float64]:
    """[last token, next token], of all texts."""
    counts, num_ahead = np.zeros((SIZE, SIZE)), 0
    for seed in range(1, num_texts + 1):
        token_ids, ahead = write(method, seed, faults)
        np.add.at(counts, ((PROMPT[-1], *token_ids[:-1]), token_ids), 1)
        num_ahead += ahead
    assert num_ahead > 0.5 * num_texts, "rounds that were sent ahead count too"
    return counts


def p_value(counts: NDArray[np.float64], tables: Tables = TABLES) -> float:
    statistic, freedom = 0.0, 0
    for last, row in enumerate(counts):
        sampling = SamplingParams(temperature=TEMPERATURE)
        expected = target_probs(tables, sampling, (last,)) * row.sum()
        is_rare = expected < LEAST_EXPECTED
        bins = [np.append(each[~is_rare], each[is_rare].sum()) for each in (row, expected)]
        is_there = bins[1] > 0
        statistic += float((((bins[0] - bins[1]) ** 2)[is_there] / bins[1][is_there]).sum())
        freedom += max(0, int(is_there.sum()) - 1)
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("method", SAMPLED)
def test_pipelined_texts_have_the_targets_distribution(method: Method) -> None:
    counts = count_pairs(method, NUM_TEXTS, Chances())
    assert p_value(counts) > ALPHA
    other = Tables(0.5 * TABLES.target + 0.5 * TABLES.draft, TABLES.draft)
    assert p_value(counts, other) < ALPHA, "a target nearer to the draft would not be missed"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faults", [Chances(), KEPT_SESSIONS])
@pytest.mark.parametrize("method", SAMPLED)
def test_many_pipelined_texts_have_the_targets_distribution(method: Method, faults: Chances) -> None:
    assert p_value(count_pairs(method, NUM_SLOW_TEXTS, faults)) > ALPHA
