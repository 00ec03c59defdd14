"""Many texts through edge sampler, codec and verifier, against the target's distribution by chi-square.

The normal run samples `NUM_TEXTS` texts a method, `make test-slow` 200,000. Seeds are fixed and α is 0.001,
so a test passes always or never. Expected counts come from the processors alone (`target_probs`).
"""

import dataclasses
import functools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from support.exact.continuations import Writer, make_tables, target_probs
from support.exact.trees import SameRemainder

from outrider.cloud_verifier.verification.methods import sparse
from outrider.common.noise.draws import Purpose, uniform
from outrider.common.types import Method, SamplingParams
from outrider.edge_client.drafting.trees import TreeBudget

EXACT = tuple(method for method in Method if method.is_exact)
ALPHA = 0.001
NUM_TEXTS, NUM_SLOW_TEXTS, FIRST_SLOW_SEED = 6_000, 200_000, 10_000_000
LEAST_EXPECTED = 5  # of a bin; the tail below it is one bin

TABLES = make_tables(12, seed=3)
SAMPLING = SamplingParams(temperature=0.9)
PENALISED_TABLES = make_tables(8, seed=4)
PENALISED = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((3, 1.5), (7, -1.0)),
    bad_words=((5,), (1, 2)),
    min_new_tokens=2,
)


class Tally:
    """What of the texts is compared: first tokens, tokens 3–5, and the token after each correction."""

    def __init__(self):
        self.num_texts = 0
        self.first, self.late, self.after = Counter(), Counter(), Counter()

    def add(self, written):
        self.num_texts += 1
        tokens = written.tokens
        self.first[tokens[:1]] += 1
        self.late[tokens[2:5]] += 1
        # A pair that straddles a rejection: its correction, and what the next round begins with. Given the
        # text up to the correction, the next token is a sample of p whatever happened before.
        self.after.update(tokens[: i + 2] for i in written.corrected if i + 1 < len(tokens))
        return self


def sample(method, tables=TABLES, sampling=SAMPLING, count=NUM_TEXTS, first_seed=1, **options):
    tally = Tally()
    for written in Writer(method, tables, sampling, **options).texts(count, first_seed):
        tally.add(written)
    return tally


@functools.cache
def next_probs(tables, sampling, text):
    return target_probs(tables, sampling, text)


@functools.cache
def late_law(tables, sampling):
    """P(tokens 3–5): [vocab, vocab, vocab], summed over the first two."""
    laws = {(): 1.0}
    for _ in range(5):
        laws = {
            (*text, i): prob * p
            for text, prob in laws.items()
            for i, p in enumerate(next_probs(tables, sampling, text).tolist())
            if p > 0
        }
    law = np.zeros((tables.vocab_size,) * 3)
    for text, prob in laws.items():
        law[text[2:]] += prob
    return law


def chi_square(observed, expected):
    """(statistic, degrees of freedom); what is expected fewer than five times goes into one bin."""
    if observed[expected == 0].any():  # what the target never writes
        return math.inf, 1
    order = np.argsort(-expected)
    bins = []
    for each in (observed[order], expected[order]):
        num_bins = int((expected >= LEAST_EXPECTED).sum())
        bins.append(np.append(each[:num_bins], each[num_bins:].sum()))
    if 0 < bins[1][-1] < LEAST_EXPECTED and len(bins[1]) > 1:  # a small tail joins the smallest bin
        bins = [np.append(each[:-2], each[-2:].sum()) for each in bins]
    bins = [each[bins[1] > 0] for each in bins]
    return ((bins[0] - bins[1]) ** 2 / bins[1]).sum(), len(bins[1]) - 1


def p_values(tally, tables=TABLES, sampling=SAMPLING):
    """Of first tokens, of tokens 3–5, and of the pairs (correction, next token)."""
    size = tables.vocab_size
    first, late = np.zeros(size), np.zeros((size,) * 3)
    for (token_id,), count in tally.first.items():
        first[token_id] = count
    for tokens, count in tally.late.items():
        late[tokens] = count
    late_probs = late_law(tables, sampling)
    tests = (
        [chi_square(first, next_probs(tables, sampling, ()) * tally.num_texts)],
        [chi_square(late.ravel(), late_probs.ravel() * tally.num_texts)],
        straddling_tests(tally, tables, sampling),
    )
    return [float(stats.chi2.sf(*np.sum(each, axis=0))) for each in tests]


def straddling_tests(tally, tables, sampling):
    """One chi-square a correction: what follows it, given the texts it was found in.

    Where p depends on more than the correction, counts vary a little less than chi-square has it.
    """
    size = tables.vocab_size
    observed, expected, found = np.zeros((size, size)), np.zeros((size, size)), Counter()
    for text, count in tally.after.items():
        observed[text[-2], text[-1]] += count
        found[text[:-1]] += count
    for text, count in found.items():
        expected[text[-1]] += count * next_probs(tables, sampling, text)
    return [chi_square(*row) for row in zip(observed, expected, strict=True) if row[1].sum() > 50]


