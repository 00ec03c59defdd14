"""Each verification method's decisions, over rows and draws that the test writes out.

That the exact ones are exact is enumerated in tests/exactness.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey, Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.candidates import MAX_HERE, NUM_CANDIDATES, choose_here
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.methods import sends_probs, sends_support
from outrider.common.noise.draws import Purpose
from outrider.common.noise.philox import first_word
from outrider.common.sampling.support import choose_candidate, sample_support
from outrider.common.types import Candidate, CorrectionKind, Method, MethodParams, SamplingParams, Support

EXACT = [method for method in Method if method.is_exact]
CHAIN = [method for method in Method if method is not Method.COUPLED]
START = 10
OWN = 7  # what `target_sample` of a written row answers, plus the row


@dataclass
class WrittenRows:
    """Distributions written by the test; what is sampled is remembered, and answered by `answers`."""

    probs: Sequence[Sequence[float]]
    answers: Sequence[int] = ()
    samples: list[tuple[int, NoiseKey, dict[int, float]]] = field(default_factory=list)

    def log_probs(self, row: int, token_ids: Sequence[int]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.log(np.array([self.probs[row][i] for i in token_ids], np.float64))

    def entropy(self, row: int) -> float:
        return -sum(p * math.log(p) for p in self.probs[row] if p > 0)

    def target_sample(self, row: int) -> int:
        return OWN + row

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        self.samples.append((row, key, dict(changed or {})))
        return self.answers[len(self.samples) - 1] if self.answers else 0

    def last_weights(self) -> list[float]:
        """The distribution of the last sample, from what the method said about it."""
        row, _, changed = self.samples[-1]
        weights = [math.exp(changed[i]) if i in changed else p for i, p in enumerate(self.probs[row])]
        return [weight / sum(weights) for weight in weights]


class WrittenDraws:
    """Uniform numbers by offset; 0.5 where none is given."""

    def __init__(self, *uniforms: float) -> None:
        self._uniforms = uniforms

    def accepts(self, probability: float, offset: int) -> bool:
        return (self._uniforms[offset] if offset < len(self._uniforms) else 0.5) < probability


def a_round(
    method: Method,
    rows: WrittenRows | HostRows,
    draft: Sequence[int],
    supports: Sequence[Support] = (),
    draws: WrittenDraws | KeyedDraws | None = None,
    stop_ids: Sequence[int] = (),
    params: MethodParams | None = None,
    candidates_from: int = 0,
    is_pipelined: bool = False,
) -> RoundInput:
    """What the edge sends for `method` with a draft sampled from `supports`."""
    pairs = list(zip(draft, supports, strict=True))
    probs = tuple(s.weights[s.token_ids.index(t)] / sum(s.weights) for t, s in pairs)
    return RoundInput(
        rows=rows,
        draws=draws or WrittenDraws(),
        position=START,
        draft_tokens=tuple(draft),
        draft_probs=probs if sends_probs(method) else (),
        supports=tuple(supports) if sends_support(method) else (),
        stop_ids=frozenset(stop_ids),
        method_params=params or MethodParams(),
        candidates_from=candidates_from,
        is_pipelined=is_pipelined,
    )


def verify(method: Method, *args: object, **fields: object) -> Outcome:
    return create_method(method).verify(a_round(method, *args, **fields))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the papers' own numbers

TARGET, DRAFT = (1 / 3, 2 / 3), Support((0, 1), (2, 1))  # Sun et al. 2024, §3: two tokens, context ignored


class _Unknown(Exception):
    pass


class _ScriptedDraws:
    def __init__(self, script: Sequence[bool]) -> None:
        self._script, self.probability = list(script), 1.0

    def accepts(self, probability: float, offset: int) -> bool:
        if probability >= 1 or probability <= 0:
            return probability >= 1
        if not self._script:
            raise _Unknown
        heads = self._script.pop(0)
        self.probability *= probability if heads else 1 - probability
        return heads


def every_outcome(method: Method, draft: Sequence[int]) -> Iterator[tuple[float, Outcome, WrittenRows]]:
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        script = scripts.pop()
        rows, draws = WrittenRows([TARGET] * 3), _ScriptedDraws(script)
        try:
            outcome = verify(method, rows, draft, (DRAFT,) * 2, draws)
        except _Unknown:
            scripts += [(*script, True), (*script, False)]
        else:
            yield draws.probability, outcome, rows


@pytest.mark.parametrize(("method", "expected"), [(Method.SPARSE, 10 / 9), (Method.BLOCK, 11 / 9)])
def test_the_mean_accepted_length_is_that_of_the_papers_example(method: Method, expected: float) -> None:
    mean, pairs = 0.0, np.zeros((2, 2))
    for draft in itertools.product((0, 1), repeat=2):
        drafted = math.prod((2 / 3, 1 / 3)[token] for token in draft)
        for probability, outcome, rows in every_outcome(method, draft):
            weight = drafted * probability
            mean += weight * outcome.accepted_len
            if outcome.accepted_len == 2:
                pairs[draft] += weight
            elif outcome.accepted_len == 1:
                pairs[draft[0]] += weight * np.array(rows.last_weights())
            else:
                pairs += weight * np.outer(rows.last_weights(), TARGET)
    assert mean == pytest.approx(expected)
    assert pairs == pytest.approx(np.outer(TARGET, TARGET)), "the first two tokens are the target's"


# ------------------------------------------------------------------------------------ one rule for all

SUPPORT = Support((1, 2, 3), (2, 1, 1))
LIKELY = (0.0, 0.9, 0.05, 0.05)  # accepts 1 with any coin
UNLIKELY = (0.97, 0.01, 0.01, 0.01)  # rejects 1 with the coin 0.5


@pytest.mark.parametrize("method", CHAIN)
def test_nothing_after_an_accepted_stop_id_stands_and_nothing_follows_it(method: Method) -> None:
    rows = WrittenRows([LIKELY] * 5)
    outcome = verify(method, rows, (1, 1, 1, 1), (SUPPORT,) * 4, stop_ids=(1,))
    assert (outcome.accepted_len, outcome.correction_kind) == (1, CorrectionKind.NONE)
    assert not outcome.candidates and not rows.samples


@pytest.mark.parametrize("method", CHAIN)
def test_a_stop_id_that_is_rejected_ends_nothing(method: Method) -> None:
    outcome = verify(method, WrittenRows([UNLIKELY] * 2), (1,), (SUPPORT,), stop_ids=(1,))
    assert outcome.accepted_len == 0
    assert bool(outcome.candidates) is (method is Method.CANDIDATES)
    kind = CorrectionKind.NONE if outcome.candidates else CorrectionKind.CORRECTION
    assert outcome.correction_kind is kind


@pytest.mark.parametrize("method", CHAIN)
def test_a_full_acceptance_gives_the_targets_own_bonus_unless_the_next_round_is_on_its_way(
    method: Method,
) -> None:
    fields = {"draft": (1, 1), "supports": (SUPPORT,) * 2}
    outcome = verify(method, WrittenRows([LIKELY] * 3), **fields)
    assert (outcome.accepted_len, outcome.correction) == (2, OWN + 2)
    assert outcome.correction_kind is CorrectionKind.BONUS
    outcome = verify(method, WrittenRows([LIKELY] * 3), **fields, is_pipelined=True)
    assert (outcome.accepted_len, outcome.correction_kind) == (2, CorrectionKind.NONE)


def test_coupled_gives_its_bonus_to_a_pipelined_round_too() -> None:
    outcome = verify(Method.COUPLED, WrittenRows([LIKELY]), (), (), is_pipelined=True)
    assert (outcome.correction_kind, outcome.correction) == (CorrectionKind.BONUS, OWN)


@pytest.mark.parametrize("method", list(Method))
def test_a_round_without_a_draft_gives_the_targets_own_token(method: Method) -> None:
    outcome = verify(method, WrittenRows([LIKELY]), ())
    assert (outcome.accepted_len, outcome.correction) == (0, OWN)
    assert outcome.correction_kind is CorrectionKind.BONUS and math.isnan(outcome.alpha_mean)


@pytest.mark.parametrize("method", [Method.SPARSE, Method.CANDIDATES, Method.SHORTCUT, Method.BLOCK])
def test_alpha_is_the_mean_of_the_ratios_of_those_judged(method: Method) -> None:
    rows = WrittenRows([LIKELY, UNLIKELY, LIKELY])
    outcome = verify(method, rows, (1, 1), (SUPPORT,) * 2)
    assert outcome.accepted_len == 1
    assert outcome.alpha_mean == pytest.approx((1.0 + 0.01 / 0.5) / 2)


@pytest.mark.parametrize("method", [*EXACT, Method.SHORTCUT, Method.SCALAR_RESIDUAL, Method.TYPICAL])
@pytest.mark.parametrize("num_right", range(5))
def test_at_temperature_zero_the_text_is_the_greedy_one(method: Method, num_right: int) -> None:
    rng = np.random.default_rng(num_right)
    logits = rng.normal(size=(5, 40)).astype(np.float32)
    best = [int(i) for i in logits.argmax(axis=1)]
    draft = best[:num_right] + [(i + 1) % 40 for i in best[num_right:4]]
    greedy = SamplingParams(temperature=0.0, seed=3)
    rows = HostRows(logits, StepRound(greedy, START, (), (), tuple(draft)), (), 40)
    supports = [Support((token,), (1,)) for token in draft]
    outcome = verify(method, rows, draft, supports, KeyedDraws(3, START))
    assert outcome.accepted_len == num_right
    if method is Method.CANDIDATES and num_right < 4:
        assert outcome.candidates == (Candidate(best[num_right], 1.0),) * NUM_CANDIDATES
    else:
        assert outcome.correction == best[num_right]


# ----------------------------------------------------------------------------------- each one's own rule


def test_sparse_corrects_from_the_residual_of_the_same_support() -> None:
    rows = WrittenRows([(0.4, 0.1, 0.3, 0.2), LIKELY])
    outcome = verify(Method.SPARSE, rows, (1,), (SUPPORT,), WrittenDraws(0.2 + 1e-9))
    assert (outcome.accepted_len, outcome.correction_kind) == (0, CorrectionKind.CORRECTION)
    assert rows.last_weights() == pytest.approx([0.4 / 0.45, 0, 0.05 / 0.45, 0])
    assert rows.samples[0][1] == NoiseKey(Purpose.RESIDUAL, START, 0)
    rows = WrittenRows([(0.4, 0.1, 0.3, 0.2), LIKELY])
    assert verify(Method.SPARSE, rows, (1,), (SUPPORT,), WrittenDraws(0.2 - 1e-9)).accepted_len == 1


def test_a_draft_without_chance_is_rejected_with_the_targets_own_chance() -> None:
    rows = WrittenRows([(0.2, 0.5, 0.2, 0.1), LIKELY])
    certain = Support((1,), (1,))
    assert verify(Method.SPARSE, rows, (1,), (certain,), WrittenDraws(0.51)).accepted_len == 0
    assert rows.last_weights() == pytest.approx([0.4, 0, 0.4, 0.2])


def test_block_saves_a_token_that_sparse_rejects_when_a_later_one_makes_up_for_it() -> None:
    first, second = (0.7, 0.1, 0.1, 0.1), (0.0, 1.0, 0.0, 0.0)
    draws = WrittenDraws(0.9, 0.3)
    draft, supports = (1, 1), (SUPPORT, SUPPORT)  # c1 = 0.2, c2 = min(1, 0.2 · 2) = 0.4
    assert (
        verify(Method.SPARSE, WrittenRows([first, second, LIKELY]), draft, supports, draws).accepted_len == 0
    )
    assert (
        verify(Method.BLOCK, WrittenRows([first, second, LIKELY]), draft, supports, draws).accepted_len == 2
    )


def test_block_corrects_from_the_residual_of_what_the_prefix_is_worth() -> None:
    first, second = (0.6, 0.2, 0.1, 0.1), (0.5, 0.0, 0.5, 0.0)  # c1 = 0.4; R1 = 0.2 + 0 = 0.2
    draws = WrittenDraws(0.2 / (0.2 + 0.6) - 1e-9, 0.5)
    rows = WrittenRows([first, second, LIKELY])
    assert verify(Method.BLOCK, rows, (1, 1), (SUPPORT,) * 2, draws).accepted_len == 1
    assert rows.last_weights() == pytest.approx([1, 0, 0, 0]), "0.4 · 0.5 − 0.25 < 0"
    assert rows.samples[0][1] == NoiseKey(Purpose.RESIDUAL, START, 1)
    draws = WrittenDraws(0.2 / (0.2 + 0.6) + 1e-9, 0.5)
    assert verify(Method.BLOCK, WrittenRows([first, second, LIKELY]), (1, 1), (SUPPORT,) * 2, draws) == (
        Outcome(0, 0, CorrectionKind.CORRECTION, 0.4)
    )


def test_block_accepts_all_of_a_draft_that_is_the_targets() -> None:
    same = (0.0, 0.5, 0.25, 0.25)
    for draws in (WrittenDraws(0.0, 0.0, 0.0), WrittenDraws(*[1 - 2**-53] * 3)):
        outcome = verify(Method.BLOCK, WrittenRows([same] * 4), (1, 2, 3), (SUPPORT,) * 3, draws)
        assert outcome.accepted_len == 3 and outcome.alpha_mean == 1.0


def test_candidates_come_with_their_probability_and_keys_of_their_own_and_more_continue_them() -> None:
    rows = WrittenRows([LIKELY, (0.4, 0.1, 0.3, 0.2), LIKELY], answers=(0, 2, 0, 3))
    outcome = verify(Method.CANDIDATES, rows, (1, 1), (SUPPORT,) * 2)
    assert (outcome.accepted_len, outcome.correction_kind) == (1, CorrectionKind.NONE)
    assert [c.token_id for c in outcome.candidates] == [0, 2, 0, 3]
    assert [c.target_prob for c in outcome.candidates] == pytest.approx([0.4, 0.3, 0.4, 0.2])
    assert rows.samples == [(1, NoiseKey(Purpose.CANDIDATE, START + 1, j), {}) for j in range(4)]
    rows = WrittenRows([(0.4, 0.1, 0.3, 0.2)])
    params = MethodParams(num_candidates=2)
    outcome = verify(Method.CANDIDATES, rows, (), candidates_from=4, params=params)
    assert (outcome.accepted_len, len(outcome.candidates)) == (0, 2)
    assert rows.samples == [(0, NoiseKey(Purpose.CANDIDATE, START, j), {}) for j in (4, 5)]


def choose(rows: WrittenRows, seed: int) -> Outcome:
    """What a co-located round does about its rejected token 1."""
    plain = a_round(Method.CANDIDATES, rows, (1,), (SUPPORT,), WrittenDraws(0.99))
    round_input = replace(plain, supports=(SUPPORT,))
    return choose_here(round_input, create_method(Method.CANDIDATES).verify(round_input), seed)


def test_the_choice_beside_the_target_is_the_one_an_edge_makes() -> None:
    row = (0.1, 0.3, 0.3, 0.3)
    num_asked = set()
    for seed in range(100):
        answers = [int(i) for i in np.random.default_rng(seed).choice(4, MAX_HERE, p=row)]
        rows = WrittenRows([row, LIKELY], answers)
        outcome = choose(rows, seed)
        candidates = [Candidate(token_id, row[token_id]) for token_id in answers]
        assert outcome.correction == choose_candidate(SUPPORT, candidates, seed, START, 0)
        assert outcome.correction_kind is CorrectionKind.CORRECTION and not outcome.candidates
        num_asked.add(len(rows.samples))
    assert {4, 8, 12} <= num_asked and all(n % NUM_CANDIDATES == 0 for n in num_asked)


def test_where_no_candidate_passes_for_long_the_residual_itself_is_sampled_with_an_unused_key() -> None:
    rows = WrittenRows([(0.3, 0.3, 0.2, 0.2), LIKELY], answers=(1,) * MAX_HERE + (9,))
    assert choose(rows, seed=0).correction == 9
    assert rows.samples[-1][1] == NoiseKey(Purpose.RESIDUAL, START, MAX_HERE)
    assert rows.last_weights() == pytest.approx([1, 0, 0, 0])


def test_the_exchange_of_the_protocols_page_comes_out_as_it_is_written_there() -> None:
    own_support = Support((311, 42, 7), (8192, 4915, 3277))
    probs = {5: 0.66, 42: 0.4, 311: 0.26, 9: 0.3, 7: 0.04}
    assert sample_support(own_support, first_word(42, Purpose.DRAFT, 17, 1)) == 7
    draws = KeyedDraws(42, 17)
    assert draws.accepts(probs[5] / 0.8, 0) and not draws.accepts(probs[7] / 0.2, 1)
    first = [Candidate(token_id, probs[token_id]) for token_id in (42, 311, 42, 311)]
    assert choose_candidate(own_support, first, 42, 18, 0) is None
    more = [Candidate(token_id, probs[token_id]) for token_id in (42, 9, 7, 42)]
    assert choose_candidate(own_support, more, 42, 18, 4) == 9


def test_approximate_methods_correct_from_the_target_or_without_the_rejected_token() -> None:
    row = (0.4, 0.1, 0.3, 0.2)
    for method in (Method.SHORTCUT, Method.THRESHOLD, Method.TYPICAL):
        rows = WrittenRows([row, LIKELY])
        params = MethodParams(typical_epsilon=0.5, typical_delta=1.0) if method is Method.TYPICAL else None
        outcome = verify(method, rows, (1,), (SUPPORT,), params=params)
        assert (outcome.accepted_len, outcome.correction) == (0, OWN) and not rows.samples, method
    rows = WrittenRows([row, LIKELY])
    assert verify(Method.SCALAR_RESIDUAL, rows, (1,), (SUPPORT,)).accepted_len == 0
    assert rows.last_weights() == pytest.approx([0.4 / 0.9, 0, 0.3 / 0.9, 0.2 / 0.9])


@pytest.mark.parametrize(
    ("prob", "params", "is_accepted"),
    [
        (0.3, MethodParams(), True),  # likely enough
        (0.26, MethodParams(), True),  # half of the draft's 0.5
        (0.24, MethodParams(), False),
        (0.24, MethodParams(threshold_pass=0.2), True),
        (0.24, MethodParams(threshold_ratio=0.4), True),
        (0.3, MethodParams(threshold_pass=0.9, threshold_ratio=1.0), False),
    ],
)
def test_threshold_asks_the_probability_or_the_ratio(
    prob: float, params: MethodParams, is_accepted: bool
) -> None:
    rows = WrittenRows([(1 - prob, prob, 0.0, 0.0), LIKELY])
    outcome = verify(Method.THRESHOLD, rows, (1,), (SUPPORT,), params=params)
    assert outcome.accepted_len == is_accepted


@pytest.mark.parametrize(
    ("row", "params", "is_accepted"),
    [
        ((0.5, 0.1, 0.2, 0.2), MethodParams(), True),  # above ε = 0.09
        ((0.5, 0.08, 0.21, 0.21), MethodParams(), False),  # below 0.3 e^−1.18 = 0.092 too
        ((0.25, 0.05, 0.35, 0.35), MethodParams(typical_delta=0.1), True),  # 0.1 e^−1.23 = 0.029
        ((0.97, 0.03, 0.0, 0.0), MethodParams(), False),
        ((0.97, 0.03, 0.0, 0.0), MethodParams(typical_epsilon=0.02), True),
    ],
)
def test_typical_lowers_its_bar_where_the_target_is_unsure(
    row: Sequence[float], params: MethodParams, is_accepted: bool
) -> None:
    outcome = verify(Method.TYPICAL, WrittenRows([row, LIKELY]), (1,), (SUPPORT,), params=params)
    assert outcome.accepted_len == is_accepted


def test_the_approximate_methods_are_named_so() -> None:
    assert [str(method) for method in Method if not method.is_exact] == [
        "shortcut",
        "scalar_residual",
        "threshold",
        "typical",
    ]
