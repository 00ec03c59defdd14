"""The GPU's kernels under Triton's interpreter, on CPU tensors: tokens of the reference and an engine.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.fakes import FakeBackend

from outrider.cloud_verifier.engine import finish
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.verification import device_step, row_kernels
from outrider.cloud_verifier.verification.device_rows import make_device_rows
from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import HostRows, StepRound
from outrider.cloud_verifier.verification.staging import Staging
from outrider.common.errors import ModelError
from outrider.common.noise.draws import Purpose
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Limits,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    RoundErrorCode,
    SamplingParams,
    Support,
    Verdict,
    VerifyRequest,
)
from outrider.kernels import device, reference

INF = math.inf
VOCAB_SIZES = (5, 100, 1025, 3000)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """So that small rows have several, in few tiles: the interpreter's time is by tiles."""
    monkeypatch.setattr(device, "SPAN", 2048)
    monkeypatch.setattr(device, "TILE_BLOCKS", 128)


def random_rows(rng, num_rows, vocab_size):
    """(rows, temperatures, thresholds, keys) as numpy: ties, masked ids, thresholds at a value, seeds near 2^64."""
    rows = (rng.normal(size=(num_rows, vocab_size)) * rng.choice([0, 0.1, 1, 3, 10])).astype(np.float32)
    if rng.random() < 0.3:
        rows = np.round(rows)
    if rng.random() < 0.3:
        rows[rng.random(rows.shape) < 0.5] = -INF
    temperatures = rng.choice([1, 0.8, 0.1, 3], size=num_rows).astype(np.float32)
    thresholds = np.full(num_rows, -INF, np.float32)
    if rng.random() < 0.5:
        descending = np.sort(rows / temperatures[:, None], axis=1)[:, ::-1]
        thresholds = descending[:, min(vocab_size - 1, 20)].copy()
    keys = [(2**64 - 1 - int(rng.integers(9)), rng.integers(6), rng.integers(2**40), 3) for _ in rows]
    return rows, temperatures, thresholds, np.array(keys, np.uint64)


def as_tensors(*arrays):
    return [torch.from_numpy(each.view(np.int64) if each.dtype == np.uint64 else each) for each in arrays]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_rows_give_the_references_tokens_sums_entropy_and_residuals(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for _ in range(2):
        case = random_rows(rng, 3, vocab_size)
        got = device.gumbel_argmax(*as_tensors(*case))
        totals, ids, weights = np.zeros((3, 2)), *_no_changes(3)
        expected_picks = []
        for row, one in enumerate(zip(*case, strict=True)):
            token_id, top, log_sum = reference.gumbel_argmax(*one)
            assert (int(got.token_ids[row]), float(got.tops[row])) == (token_id, top)
            np.testing.assert_allclose(float(got.log_sums[row]), log_sum, rtol=1e-5, atol=1e-5)
            if not math.isfinite(top):
                expected_picks.append(None)
                continue
            entropy = reference.entropy(*one[:3], top, log_sum)
            assert float(got.entropies[row]) == pytest.approx(entropy, rel=2e-5, abs=2e-5)
            totals[row], num_changed = (top, log_sum), int(rng.integers(0, 5))
            ids[row, :num_changed] = rng.choice(vocab_size, num_changed, replace=False)
            changed = np.where(rng.random(num_changed) < 0.5, -INF, rng.normal(size=num_changed))
            weights[row, :num_changed] = changed
            changes = ids[row, :num_changed].astype(np.int64), changed
            expected_picks.append(reference.sample(*one, top, log_sum, *changes))
        rows = rng.permutation(3)  # each sample has a row's weights and a key of its own
        known, (*of_rows, keys) = totals.T.copy(), case
        changes = device.Changes(*as_tensors(rows, known[0], known[1], ids[rows], weights[rows]))
        picked = np.empty(3, np.int64)
        picked[rows] = device.sample(*as_tensors(*of_rows, keys[rows]), changes)
        assert all(each in (None, pick) for each, pick in zip(expected_picks, picked, strict=True))


def test_a_kernel_is_launched_on_the_device_of_its_logits(monkeypatch):
    launched, current = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(current[-1] is logits)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("_search", "_combine_spans"):
        monkeypatch.setattr(device, name, Kernel())
    logits = torch.zeros(1, 8)
    device.gumbel_argmax(logits, torch.ones(1), torch.zeros(1), torch.zeros((1, 4), dtype=torch.int64))
    assert launched == [True, True]


def _no_changes(num_rows):
    shape = (num_rows, device.MAX_CHANGED)
    return np.full(shape, device.NO_CHANGE, np.int32), np.full(shape, -INF)


def test_greedy_rows_nan_rows_and_rows_of_nothing():
    rows = np.array([[1, 3, 2, 3], [1, np.nan, 2, 3], [-INF] * 4], np.float32)
    keys = np.zeros((3, 4), np.uint64)
    case = as_tensors(rows, np.zeros(3, np.float32), np.full(3, -INF, np.float32), keys)
    assert device.gumbel_argmax(*case).token_ids.tolist() == [1, -1, 0]
    case[1] = torch.ones(3)
    assert device.gumbel_argmax(*case).token_ids.tolist()[1:] == [-1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3, 1.0])
