"""A draft that ends early, by what its own tokens were, leaves the text's law as it is: the token that ended
it is sent and judged like any other. So the depth policy `optimal` may stop at a token it doubts. (`coupled`
needs no proof: there the text does not depend on the draft.)"""

from unittest import mock

import pytest
from support.exact import enumeration
from support.exact.branching import LazyDraft, Rules
from support.exact.enumeration import max_error, target_law, total_variation, written_law
from support.exact.worlds import make_world

from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.common.types import Method, MethodParams

DOUBTED = 0.5  # a token the draft gives less than this is its last


class EndedDraft(LazyDraft):
    def num_tokens(self) -> int:
        for index in range(self._limit):
            if self.prob(index) < DOUBTED:
                return index + 1
        return self._limit


@pytest.mark.parametrize("kind", ["random", "mismatch"])
@pytest.mark.parametrize("method", [Method.SPARSE, Method.CANDIDATES, Method.BLOCK], ids=str)
def test_a_draft_ended_after_a_doubted_token_changes_no_probability(method: Method, kind: str) -> None:
    world = make_world(kind)
    rules = Rules(num_tokens=4, method_params=MethodParams(num_candidates=1))
    with mock.patch.object(enumeration, "LazyDraft", EndedDraft):
        law = written_law(create_method(method), world, rules)
    expected = target_law(world, rules)
    assert max_error(law, expected) < 1e-9 and total_variation(law, expected, 4) < 1e-9