@pytest.fixture
def show(note):
    def row(what, count, values):
        found = " ".join(f"{value:.2g}" for value in values)
        note(f"{what:44} {count:7} texts  p {found}")

    return row


def check(method, show, **options):
    tally = sample(method, **options)
    model = {key: options[key] for key in ("tables", "sampling") if key in options}
    values = p_values(tally, **model)
    show(f"{method}{' with every parameter' if model else ''}", tally.num_texts, values)
    assert min(values) > ALPHA
    return tally


@pytest.mark.parametrize("method", EXACT)
def test_texts_have_the_targets_distribution(method, show):
    check(method, show)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", EXACT)
def test_two_hundred_thousand_texts_have_the_targets_distribution(method, show):
    check(method, show, count=NUM_SLOW_TEXTS, first_seed=FIRST_SLOW_SEED)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("method", EXACT)
def test_with_every_sampling_parameter_texts_have_the_processed_targets_distribution(method, show):
    tables = PENALISED_TABLES
    tally = check(method, show, tables=tables, sampling=PENALISED, count=NUM_TEXTS // 5)
    for name in (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_new_tokens",
        "bad_words",
    ):
        without = dataclasses.replace(PENALISED, **{name: getattr(SamplingParams(), name)})
        assert min(p_values(tally, tables, without)) < ALPHA, f"{name} would not be missed"


def biased_by_a_hundredth(tables):
    """The first token's distribution a total variation of 0.01 off."""
    probs = next_probs(tables, SAMPLING, ()).copy()
    order = np.argsort(probs)
    probs[order[-1]] -= 0.01
    probs[order[-4]] += 0.01
    target = tables.target.copy()
    target[0] = np.log(probs) * SAMPLING.temperature
    return dataclasses.replace(tables, target=target)


def test_a_planted_bias_of_a_hundredth_is_detected(show):
    tally = sample(Method.SPARSE, biased_by_a_hundredth(TABLES))
    values = p_values(tally)
    show("sparse, target biased by 0.01", tally.num_texts, values)
    assert values[0] < ALPHA


class PositionCoins:
    """`KeyedDraws` but for the key: the position alone."""

    def __init__(self, seed, start):
        self._seed, self._start = seed, start

    def accepts(self, probability, offset):
        return uniform(self._seed, self._start + offset, 0, Purpose.ACCEPT) < probability


def test_block_keyed_by_position_alone_is_detected_and_not_in_the_first_token(show):
    tally = sample(Method.BLOCK, make_draws=PositionCoins)
    values = p_values(tally)
    show("block keyed by position alone", tally.num_texts, values)
    assert values[0] > ALPHA > values[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_block_keyed_by_position_alone_is_detected_in_tokens_3_to_5_of_200_000_texts(show):
    tally = sample(Method.BLOCK, make_draws=PositionCoins, count=NUM_SLOW_TEXTS)
    values = p_values(tally)
    show("block keyed by position alone", tally.num_texts, values)
    assert values[0] > ALPHA > max(values[1:])


TREE = TreeBudget(num_nodes=7, max_depth=3, max_width=3)


@pytest.mark.slow
@pytest.mark.ci
def test_texts_of_sparse_trees_have_the_targets_distribution(show):
    check(Method.SPARSE, show, tree=TREE, count=NUM_TEXTS // 2)


@pytest.mark.slow
@pytest.mark.ci
def test_sparse_trees_with_every_sampling_parameter_have_the_processed_targets_distribution(show):
    model = {"tables": PENALISED_TABLES, "sampling": PENALISED}
    check(Method.SPARSE, show, tree=TREE, count=NUM_TEXTS // 5, **model)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_texts_of_sparse_trees_have_the_targets_distribution(show):
    check(Method.SPARSE, show, tree=TREE, count=NUM_SLOW_TEXTS, first_seed=FIRST_SLOW_SEED)


def test_a_sibling_judged_as_if_none_were_rejected_is_detected(show, monkeypatch):
    monkeypatch.setattr(sparse, "Remainder", SameRemainder)
    tally = sample(Method.SPARSE, tree=TREE, count=NUM_TEXTS // 2)
    values = p_values(tally)
    show("sparse trees, p stays after a rejection", tally.num_texts, values)
    assert min(values) < ALPHA


def test_rejections_are_common_enough_to_be_tested():
    tally = sample(Method.SPARSE, count=1000)
    assert tally.after.total() > 500