def test_of_many_equal_logits_the_references_token_is_found(temperature, monkeypatch):
    """All of a tile may win where the noise is less than what float32 can tell apart; of equal ones the first does."""
    monkeypatch.setattr(device, "SPAN", 64)
    monkeypatch.setattr(device, "TILE_BLOCKS", 4)
    rows = np.zeros((2, 150), np.float32)
    rows[1, 40:] = 7.0
    temperatures, cuts = np.full(2, temperature, np.float32), np.full(2, -INF, np.float32)
    keys = np.array([(row, 2, 3, 4) for row in range(2)], np.uint64)
    found = device.gumbel_argmax(*as_tensors(rows, temperatures, cuts, keys)).token_ids.tolist()
    cases = zip(rows, temperatures, cuts, keys, strict=True)
    assert found == ([reference.gumbel_argmax(*each)[0] for each in cases] if temperature else [0, 40])


def test_the_bound_of_a_numbers_noise_is_at_least_the_noise():
    edges = [0, 1, 2, 3, 2**23 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    lanes = np.array([*edges, *np.random.default_rng(0).integers(0, 2**32, 100_000)], np.uint32)
    x = lanes.astype(np.float32) + np.float32(0.5)
    logs = x.view(np.int32).astype(np.float32)
    no_logs, log_of_bit = (np.float32(each.value) for each in (device._NO_LOGS, device._LOG_OF_BIT))
    v = (lanes.astype(np.float64) + 0.5) / 2**32
    noise = -np.log(-np.log1p(-v))
    excess = no_logs - logs * log_of_bit - noise
    assert excess.min() > -float(device._SLACK.value) / 2 and (excess - (-np.log(v) - noise)).max() < 0.06
    assert device._MOST_NOISE.value >= noise.max()


def test_signals_are_the_references():
    logits = (np.random.default_rng(2).normal(size=(4, 3000)) * 3).astype(np.float32)
    token_ids = [5, 0, 2999, 77]
    *signals, top_ids = device.draft_signals(torch.from_numpy(logits), torch.tensor(token_ids), 8)
    for row, token_id in enumerate(token_ids):
        expected = reference.draft_signals(logits[row], token_id)
        np.testing.assert_allclose([float(each[row]) for each in signals], expected, rtol=1e-5, atol=1e-5)
        assert top_ids[row].tolist() == np.argsort(-logits[row])[:8].tolist()


ROUNDS = (
    StepRound(SamplingParams(temperature=0.0), 5, (1, 2), (3,), (4, 5)),
    StepRound(
        SamplingParams(temperature=0.7, seed=2**64 - 1, top_p=0.9), 15, (1, 2), (3,), (4, 7, 8),
        supports=(Support((4, 9), (1, 2)), Support((7,), (1,)), Support((8, 1, 0), (3, 2, 1))),
    ),
    StepRound(SamplingParams(seed=4, repetition_penalty=1.3, top_k=40), 25, (1, 2), (3, 3), ()),
    StepRound(SamplingParams(temperature=1.2, seed=5, logit_bias=((9, 8.0),), min_p=0.01), 2, (1,), (), (6,)),
)  # fmt: skip


def test_device_rows_answer_as_host_rows_do():
    logits = (np.random.default_rng(0).normal(size=(10, 1100)) * 3).astype(np.float32)
    logits[1, 17] = logits[1].max()  # a tie
    found = make_device_rows(torch.from_numpy(logits), ROUNDS, (0,), 1090)
    first = 0
    for step_round, rows in zip(ROUNDS, found, strict=True):
        mine = logits[first : first + step_round.num_rows]
        host = HostRows(mine, step_round, (0,), 1090)
        for row in range(step_round.num_rows):
            assert rows.target_sample(row) == host.target_sample(row)
            for ids in (step_round.draft_token_ids[row : row + 1], (1, 500, 1089)):
                np.testing.assert_allclose(rows.log_probs(row, ids), host.log_probs(row, ids), atol=2e-5)
            assert rows.entropy(row) == pytest.approx(host.entropy(row), abs=1e-4)
            key, changed = NoiseKey(Purpose.RESIDUAL, 15, row), {host.target_sample(row): -INF, 9: -0.3}
            assert rows.sample(row, key) == host.sample(row, key)
            assert rows.sample(row, key, changed) == host.sample(row, key, changed)
        first += step_round.num_rows


def test_a_step_without_rows_has_no_rounds():
    assert make_device_rows(torch.zeros((0, 12)), (), (0,), 12) == []


def test_a_row_of_nan_is_the_models_error_and_no_other_rows():
    logits = torch.zeros((2, 12))
    logits[1, 7] = torch.nan
    good, bad = make_device_rows(logits, (replace(ROUNDS[2], prompt_ids=()),) * 2, (), 12)
    assert 0 <= good.target_sample(0) < 12
    with pytest.raises(ModelError, match="NaN"):
        bad.target_sample(0)


class FakeGpu(FakeBackend):
    """Its logits are tensors."""

    def forward(self, items):
        return torch.from_numpy(super().forward(items))


class StagedGpu(FakeGpu):
    """Takes what rows are computed with along with its forwards."""

    def __init__(self):
        super().__init__()
        self.staging = Staging(torch.device("cpu"))

    def forward(self, items):
        logits = super().forward(items)
        self.staging.start()
        self.staging.send()
        return logits


class Stopped:
    """A clock that stands still, unless a test moves it."""

    now_s = 0.0

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        pass


def make_engine(backend, clock=None):
    limits = Limits(backend.max_context, 16, 1 << 20, 8, 60_000)
    model = ModelInfo(
        1, "fake", backend.fingerprint, backend.tokenizer_fingerprint, "float32", "cpu",
        backend.eos_token_ids, backend.num_tokens, limits, tuple(Method), "test",
    )  # fmt: skip
    return Engine(backend, model, clock=clock or Stopped())


def answers_of(backend):
    """What an engine says to a few rounds of several methods, batched; metrics left out."""
    engine, replies, texts = make_engine(backend), {}, {}

    def ask(requests):
        for name, request in requests.items():
            replies[name] = []
            engine.submit(Job(bytes([name]) * 16, request, replies[name].append, 0))
        while engine.step():
            pass
        return {name: replies[name][-1] for name in requests}

    samplings = {
        1: (Method.COUPLED, SamplingParams(temperature=0.0)),
        2: (Method.COUPLED, SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.4)),
        3: (Method.SPARSE, SamplingParams(seed=2**64 - 1, top_p=0.95)),
        4: (Method.TYPICAL, SamplingParams(seed=5)),
        5: (Method.CANDIDATES, SamplingParams(seed=6, min_new_tokens=3)),
    }
    opened = ask(
        {
            name: OpenRequest(bytes([name]) * 16, (5, 6, 7), 3, sampling, method, num_logprobs=2)
            for name, (method, sampling) in samplings.items()
        }
    )
    assert all(isinstance(reply, Opened) for reply in opened.values()), opened
    drafts = (3, 9, 12)
    supports = tuple(Support((token_id, 4, 20), (3, 1, 1)) for token_id in drafts)
    verdicts = ask(
        {
            name: VerifyRequest(
                1, opened[name].position, opened[name].hash, draft_tokens=drafts,
                q_token_probs=(0.6,) * 3 if name in (2, 5) else (), q_support=supports if name == 3 else (),
            )
            for name in samplings
        }
    )  # fmt: skip
    assert all(isinstance(reply, Verdict) for reply in verdicts.values()), verdicts
    generated = ask({1: GenerateRequest(2, verdicts[1].position, verdicts[1].hash, max_new_tokens=4)})
    assert isinstance(generated[1], GeneratedTokens)
    texts = {
        name: (first.first_token, second.accepted_len, second.correction, second.position, second.hash)
        for name, first, second in ((name, opened[name], verdicts[name]) for name in samplings)
    }
    numbers = [
        each.processed_logprob
        for reply in (*opened.values(), *verdicts.values())
        for each in _logprobs(reply)
    ]
    return (
        texts,
        [reply.token_ids for reply in replies[1]],
        [c.token_id for c in verdicts[5].candidates],
        numbers,
    )


