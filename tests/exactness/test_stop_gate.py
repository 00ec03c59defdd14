"""A stop-gate leaves the text's law as it is: the product's own stop rule ends the drafts of every round, and
all outcomes of whole texts are summed. A draft ends before a position that is doubted, and after a token."""

import math
from unittest import mock

import pytest
from support.exact import enumeration
from support.exact.branching import LazyDraft, Rules
from support.exact.enumeration import max_error, target_law, total_variation, written_law
from support.exact.worlds import make_world
from support.matrices import one_of

from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.common.types import Method, MethodParams, Signals, Support
from outrider.edge_client.drafting.base import Stop
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.thresholds import GateThresholds

TOLERANCE = 1e-9
METHODS = (Method.COUPLED, Method.SPARSE, Method.CANDIDATES, Method.BLOCK)


class EvenTokens:
    """A text rule: of the block's tokens those with an even id are for the target."""

    def hard_tokens(self, block):
        return {index for index, token_id in enumerate(block.token_ids) if token_id % 2 == 0}


def letters(prompt_ids=None):
    return chr


GATES = {
    "entropy": GateSettings(GateUse.STOP, GateThresholds(entropy=1.8)),
    "margin": GateSettings(GateUse.STOP, GateThresholds(margin=0.15)),
    "nll": GateSettings(GateUse.STOP, GateThresholds(nll=0.7)),
    "all of them": GateSettings(
        GateUse.STOP, GateThresholds(nll=1.0, entropy=2.1, margin=0.05, variance=0.062), max_hard_ratio=0.4
    ),
    "a text rule": GateSettings(GateUse.STOP, GateThresholds(), rules=(EvenTokens(),)),
}

WHERE = {
    "entropy": {"first", "before"},
    "margin": {"first", "before"},
    "nll": {"after"},
    "all of them": {"first", "before", "after"},
    "a text rule": {"after"},
}


def signals_of(support: Support, token_id: int) -> Signals:
    probs = sorted((weight / sum(support.weights) for weight in support.weights), reverse=True)
    entropy = -sum(p * math.log2(p) for p in probs if p > 0)
    prob = support.weights[support.token_ids.index(token_id)] / sum(support.weights)
    margin = probs[0] - (probs[1] if len(probs) > 1 else 0.0)
    return Signals(entropy, -math.log(prob), margin, variance=probs[0] * (1 - probs[0]) / 4)


def gated(gate: Gate, ends: list[str], *, is_dropping: bool = False) -> type[LazyDraft]:
    """Drafts that the gate ends; `ends` is told where they did. `is_dropping`: always before the token."""

    class GatedDraft(LazyDraft):
        def num_tokens(self) -> int:
            should_stop = gate.stop_rule(self._text)
            assert should_stop is not None
            for index in range(self._limit):
                token_id = self.token(index)
                stop = should_stop(token_id, signals_of(self.support(index), token_id), index + 1)
                if stop is not Stop.NO:
                    ends.append("first" if stop is Stop.BEFORE and index == 0 else stop.value)
                    return index + (stop is Stop.AFTER and not is_dropping)
            return self._limit

    return GatedDraft


def written(method: Method, settings: GateSettings, is_pipelined: bool = False) -> tuple[float, set[str]]:
    """How far the law is from the target's, and where drafts ended. With `coupled` the draft is any draft:
    its own noise is in the tests of sessions."""
    rules = Rules(3, 2, is_pipelined=is_pipelined, method_params=MethodParams(num_candidates=1))
    world, ends = make_world("random"), list[str]()
    with mock.patch.object(enumeration, "LazyDraft", gated(Gate(settings, letters), ends)):
        law = written_law(create_method(method), world, rules)
    return max_error(law, target_law(world, rules)), set(ends)


@pytest.mark.parametrize(("method", "name"), one_of(2, METHODS, GATES), ids=str)
def test_drafts_that_a_gate_ends_change_no_probability(method: Method, name: str) -> None:
    error, ends = written(method, GATES[name])
    assert error < TOLERANCE
    assert ends == WHERE[name]


@pytest.mark.parametrize("method", METHODS[1:], ids=str)
def test_nor_do_they_where_rounds_are_pipelined(method: Method) -> None:
    error, ends = written(method, GATES["nll"], is_pipelined=True)
    assert error < TOLERANCE and ends == {"after"}


def test_a_gate_that_dropped_the_token_it_judged_would_be_noticed() -> None:
    rules, world = Rules(3, 2), make_world("alike")
    with mock.patch.object(enumeration, "LazyDraft", gated(Gate(GATES["nll"]), [], is_dropping=True)):
        law = written_law(create_method(Method.SPARSE), world, rules)
    assert total_variation(law, target_law(world, rules), 3) > 0.01
