"""The stage `rrs` of `make bench-trees`: chances of nodes, as the method's own draws have them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.trees.rrs import chances
from outrider.cloud_verifier.verification.methods.base import RoundInput
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.tree import Tree, supports_by_row
from outrider.common.types import Method, MethodParams, SamplingParams, Support

TREE, TOKENS = Tree((-1, 0, 0, -1, 3)), (1, 2, 5, 4, 0)
SUPPORTS = (Support((1, 4, 3), (5, 3, 2)), Support((2, 5), (1, 1)), Support((0, 1), (3, 1)))
NUM_ROUNDS = 4000


def test_the_chances_of_nodes_are_how_often_they_are_accepted() -> None:
    logits = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
    supports = supports_by_row(TREE, SUPPORTS)
    counts = np.zeros(len(TOKENS))
    for seed in range(NUM_ROUNDS):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        rows = HostRows(logits, StepRound(sampling, 9, (), (), TOKENS, TREE, supports), (), 8)
        draws = KeyedDraws(seed, 9)
        each = RoundInput(rows, draws, 9, TOKENS, (), supports, frozenset(), MethodParams(), tree=TREE)
        counts[list(create_method(Method.SPARSE).verify(each).accepted_nodes)] += 1
    expected = chances(each)
    assert counts / NUM_ROUNDS == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(NUM_ROUNDS))
    assert expected[0] + expected[3] < 1 and expected[1] + expected[2] < expected[0]
