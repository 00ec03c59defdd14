"""The compiled row kernels give the reference's tokens exactly, and its sums to float32."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.golden import assert_golden

from outrider.cloud_verifier.verification.methods.base import NoiseKey
from outrider.cloud_verifier.verification.rows import HostRows, StepRound
from outrider.common.errors import ModelError
from outrider.common.noise.draws import Purpose, gumbel_row
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.sampling.truncation import truncation_threshold
from outrider.common.types import SamplingParams
from outrider.kernels import reference
from outrider.kernels.host import rows as host

GOLDEN = json.loads((Path(__file__).parents[1] / "common" / "golden" / "noise.json").read_text())
VOCAB_SIZES = (5, 8, 9, 31, 100, 777, 2047, 2048, 2049, 5000)
INF = math.inf


def random_case(rng):
    """(row, temperature, threshold, key): any scale, ties, masked entries, thresholds at a value, seeds to 2^64 - 1."""
    row = (rng.normal(size=rng.choice(VOCAB_SIZES)) * rng.choice([0, 0.1, 1, 3, 10, 50])).astype(np.float32)
    if rng.random() < 0.3:
        row = np.round(row)
    if rng.random() < 0.3:
        row[rng.random(row.size) < rng.choice([0.1, 0.9, 1])] = -INF
    temperature, threshold = float(np.float32(rng.choice([1, 0.8, 0.1, 1e-3, 3, 1000]))), -INF
    if rng.random() < 0.5:
        descending = np.sort(row / np.float32(temperature))[::-1]
        threshold = float(descending[min(row.size - 1, rng.choice([0, 1, 3, 50]))])
    seed = 2**64 - 1 - int(rng.integers(5)) if rng.random() < 0.2 else int(rng.integers(2**63))
    key = np.array([seed, rng.integers(6), rng.integers(2**40), rng.integers(9)], np.uint64)
    return row, temperature, threshold, key


def random_changes(rng, row):
    num_changed = int(rng.integers(0, min(row.size, 7)))
    ids = rng.choice(row.size, num_changed, replace=False).astype(np.int64)
    if num_changed and row.argmax() not in ids and rng.random() < 0.5:
        ids[0] = row.argmax()
    return ids, np.where(rng.random(num_changed) < 0.6, -INF, rng.normal(size=num_changed))


@pytest.mark.parametrize("case", GOLDEN["noise"], ids=lambda case: f"seed{case['seed']}")
def test_the_reference_has_the_golden_noise(case):
    key = np.array([case["seed"], case["purpose"], case["position"], case["index"]], np.uint64)
    noise = reference.noise(key, max(case["token_ids"]) + 1)
    assert_golden(noise[case["token_ids"]], case["gumbels"])
    own = gumbel_row(case["seed"], case["position"], noise.size, case["purpose"], case["index"])
    assert noise.tolist() == own.tolist()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_rows_give_the_same_tokens_sums_and_entropy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(1500):
        case = random_case(rng)
        expected, got = reference.gumbel_argmax(*case), host.gumbel_argmax(*case)
        assert got[:2] == expected[:2], case
        np.testing.assert_allclose(got[2], expected[2], rtol=2e-6, atol=2e-6)
        row, temperature, threshold, key = case
        np.testing.assert_allclose(
            host.logsumexp(row, temperature, threshold), got[1:], rtol=1e-12, atol=1e-12
        )
        if math.isfinite(got[1]):
            total = expected[1:]
            case = (row, temperature, threshold, key, *total, *random_changes(rng, row))
            assert host.sample(*case) == reference.sample(*case), case
            entropies = [each.entropy(row, temperature, threshold, *total) for each in (host, reference)]
            np.testing.assert_allclose(*entropies, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [32_000, 152_064])
def test_rows_of_real_sizes_give_the_same_tokens(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for position in range(12):
        row = (rng.normal(size=vocab_size) * 2.5).astype(np.float32)
        row[rng.integers(vocab_size, size=5)] += 15 * (position % 2)
        key = np.array([2**64 - 1, 0, position, 0], np.uint64)
        for threshold in (-INF, 9.0):
            assert (
                host.gumbel_argmax(row, 0.8, threshold, key)[0]
                == reference.gumbel_argmax(row, 0.8, threshold, key)[0]
            )


def random_cuts(rng):
    """(top_k, top_p, min_p), most of them off."""
    top_k = int(rng.choice([0, 0, 1, 2, 17, 50, 400, 10**6]))
    top_p = float(np.float32(rng.choice([1, 1, 0.01, 0.5, 0.9, 0.95])))
    return top_k, top_p, float(np.float32(rng.choice([0, 0, 0.05, 0.9])))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("temperature", [1.0, 30.0, 1000.0])
def test_flat_rows_are_cut_there_too_without_sorting_them(temperature, top_p):
    rng = np.random.default_rng(3)
    flat = rng.normal(scale=3.0, size=30_000).astype(np.float32)
    stepped, outlier = np.round(flat), np.append(flat, np.float32(1e4)).astype(np.float32)
    outlier[:5] = -np.inf
    for row in (flat, stepped, outlier, np.zeros(30_000, np.float32)):
        for top_k in (0, 20_000):
            cuts = top_k, float(np.float32(top_p)), 0.0
            expected = reference.truncation_threshold(row, temperature, *cuts)
            assert host.truncation_threshold(row, temperature, *cuts) == expected


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_cut_where_the_reference_and_the_processors_cut_them(seed):
    rng = np.random.default_rng(5 + seed)
    for _ in range(600):
        row, temperature, _, _ = random_case(rng)
        temperature, cuts = min(temperature, 3.0), random_cuts(rng)
        threshold = host.truncation_threshold(row, temperature, *cuts)
        assert threshold == reference.truncation_threshold(row, temperature, *cuts)
        top_k = cuts[0] if cuts[0] < row.size else 0
        assert threshold == truncation_threshold(row / np.float32(temperature), top_k, *cuts[1:])


@pytest.mark.parametrize("seed", range(2))
def test_a_drafts_rows_are_scanned_up_to_the_first_that_samples_another_token(seed):
    rng = np.random.default_rng(seed)
    for _ in range(300):
        row, temperature, _, key = random_case(rng)
        seed_and_position = int(key[0]), int(key[2])
        temperature, cuts = temperature * (rng.random() < 0.8), random_cuts(rng)
        rows = np.stack([row, np.roll(row, 1), row[::-1], row])
        num_tokens, drafted = int(rng.integers(1, row.size + 1)), []
        for kernels in (reference, host):  # the second drafts what the first one's rows sample, up to a row
            for first in range(4):
                ids = np.array([*drafted, 0, 0, 0][:3], np.int64)
                args = (rows, num_tokens, first, temperature, *cuts, *seed_and_position, ids)
                found, expected = kernels.gumbel_argmax_draft(*args), reference.gumbel_argmax_draft(*args)
                assert found[:, [0, 1, 3]].tolist() == expected[:, [0, 1, 3]].tolist(), args
                np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=2e-6, atol=2e-6)
                ends = (int(t) != d for t, d in zip(found[:, 0], [*ids[first:], -2], strict=False))
                assert next(i for i, is_end in enumerate(ends, 1) if is_end) == len(found)
            rest = (temperature, *cuts, *seed_and_position, ids)
            own = [int(reference.gumbel_argmax_draft(rows, num_tokens, i, *rest)[0, 0]) for i in range(3)]
            drafted = own[: int(rng.integers(4))]


def test_rows_without_a_finite_largest_logit():
    key = np.array([1, 0, 2, 0], np.uint64)
    nan, inf = (np.array([1, 2, each, 3, each, 0], np.float32) for each in (np.nan, np.inf))
    for kernels in (host, reference):
        token_id, top, _ = kernels.gumbel_argmax(nan, 1.0, -INF, key)
        assert token_id == -1 and math.isnan(top)
        assert math.isnan(kernels.logsumexp(-nan, 1.0, -INF)[0])  # NaN with a sign too
        assert kernels.gumbel_argmax(inf, 1.0, -INF, key)[0] == 2
        assert kernels.gumbel_argmax(np.full(9, -np.inf, np.float32), 1.0, -INF, key) == (0, -INF, -INF)


def test_the_numbers_that_exp_and_the_search_bound_are_made_of_hold_far_from_the_top():
    rng = np.random.default_rng(3)
    key = np.array([5, 2, 0, 0], np.uint64)
    for gap in (1, 20, 85, 87, 88, 200, 1e4):  # the top is changed away: what is left lies far below it
        row = np.concatenate([[0], rng.normal(size=3000) - gap]).astype(np.float32)
        changed = np.array([0]), np.array([-INF])
        total = reference.logsumexp(row, 1.0, -INF)
        assert host.sample(row, 1.0, -INF, key, *total, *changed) == reference.sample(
            row, 1.0, -INF, key, *total, *changed
        )


def rows_of(logits, sampling, **changes):
    num_tokens = changes.pop("num_tokens", logits.shape[1])
    text = {"prompt_ids": (1, 2), "output_ids": (3, 3), "draft_token_ids": (4, 5)}
    return HostRows(logits, StepRound(sampling, 7, **text | changes), (0,), num_tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02},
        {"top_k": 20, "min_p": 0.05},
        {"temperature": 1.3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_new_tokens": 4},
        {"logit_bias": ((3, 5.0), (9, -50.0)), "bad_words": ((4,), (2, 3))},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_host_rows_choose_and_weigh_as_the_processors_say(changes):
    rng = np.random.default_rng(11)
    for seed in range(40):
        sampling = replace(SamplingParams(temperature=1.0, seed=2**64 - 1 - seed), **changes)
        logits = (rng.normal(size=(3, 300)) * 3).astype(np.float32)
        before = logits.copy()
        rows = rows_of(logits, sampling, num_tokens=290)
        scores = process_logits(
            np, logits, sampling, prompt_ids=(1, 2), output_ids=(3, 3), draft_token_ids=(4, 5),
            eos_token_ids=(0,), num_tokens=290,
        )  # fmt: skip
        assert [rows.target_sample(i) for i in range(3)] == choose(scores, sampling, (7, 8, 9)).tolist()
        assert (logits == before).all()
        if sampling.temperature == 0:
            continue
        for i in range(3):
            wide = scores[i, :290].astype(np.float64)
            log_probs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
            np.testing.assert_allclose(rows.log_probs(i, range(290)), log_probs, rtol=0, atol=3e-6)
            kept = log_probs[np.isfinite(log_probs)]
            assert rows.entropy(i) == pytest.approx(-(np.exp(kept) * kept).sum(), abs=1e-5)
            key = NoiseKey(Purpose.RESIDUAL, 70 + i, 3)
            noise = gumbel_row(sampling.seed, 70 + i, 290, Purpose.RESIDUAL, 3)
            assert rows.sample(i, key) == (log_probs + noise).argmax()
            changed = {int(log_probs.argmax()): -INF, 17: -0.5}
            log_probs[list(changed)] = list(changed.values())
            assert rows.sample(i, key, changed) == (log_probs + noise).argmax()


def test_a_residual_of_nothing_is_a_sample_of_the_target():
    logits = np.array([[0, 9, 1, 2, 3]], np.float32)
    for temperature in (0.0, 1.0):
        rows = rows_of(logits, SamplingParams(temperature=temperature, top_k=1), draft_token_ids=())
        assert rows.sample(0, NoiseKey(Purpose.RESIDUAL, 0), {1: -INF}) == 1


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 3}]
)
def test_logits_that_are_nan_are_the_models_error(changes):
    logits = np.zeros((2, 12), np.float32)
    logits[1, 7] = np.nan
    rows = rows_of(logits, SamplingParams(**changes), draft_token_ids=(1,))
    with pytest.raises(ModelError, match="NaN"):
        rows.target_sample(1)
    with pytest.raises(ModelError, match="NaN"):
        rows.log_probs(1, (3,))


RUN_WITHOUT = """
import sys, logging
logging.basicConfig(format="%(message)s")
{before}
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
print(load_row_kernels().__name__, load_row_kernels() is load_row_kernels())
"""


def test_without_numba_the_reference_serves_and_says_so_once():
    code = RUN_WITHOUT.format(before="sys.modules['numba'] = None")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "outrider.kernels.reference True\n"
    assert run.stderr.count("verification is not compiled") == 1


def test_help_does_not_import_the_compiler():
    code = "import sys, outrider.cloud_verifier.server.cli\nassert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow  # in milliseconds
def test_the_interpreter_is_free_while_a_row_is_computed():
    import threading

    row, key = np.zeros(4_000_000, np.float32), np.array([1, 0, 2, 0], np.uint64)
    took_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        host.gumbel_argmax(row, 1.0, -INF, key)
        took_s.append(time.perf_counter() - start_s)
    alone_s = min(took_s)
    thread = threading.Thread(target=host.gumbel_argmax, args=(row, 1.0, -INF, key))
    thread.start()
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < alone_s / 4:
        pass  # pure Python, which a kernel that kept the lock would hold up until its end
    assert thread.is_alive()
    thread.join()
