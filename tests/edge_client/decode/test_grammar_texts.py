"""With a grammar the text is the target's own constrained one, whatever drafts and whatever fails, and obeys it."""

from __future__ import annotations

import pytest
from support.edge.engine_link import Chances, EngineLink
from support.edge.random_runs import FAULTS
from support.tiny_grammars import text_of, tiny, tiny_store
from test_pipelined_rounds import PROMPT, decode, make_backend, reference, whole_text

from outrider.common.errors import IncompatibleError, RoundFailedError
from outrider.common.grammar.state import state_of
from outrider.common.methods import drafts_trees
from outrider.common.types import FinishReason, Method, Origin, SamplingParams, StopParams
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import TokenizerFacts
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.drafting.union import UnionModel
from outrider.edge_client.session.session import SessionResult

LIST = r"\{([a-f]{2,4}[0-9]{1,3},)+\}"
STOP = StopParams(max_new_tokens=40)
NO_FAULTS, OUTAGE = Chances(), Chances(outage=0.3)


def write(
    faults: Chances = NO_FAULTS, pattern: str = LIST, seed: int = 1, **options: object
) -> SessionResult:
    link = EngineLink(make_backend(), faults, seed=seed, grammars=tiny_store())
    return decode(link, seed=seed, stop=STOP, grammar=tiny(pattern), **options)  # type: ignore[arg-type]


def assert_obeys(result: SessionResult, pattern: str = LIST) -> None:
    state = state_of(tiny(pattern))
    for token_id in result.token_ids:
        assert state.allows((), token_id), text_of(result.token_ids)
        state.extend([token_id])
    assert (result.finish_reason is FinishReason.STOP) is state.is_ended
    assert state.is_accepting or result.finish_reason is not FinishReason.STOP


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("faults", [Chances(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("tree", [None, TreeBudget(8, 4, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_text_is_the_targets_own_constrained_one(
    temperature: float, faults: Chances, tree: TreeBudget | None, seed: int
) -> None:
    result = write(faults, seed=seed, temperature=temperature, tree=tree)
    sampling = SamplingParams(temperature=temperature, seed=seed, grammar=tiny(LIST))
    assert [*PROMPT, *result.token_ids] == reference(sampling, STOP)
    assert_obeys(result)
    assert sum(each.num_accepted_tokens for each in result.stats.rounds) > 0


def remembering(seed: int) -> SuffixModel:
    """Knows a text that obeys the grammar, this one or one like it, and one that does not and begins alike."""
    model = SuffixModel(TokenizerFacts(32, ""), TextsByOwner("", 1000))
    for each in (seed, seed + 1):
        model.remember(
            whole_text(SamplingParams(temperature=0.8, seed=each, grammar=tiny(LIST))), len(PROMPT)
        )
    model.remember(whole_text(SamplingParams(temperature=0.8, seed=seed)), len(PROMPT))
    return model


@pytest.mark.parametrize("is_alone", [False, True], ids=["union", "suffix"])
@pytest.mark.parametrize("faults", [Chances(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copied_trees_too_leave_the_targets_own_constrained_text(
    temperature: float, faults: Chances, is_alone: bool
) -> None:
    copies, tree = remembering(2), TreeBudget(12, 5, 3, max_copied_depth=8)
    result = write(
        faults,
        seed=2,
        temperature=temperature,
        tree=tree,
        accuracy=0.3,
        join=lambda model: copies if is_alone else UnionModel(model, [copies]),
    )
    sampling = SamplingParams(temperature=temperature, seed=2, grammar=tiny(LIST))
    assert [*PROMPT, *result.token_ids] == reference(sampling, STOP)
    assert_obeys(result)
    assert any(each.main_path is not None for each in result.stats.rounds), "no tree was drafted"
    assert max(each.num_accepted_tokens for each in result.stats.rounds) > 1


@pytest.mark.parametrize("mode", [ExecutionMode.CLOUD_ONLY, ExecutionMode.SPECULATIVE])
def test_a_text_ends_where_its_grammar_does(mode: ExecutionMode) -> None:
    result = write(pattern="[a-c]{5}", mode=mode)
    assert result.finish_reason is FinishReason.STOP and result.token_ids[-1] == 0
    assert len(text_of(result.token_ids)) == 5


@pytest.mark.parametrize(
    ("method", "tree"),
    [(each, None) for each in Method]
    + [(each, TreeBudget(8, 4, 3)) for each in Method if drafts_trees(each)],
)
def test_with_every_method_the_text_obeys(method: Method, tree: TreeBudget | None) -> None:
    for seed in range(3):
        assert_obeys(write(method=method, seed=seed, tree=tree, accuracy=0.5))


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_tokens_that_are_kept_unverified_obey_too(policy: OnTimeout) -> None:
    origins = set[Origin]()
    for seed in range(6):
        result = write(OUTAGE, seed=seed, on_timeout=policy, accuracy=0.5)
        assert_obeys(result)
        origins |= set(result.origins)
    assert origins & {Origin.FALLBACK, Origin.EDGE_ONLY}


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
def test_reverified_the_text_is_the_targets_own_after_outages(policy: OnTimeout) -> None:
    for seed in range(3):
        result = write(OUTAGE, seed=seed, on_timeout=policy, is_reverified=True, accuracy=0.5)
        sampling = SamplingParams(temperature=0.8, seed=seed, grammar=tiny(LIST))
        assert [*PROMPT, *result.token_ids] == reference(sampling, STOP)


def test_a_verifier_without_grammars_refuses_by_name() -> None:
    link = EngineLink(make_backend(), Chances(), seed=1)
    with pytest.raises((RoundFailedError, IncompatibleError), match="no grammars"):
        decode(link, grammar=tiny(LIST))
