"""Every outcome of the first four tokens, summed: an exact method writes what the target alone would.

Methods run as they are, over at least two consecutive rounds: a round of two draft tokens commits three at most.
`make test-slow` has rounds of three and texts of five. Sums are exact but for float64: the noise of `coupled` is
integrated in closed form. What is measured of approximate methods and planted mistakes is printed: `pytest
tests/exactness/test_enumeration.py`.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import integrate
from support.exact.branching import Lazy, Rules, World
from support.exact.chance import race_probability
from support.exact.enumeration import max_error, target_law, total_variation, written_law
from support.exact.planted import Mistake, PlantedMethod, RedrawnCoupling
from support.exact.trees import BiasedSibling, BiasedTree, SameDraft, SameRemainder
from support.exact.worlds import KINDS, TOTAL_WEIGHT, VOCAB, make_world
from support.matrices import one_of

from outrider.cloud_verifier.verification.methods import sparse
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import KeyedDraws
from outrider.common.noise.draws import Purpose, uniform
from outrider.common.sampling.support import sample_support
from outrider.common.tree import Tree
from outrider.common.types import Candidate, Method, MethodParams, Support

EXACT = (Method.COUPLED, Method.SPARSE, Method.CANDIDATES, Method.BLOCK)
APPROXIMATE = (Method.SHORTCUT, Method.SCALAR_RESIDUAL, Method.THRESHOLD, Method.TYPICAL)
TOLERANCE = 1e-9
TWO_KINDS = ("truncated", pytest.param("alike", marks=pytest.mark.slow))
FULL = {"num_draft_tokens": 3, "num_tokens": 5}
in_two_sizes = pytest.mark.parametrize("size", [{}, pytest.param(FULL, marks=pytest.mark.slow, id="full")])
THREE_OR_FIVE = (3, pytest.param(5, marks=pytest.mark.slow))  # tokens, where the first one tells
LEAST_BIAS = 1e-3  # a mistake that is measured below this is not called detected


def rules_of(method, **fields):
    is_coupled = method in (Method.COUPLED, Method.TYPICAL)
    return Rules(is_coupled=is_coupled, **({"method_params": MethodParams(num_candidates=1)} | fields))


def check_exact(method, world, rules):
    law, expected = written_law(create_method(method), world, rules), target_law(world, rules)
    assert abs(math.fsum(law.values()) - 1) < TOLERANCE
    assert max_error(law, expected) < TOLERANCE
    assert total_variation(law, expected) < TOLERANCE


def bias(method, world, rules=None):
    """Total variation of the first token, of the first three and of the first five."""
    law, expected = written_law(method, world, rules), target_law(world, rules)
    return [total_variation(law, expected, num_tokens) for num_tokens in (1, 3, 5)]


@pytest.fixture
def show(note):
    def row(what, world, biases):
        note(f"{what:52} {world:10} tv {' '.join(f'{b:.5f}' for b in biases)}")

    return row


# ------------------------------------------------------------------------------------- exact methods

TREES = {"fork": (-1, -1), "branches": (-1, 0, -1, 2), "late": (-1, 0, 0), "wide": (-1, 0, 0, -1, 3, -1)}


@pytest.mark.parametrize(("parents", "kind"), one_of(2, TREES.values(), KINDS), ids=str)
def test_coupled_trees_write_the_targets_distribution(parents, kind):
    """Over two rounds at least: one commits at most three of the four tokens."""
    check_exact(Method.COUPLED, make_world(kind), rules_of(Method.COUPLED, parents=parents))


def test_trees_that_end_with_a_stop_id_are_the_targets_too():
    rules = rules_of(Method.COUPLED, parents=TREES["wide"], stop_ids=frozenset({1, 4}))
    check_exact(Method.COUPLED, make_world("mixed"), rules)


def test_a_sibling_that_is_taken_too_often_by_one_in_a_hundred_is_caught(show):
    rules, world = rules_of(Method.COUPLED, parents=TREES["branches"]), make_world("mixed")
    biases = bias(BiasedTree(0.01), world, rules)
    show("coupled trees, a sibling taken 1 % too often", "mixed", biases)
    assert biases[-1] > LEAST_BIAS
    assert max(bias(BiasedTree(0.0), world, rules)) < TOLERANCE


QUICK_KINDS = ("disjoint", "one_hot", "mismatch", "truncated", "mixed")
QUICK_FIRST = [each if each in QUICK_KINDS else pytest.param(each, marks=pytest.mark.slow) for each in KINDS]


@pytest.mark.parametrize("kind", QUICK_FIRST)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_sparse_trees_write_the_targets_distribution(parents, kind):
    check_exact(Method.SPARSE, make_world(kind), rules_of(Method.SPARSE, parents=parents))


@pytest.mark.parametrize("fields", [{"stop_ids": frozenset({1, 4})}, {"is_pipelined": True}], ids=str)
def test_sparse_trees_that_end_early_or_without_a_bonus_are_the_targets_too(fields):
    rules = rules_of(Method.SPARSE, parents=TREES["wide"], **fields)
    check_exact(Method.SPARSE, make_world("mixed", 1), rules)


def grows_by_what_is_drawn(tree, node, number):
    """Another child where those before it, and what was drawn after them, have an even sum."""
    siblings = [n for n, p in enumerate(tree.tree.parents) if p == node][:number]
    below = [n for n, p in enumerate(tree.tree.parents) if p in siblings][:1]
    return sum(tree.token(each) for each in (*siblings, *below)) % 2 == 0


def drops_what_it_drew(tree, node, number):
    """A child after the first is left out where its own id is odd."""
    own = [n for n, p in enumerate(tree.tree.parents) if p == node][number]
    return number == 0 or tree.token(own) % 2 == 0


@pytest.mark.parametrize(
    ("kind", "left_out_of"),
    [
        ("mixed", "branches"),
        *(pytest.param(each, "wide", marks=pytest.mark.slow) for each in ("mixed", "truncated")),
    ],
)
def test_a_sparse_tree_may_grow_by_what_is_drawn_but_not_leave_out_a_child_for_what_it_is(
    kind, left_out_of, show
):
    rules = rules_of(Method.SPARSE, parents=TREES["wide"], grow=grows_by_what_is_drawn)
    check_exact(Method.SPARSE, make_world(kind), rules)
    rules = rules_of(Method.SPARSE, parents=TREES[left_out_of], grow=drops_what_it_drew)
    biases = bias(create_method(Method.SPARSE), make_world(kind), rules)
    show("sparse trees: a drawn child left out for what it is", kind, biases)
    assert biases[-1] > LEAST_BIAS


def test_a_sibling_of_a_sparse_tree_that_is_accepted_too_often_by_one_in_a_hundred_is_caught(show):
    rules, world = rules_of(Method.SPARSE, parents=TREES["wide"]), make_world("mixed")
    biases = bias(BiasedSibling(create_method(Method.SPARSE), 0.01), world, rules)
    show("sparse trees, a sibling accepted 1 % too often", "mixed", biases)
    assert biases[-1] > LEAST_BIAS
    assert max(bias(BiasedSibling(create_method(Method.SPARSE), 0.0), world, rules)) < TOLERANCE


@pytest.mark.parametrize("mistake", [SameRemainder, SameDraft], ids=["p", "q"])
def test_a_sibling_judged_as_if_none_were_rejected_is_caught(mistake, show, monkeypatch):
    monkeypatch.setattr(sparse, "Remainder", mistake)
    rules = rules_of(Method.SPARSE, parents=TREES["wide"])
    biases = bias(create_method(Method.SPARSE), make_world("mixed"), rules)
    show(f"sparse trees: {mistake.__name__}", "mixed", biases)
    assert biases[-1] > LEAST_BIAS


def test_one_coin_for_all_siblings_is_caught(show):
    tree = Tree(TREES["wide"])
    rules = rules_of(
        Method.SPARSE,
        parents=TREES["wide"],
        coin_key=lambda start, node: (Purpose.ACCEPT, start, tree.depths[node]),
    )
    biases = bias(create_method(Method.SPARSE), make_world("mixed"), rules)
    show("sparse trees: one coin a depth", "mixed", biases)
    assert biases[-1] > LEAST_BIAS


@pytest.mark.parametrize(("method", "kind"), one_of(2, EXACT, KINDS))
def test_an_exact_method_writes_the_targets_distribution(method, kind):
    check_exact(method, make_world(kind), rules_of(method))


@pytest.mark.parametrize("num_draft_tokens", [1, 2])
@pytest.mark.parametrize("method", EXACT)
def test_shorter_drafts_make_more_rounds_and_the_same_distribution(method, num_draft_tokens):
    for kind in ("mixed", "truncated"):
        rules = rules_of(method, num_draft_tokens=num_draft_tokens, num_tokens=4)
        check_exact(method, make_world(kind, 1), rules)


@pytest.mark.parametrize("method", EXACT[1:])
def test_a_pipelined_round_without_a_bonus_changes_nothing(method):
    rules = rules_of(method, is_pipelined=True, num_draft_tokens=2, num_tokens=4)
    check_exact(method, make_world("mixed", 2), rules)


@pytest.mark.parametrize("method", EXACT)
def test_texts_that_end_with_a_stop_id_are_the_targets_too(method):
    rules = rules_of(method, stop_ids=frozenset({1, 4}))
    for kind in ("mixed", "truncated"):
        check_exact(method, make_world(kind, 3), rules)


@pytest.mark.parametrize(
    ("num_candidates", "num_draft_tokens"), [(2, 3), (3, 1), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_any_number_of_candidates_is_exact(num_candidates, num_draft_tokens):
    params = MethodParams(num_candidates=num_candidates)
    rules = Rules(method_params=params, num_draft_tokens=num_draft_tokens, num_tokens=3)
    check_exact(Method.CANDIDATES, make_world("truncated", 4), rules)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_over_more_worlds(method, kind, seed):
    check_exact(method, make_world(kind, seed), rules_of(method, **FULL))
    if method is not Method.COUPLED and kind in ("mixed", "truncated", "deterministic"):
        check_exact(method, make_world(kind, seed), rules_of(method, is_pipelined=True, **FULL))


def test_candidates_are_exact_but_for_float32_on_the_wire():
    """q goes up and p comes down as float32, which costs less than anybody can measure."""

    class OnTheWire:
        def verify(self, round_input):
            probs = round_input.draft_probs
            carried = Lazy(lambda: len(probs), lambda i: float(np.float32(probs[i])))
            outcome = create_method(Method.CANDIDATES).verify(
                dataclasses.replace(round_input, draft_probs=carried)
            )
            down = tuple(Candidate(c.token_id, float(np.float32(c.target_prob))) for c in outcome.candidates)
            return dataclasses.replace(outcome, candidates=down)

    assert bias(OnTheWire(), make_world("mixed"), rules_of(Method.CANDIDATES))[-1] < 2e-7


# ------------------------------------------------------------------------------ who must be trusted


def lying(world, power):
    """Draws from q^power while it says q."""

    def drafted(text):
        support = world.support(text)
        weights = np.array(support.weights) / sum(support.weights)
        flat = weights**power
        return Support(support.token_ids, tuple(int(w) for w in np.ceil(flat / flat.sum() * TOTAL_WEIGHT)))

    return dataclasses.replace(world, drafted=drafted)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("kind", TWO_KINDS)
@in_two_sizes
def test_a_draft_that_lies_about_q_biases_all_but_coupled(method, kind, size, show):
    world = lying(make_world(kind), 0.5)
    rules = rules_of(method, **size)
    if method is Method.COUPLED:
        check_exact(method, world, rules)
    else:
        biases = bias(create_method(method), world, rules)
        assert biases[0] > LEAST_BIAS
        show(f"{method}: drafted at twice the temperature of q", kind, biases)


@pytest.mark.parametrize("num_tokens", THREE_OR_FIVE)
def test_a_draft_that_lies_within_the_rounding_of_its_weights_is_told_apart_too(num_tokens, show):
    """Drawn from unrounded probabilities while the weights are sent: why the draft is drawn from integers."""
    exact = make_world("alike")

    def unrounded(text):
        return exact.support(text)

    def sent(text):  # weights of a sum of 2^6: rounding large enough to print
        support = exact.support(text)
        total = sum(support.weights)
        return Support(support.token_ids, tuple(max(1, round(64 * w / total)) for w in support.weights))

    world, rules = World(exact.target, sent, unrounded), Rules(num_tokens=num_tokens)
    biases = bias(create_method(Method.SPARSE), world, rules)
    assert biases[0] > LEAST_BIAS
    show("sparse: weights rounded to 1/64 after the draft was drawn", "alike", biases)


# ------------------------------------------------------------------------------- planted mistakes


def test_the_textbook_sampler_is_exact_under_this_enumeration():
    for kind in ("mixed", "truncated"):
        assert bias(PlantedMethod(), make_world(kind))[-1] < TOLERANCE


@pytest.mark.parametrize("mistake", list(Mistake)[1:])
@pytest.mark.parametrize("kind", TWO_KINDS)
@in_two_sizes
def test_a_planted_mistake_is_detected(mistake, kind, size, show):
    biases = bias(PlantedMethod(mistake), make_world(kind), Rules(**size))
    assert biases[-1] > LEAST_BIAS
    show(mistake, kind, biases)


@pytest.mark.parametrize("num_tokens", THREE_OR_FIVE)
def test_a_correction_redrawn_with_other_noise_is_detected(num_tokens, show):
    rules = rules_of(Method.COUPLED, num_tokens=num_tokens)
    biases = bias(RedrawnCoupling(), make_world("alike"), rules)
    assert biases[0] > LEAST_BIAS
    show("coupled: a correction drawn again", "alike", biases)


@pytest.mark.parametrize("kind", TWO_KINDS)
@in_two_sizes
def test_a_gate_that_drops_the_token_it_saw_is_detected(kind, size, show):
    """Ending the draft before an unlikely token that was drawn: what stands then was chosen by the draw."""

    def is_unlikely(support, token_id):
        return support.weights[support.token_ids.index(token_id)] < 0.2 * sum(support.weights)

    biases = bias(create_method(Method.SPARSE), make_world(kind), Rules(is_cut=is_unlikely, **size))
    assert biases[-1] > LEAST_BIAS
    show("sparse: an NLL gate that drops the sampled token", kind, biases)


@pytest.mark.parametrize(("method", "kind"), one_of(2, EXACT[1:], KINDS))
def test_a_draft_that_a_grammar_cuts_leaves_the_targets_distribution(method, kind):
    """Where it is cut depends on the very tokens that are judged, to which `coupled` alone is indifferent."""
    for num_tokens in (3, 4):
        rules = rules_of(method, is_costly=lambda text: sum(text) % 3 == 1, num_tokens=num_tokens)
        check_exact(method, make_world(kind), rules)


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_drawn_tree_that_a_grammar_cuts_leaves_the_targets_distribution(parents):
    rules = rules_of(Method.SPARSE, parents=parents, is_costly=lambda text: sum(text) % 3 == 1, num_tokens=3)
    check_exact(Method.SPARSE, make_world("truncated"), rules)


def test_coins_reused_every_round_are_detected(show):
    for method, kind in itertools.product((Method.SPARSE, Method.BLOCK), ("truncated", "deterministic")):
        rules = Rules(coin_key=lambda start, offset: (Purpose.ACCEPT, math.inf, offset))
        biases = bias(create_method(method), make_world(kind), rules)
        assert biases[0] < TOLERANCE and biases[-1] > LEAST_BIAS
        show(f"{method}: the same draws in every round", kind, biases)


def by_position_alone(start, offset):
    return (Purpose.ACCEPT, start + offset, 0)


def test_block_keyed_by_position_alone_is_biased_from_the_second_token_on(show):
    for kind in ("truncated", "deterministic"):
        rules = Rules(coin_key=by_position_alone)
        biases = bias(create_method(Method.BLOCK), make_world(kind), rules)
        assert biases[0] < TOLERANCE, "the first token cannot show it"
        assert 0.01 < biases[1] < 0.1
        show("block: draws keyed by position alone", kind, biases)


def test_rejection_in_order_would_bear_keys_by_position_alone():
    """A coin at a position decides about that position, which then is committed: nobody asks again."""
    rules = Rules(coin_key=by_position_alone)
    for kind in ("truncated", "mixed"):
        assert bias(create_method(Method.SPARSE), make_world(kind), rules)[-1] < TOLERANCE


# ---------------------------------------------------------------------------- approximate methods


@pytest.mark.parametrize("method", APPROXIMATE)
@pytest.mark.parametrize("kind", TWO_KINDS)
@in_two_sizes
def test_an_approximate_method_is_off_by_what_is_printed(method, kind, size, show):
    assert not method.is_exact
    biases = bias(create_method(method), make_world(kind), rules_of(method, **size))
    assert biases[-1] > LEAST_BIAS
    show(f"{method} (approximate)", kind, biases)


def test_without_chance_in_the_draft_the_scalar_residual_is_all_of_it():
    world = make_world("deterministic")
    assert bias(create_method(Method.SCALAR_RESIDUAL), world)[-1] < TOLERANCE
    assert bias(create_method(Method.SHORTCUT), world)[0] > LEAST_BIAS


def test_the_exact_methods_are_those_that_say_so():
    assert tuple(method for method in Method if method.is_exact) == EXACT


# ----------------------------------------------------------------- what the enumeration stands on


def test_the_joint_law_of_two_races_is_what_an_integral_gives():
    rng, num_compared = np.random.default_rng(5), 0
    for _ in range(40):
        p, q = (rng.dirichlet([0.7] * VOCAB) * (rng.random(VOCAB) < 0.8) + 1e-9 * np.eye(6)[5] for _ in "pq")
        races = [[((tuple(p), a), (tuple(q), b)) for b in range(6)] for a in range(6)]
        joint = np.array([[race_probability(each) for each in row] for row in races])
        assert np.allclose(joint.sum(axis=1), p / p.sum(), rtol=0, atol=1e-12)
        assert np.allclose(joint.sum(axis=0), q / q.sum(), rtol=0, atol=1e-12)
        a, b = int(p.argmax()), 5

        others = [j for j in range(6) if j not in (a, b)]

        def density(t, p=p, q=q, a=a, b=b, others=others):  # of E_b / E_a = t, a winning by p and b by q
            return (1 + t + sum(max(p[j] / p[a], q[j] / q[b] * t) for j in others)) ** -2

        start, stop = p[b] / p[a], q[b] / q[a] if q[a] else math.inf
        if a != b and start < stop:
            kinks = [p[j] / p[a] / (q[j] / q[b]) for j in others if q[j]]
            edges = [start, *sorted(t for t in kinks if start < t < stop), stop]
            pieces = [integrate.quad(density, *piece, epsabs=1e-13)[0] for piece in itertools.pairwise(edges)]
            assert abs(joint[a, b] - sum(pieces)) < TOLERANCE
            num_compared += 1
    assert num_compared > 5


def test_a_support_is_sampled_by_the_exact_shares_of_all_words():
    support = Support((9, 3, 70, 4), (9000, 5000, 2000, 383))
    below, total = 0, sum(support.weights)
    for token_id, weight in zip(support.token_ids, support.weights, strict=True):
        first = -(-below * 2**64 // total)
        below += weight
        last = -(-below * 2**64 // total) - 1
        assert sample_support(support, first) == sample_support(support, last) == token_id


def test_the_products_coins_have_the_key_that_is_enumerated():
    for seed, start, offset in itertools.product((1, 2**64 - 1), (2, 9), (0, 1, 7)):
        number = uniform(seed, start, offset, Purpose.ACCEPT)
        draws = KeyedDraws(seed, start)
        assert not draws.accepts(number, offset) and draws.accepts(math.nextafter(number, 1), offset)
