"""A step's rows on a device, under Triton's interpreter: every method decides as over the host's rows, from what was
computed beforehand. Run by test_triton_kernels.py in a process of their own."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from outrider.cloud_verifier.verification import device_step
from outrider.cloud_verifier.verification.device_rows import DeviceRows, make_device_rows
from outrider.cloud_verifier.verification.logprobs import logprobs_of
from outrider.cloud_verifier.verification.methods import block
from outrider.cloud_verifier.verification.methods.base import NoiseKey, RoundInput
from outrider.cloud_verifier.verification.methods.candidates import candidate_indices
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.methods.supports import Remainder, sample_residual
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.cloud_verifier.verification.staging import Staging
from outrider.common.noise.draws import Purpose
from outrider.common.sampling.history import History
from outrider.common.tree import Tree, supports_by_row
from outrider.common.types import Method, MethodParams, SamplingParams, Support
from outrider.kernels import device, device_truncation, reference
from outrider.kernels.device_truncation import truncation_thresholds

NUM_TOKENS, NUM_PADDED = 60, 64
PARAMS = MethodParams()
UNPENALISED = "temperature", "top_p", "top_k", "seed"
FORK = Tree((-1, -1, 0, 0, 1))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(device, "SPAN", 64)
    monkeypatch.setattr(device, "TILE_BLOCKS", 8)
    monkeypatch.setattr(device_truncation, "TILE", 256)


@pytest.mark.parametrize("vocab_size", [5, 600])
def test_thresholds_keep_what_the_references_keep(vocab_size):
    rng = np.random.default_rng(vocab_size)
    scales = np.array([0.0, 0.1, 1.0, 10.0, 3.0, 3.0, 3.0, 3.0])
    rows = (rng.normal(size=(8, vocab_size)) * scales[:, None] + rng.choice([0, 20])).astype(np.float32)
    rows[2] = np.round(rows[2])
    rows[4, rng.random(vocab_size) < 0.5] = -math.inf
    rows[5, 3], rows[6, 1], rows[7] = math.nan, math.inf, -math.inf
    temperatures = np.array([1, 0.8, 0.1, 3, 1, 1, 1, 1], np.float32)
    for top_k, top_p, min_p in ((0, 0.9, 0.0), (2, 1.0, 0.0), (vocab_size - 1, 0.5, 0.0), (3, 0.7, 0.3)):
        cut = np.int32(top_k), np.float64(top_p), np.float64(math.log(min_p) if min_p else -math.inf)
        chosen = np.array([6, 7, 0, 1, 2, 4, 5])  # not row 3
        arrays = rows, temperatures, chosen, *(np.full(7, each) for each in cut)
        found = truncation_thresholds(*map(torch.from_numpy, arrays)).numpy()
        assert found[3] == -math.inf
        for row in chosen:
            with np.errstate(invalid="ignore"):
                expected = reference.truncation_threshold(
                    rows[row], float(temperatures[row]), top_k, top_p, min_p
                )
                scores = np.where(rows[row] > -math.inf, rows[row] / temperatures[row], np.nan)
                assert ((scores >= found[row]) == (scores >= np.float32(expected))).all()


def random_round(rng, method, tree=None):
    """(round, what its method is given but the rows) of a draft whose tokens are drawn from its supports."""
    logits = (rng.normal(size=(len(tree or range(4)) + 1, NUM_PADDED)) * 2).astype(np.float32)
    logits = np.round(logits, 1)  # with ties
    supports, drafted = [], []
    for row, near in enumerate(logits):
        children = len(tree.children(row - 1)) if tree else int(row + 1 < len(logits))
        ids = np.argsort(-near[:NUM_TOKENS] + rng.normal(size=NUM_TOKENS))[:6]
        weights = rng.integers(1, 9, 6)
        if children:
            supports.append(Support(tuple(ids.tolist()), tuple(weights.tolist())))
            drafted.append(rng.choice(ids, children, replace=False).tolist())
    if tree:
        tokens = dict(
            zip(
                (n for p in tree.internal for n in tree.children(p)),
                chain.from_iterable(drafted),
                strict=True,
            )
        )
        draft, of_rows = tuple(tokens[node] for node in range(len(tree))), supports_by_row(tree, supports)
    else:
        draft, of_rows = tuple(each[0] for each in drafted), tuple(supports)
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.0])),
        top_p=float(rng.choice([1.0, 0.8])),
        top_k=int(rng.choice([0, 9])),
        seed=int(rng.integers(2**62)),
    )
    if rng.random() < 0.5:
        sampling = replace(
            sampling, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1,
            logit_bias=((3, 1.5),), bad_words=((4,), (draft[0], 5), (9, draft[0], 6)), min_new_tokens=4,
            held_back=(8, draft[-1], 8),
        )  # fmt: skip
    has_support = method in (Method.SPARSE, Method.BLOCK)
    candidates = candidate_indices(PARAMS, 0) if method is Method.CANDIDATES else range(0)
    step_round = StepRound(
        sampling, 17, (1, 2, draft[-1]), (7, 7, 9), draft, tree, of_rows if has_support else (),
        resampling=create_method(method).resampling, candidates=candidates,
        num_logprobs=int(rng.choice([0, 1, 20])),
    )  # fmt: skip
    return logits, step_round


def make_input(rows, each):
    return RoundInput(
        rows=rows, draws=KeyedDraws(each.sampling.seed, each.position), position=each.position,
        draft_tokens=each.draft_token_ids, draft_probs=(0.6,) * len(each.draft_token_ids), supports=each.supports,
        stop_ids=frozenset(), method_params=PARAMS, tree=each.tree, is_cut=each.is_cut,
    )  # fmt: skip


def judge(method, rows, each):
    """The outcome and log-probabilities of one round."""
    outcome = create_method(method).verify(make_input(rows, each))
    if not each.num_logprobs:
        return outcome, ()
    return outcome, logprobs_of(rows, each.draft_token_ids, outcome, each.num_logprobs)


CASES = [(method, None) for method in Method] + [(each, FORK) for each in (Method.COUPLED, Method.SPARSE)]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_methods_decide_as_over_the_hosts_rows_and_all_that_they_read_was_foreseen(is_cut, monkeypatch):
    """One step with rounds of all of them; cut by a grammar they are without their last rows."""
    monkeypatch.setattr(DeviceRows, "_sample_now", None)
    rng, cases = np.random.default_rng(0), CASES * 2
    pairs = [random_round(rng, method, tree) for method, tree in cases]

    def cutting(each):
        each.cut(1 + each.sampling.seed % (each.num_rows - 1))
        return []

    if is_cut:
        for _, each in pairs:
            each.sampling = replace(SamplingParams(), **{n: getattr(each.sampling, n) for n in UNPENALISED})
        monkeypatch.setattr(device_step, "penalties_of_round", cutting)
    logits, rounds = np.concatenate([own for own, _ in pairs]), [each for _, each in pairs]
    found, lengths = make_device_rows(torch.from_numpy(logits), rounds, (0,), NUM_TOKENS), set()
    found[0].wait()
    found[0]._step.penalized = found[0]._step.raw = None  # nothing is read of the logits any more
    for (method, _), (own, each), rows in zip(cases, pairs, found, strict=True):
        outcome, logprobs = judge(method, rows, each)
        expected, expected_logprobs = judge(method, HostRows(own, each, (0,), NUM_TOKENS), each)
        assert [c.token_id for c in outcome.candidates] == [c.token_id for c in expected.candidates]
        assert outcome.alpha_mean == pytest.approx(expected.alpha_mean, abs=1e-5, nan_ok=True)
        same = replace(outcome, candidates=expected.candidates, alpha_mean=expected.alpha_mean)
        assert repr(same) == repr(expected)
        for mine, theirs in zip(logprobs, expected_logprobs, strict=True):
            assert mine.top_token_ids == theirs.top_token_ids
            for name in ("raw_logprob", "processed_logprob", "top_logprobs"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=2e-5), name
        lengths.add((method, outcome.accepted_len))
    assert len(lengths) > 1.5 * len(Method), "the rounds are too alike to show anything"
    assert all(each.is_cut is is_cut for each in rounds)


def test_what_the_paths_of_a_tree_have_in_common_is_sent_once():
    stops = tuple(range(1, NUM_TOKENS))
    biases = tuple((token_id, 1.0) for token_id in stops)
    sampling = SamplingParams(logit_bias=biases, bad_words=((9, 4),), min_new_tokens=99, held_back=stops)
    history = History(sampling, (1, 2), (7,))
    num_bytes = []
    for tree in (Tree((-1, -1)), Tree((-1,) * 20)):
        draft = tuple(range(len(tree)))
        each = StepRound(sampling, 3, (1, 2), (7,), draft, tree, history=lambda: history)
        staged = device_step.StagedRounds([each], NUM_TOKENS, Staging(torch.device("cpu")))
        num_bytes.append(sum(array.nbytes for array in staged._arrays[2]))
    few, many = num_bytes
    assert many - few < 18 * 100, "of each path its rows alone"


@pytest.mark.parametrize(
    ("method", "tree"), [(Method.SPARSE, None), (Method.SPARSE, FORK), (Method.BLOCK, None)]
)
def test_each_rows_residual_is_the_hosts_whether_it_is_asked_for_or_not(method, tree):
    rng = np.random.default_rng(5)
    pairs = [random_round(rng, method, tree) for _ in range(6)]
    rounds = [
        replace(each, sampling=SamplingParams(seed=i), num_logprobs=0) for i, (_, each) in enumerate(pairs)
    ]
    found = make_device_rows(
        torch.from_numpy(np.concatenate([own for own, _ in pairs])), rounds, (0,), NUM_TOKENS
    )
    compared = 0
    for (own, _), each, rows in zip(pairs, rounds, found, strict=True):
        given = make_input(HostRows(own, each, (0,), NUM_TOKENS), each)
        expected = []
        for row in [node + 1 for node in tree.internal] if tree else range(len(each.draft_token_ids)):
            if tree:
                remainder = Remainder(given, row)
                for child in tree.children(row - 1):
                    remainder.reject(each.draft_token_ids[child])
                expected.append(remainder.sample())
            else:
                prefixes = block._weigh(given)[0] if method is Method.BLOCK else [(1.0, 0.0)] * (row + 1)
                expected.append(
                    sample_residual(given, row, kept=prefixes[row][0]) if prefixes[row][0] else None
                )
        for token_id, right in zip(rows._samples.values(), expected, strict=True):
            assert right in (token_id, None)
            compared += right is not None
    assert compared > 12


def test_a_sample_that_nobody_foresaw_is_drawn_when_it_is_asked_for():
    rng = np.random.default_rng(3)
    logits, each = random_round(rng, Method.CANDIDATES)
    each = replace(each, sampling=SamplingParams(seed=4), num_logprobs=0)
    (rows,) = make_device_rows(torch.from_numpy(logits), [each], (0,), NUM_TOKENS)
    host = HostRows(logits, each, (0,), NUM_TOKENS)
    for index in range(6):
        key = NoiseKey(Purpose.CANDIDATE, each.position + 2, index)
        assert rows.sample(2, key) == host.sample(2, key)
        assert rows.log_probs(2, (7, 8)) == pytest.approx(host.log_probs(2, (7, 8)), abs=1e-5)