def _logprobs(reply):
    return reply.logprobs if isinstance(reply, Verdict) else (reply.logprobs,)


def test_an_engine_whose_logits_are_on_a_device_gives_the_same_answers(monkeypatch):
    """Also where what rows are computed with went there with the forward."""
    *expected, host_numbers = answers_of(FakeBackend())
    for backend in (FakeGpu(), StagedGpu()):
        *got, device_numbers = answers_of(backend)
        assert got == expected
        np.testing.assert_allclose(device_numbers, host_numbers, atol=2e-5)
        monkeypatch.setattr(finish, "make_device_rows", None)  # nothing goes by itself


def test_what_cannot_be_prepared_of_one_session_ends_that_session_alone(monkeypatch):
    right, engine, replies = device_step.penalties_of_round, make_engine(StagedGpu()), {1: [], 2: []}

    def fail_for_one(each):
        if each.sampling.seed == 2:
            raise RuntimeError("no memory")
        return right(each)

    monkeypatch.setattr(device_step, "penalties_of_round", fail_for_one)
    for name, answers in replies.items():
        opening = OpenRequest(bytes([name]) * 16, (5, 6, 7), 3, SamplingParams(seed=name))
        engine.submit(Job(opening.session_id, opening, answers.append, 0))
    while engine.step():
        pass
    assert isinstance(replies[1][-1], Opened)
    assert [reply.code for reply in replies[2]] == [RoundErrorCode.INTERNAL] and engine.num_sessions == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_preparing_rows_takes_is_charged_to_the_tenant_whose_rows_they_are(fails, monkeypatch):
    """It is done before the forward, for all works of a step: others are not charged for it."""
    clock, charged = Stopped(), {}
    right, engine = device_step.penalties_of_round, make_engine(StagedGpu(), clock)

    def take_long_for_one(each):
        if each.sampling.seed == 1:
            clock.now_s += 0.25
            if fails:
                raise RuntimeError("no memory")
        return right(each)

    def charge(work, host_s):
        charged[work.tenant] = charged.get(work.tenant, 0.0) + host_s

    monkeypatch.setattr(device_step, "penalties_of_round", take_long_for_one)
    monkeypatch.setattr(engine._scheduler, "charge", charge)
    for name, tenant in enumerate(("slow", "plain"), start=1):
        sampling = SamplingParams(seed=name, presence_penalty=0.5)
        opening = OpenRequest(bytes([name]) * 16, (5, 6, 7), 3, sampling)
        engine.submit(Job(opening.session_id, opening, [].append, 0, tenant))
    while engine.step():
        pass
    assert engine.num_sessions == 2 - fails
    # Where it fails: with the others, which nobody is charged for, and alone once more.
    assert charged == {"slow": 0.5 if fails else 0.25, "plain": 0.0}


def test_the_check_at_load_passes_right_kernels_and_tells_of_wrong_ones(monkeypatch, caplog):
    assert row_kernels.has_device_kernels("cpu", 400, 390)
    right = device.gumbel_argmax
    monkeypatch.setattr(
        device, "gumbel_argmax", lambda *case: replace(right(*case), token_ids=torch.tensor([1, 1]))
    )
    assert not row_kernels.has_device_kernels("cpu", 400, 390)
    assert "verified on the CPU" in caplog.text
