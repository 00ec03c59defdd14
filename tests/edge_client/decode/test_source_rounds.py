"""Drafts that copy, alone and beside a model: cloud-only's text, whatever is drafted, falls out or gets lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.edge.engine_link import Chances, EngineLink
from support.matrices import one_of
from test_pipelined_rounds import PROMPT, decode, make_backend, reference, whole_text
from test_same_text_everywhere import FAULTS

from outrider.common.types import Method, Origin, SamplingParams, StopParams
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import CopyModel, TokenizerFacts
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.staged import StagedModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.drafting.union import UnionModel

STOP = StopParams(50, ignore_eos=True)
TREE = TreeBudget(12, 5, 3)
FACTS = TokenizerFacts(32, "")


def make_suffix(seed: int = 1) -> SuffixModel:
    """Knows the text that another seed brought, which is like this one here and there."""
    model = SuffixModel(FACTS, TextsByOwner("", 1000))
    model.remember(whole_text(SamplingParams(temperature=0.8, seed=seed + 1)), len(PROMPT))
    model.remember(whole_text(SamplingParams(temperature=0.0, seed=seed)), len(PROMPT))
    return model


def alone(make: Callable[[], CopyModel]) -> Callable[[DraftModel], DraftModel]:
    return lambda _: make()


def beside(make: Callable[[], CopyModel]) -> Callable[[DraftModel], DraftModel]:
    return lambda model: UnionModel(model, [make()])


SOURCES = {
    "suffix": alone(make_suffix),
    "model+suffix": beside(make_suffix),
    "staged": lambda model: StagedModel(model, [make_suffix()]),
    "model+prompt-lookup": beside(lambda: PromptLookupModel(32, "")),
}


def check_same_text(source: str, faults: Chances, seed: int, **run: Any) -> EngineLink:
    link = EngineLink(make_backend(), faults, seed=seed)
    result = decode(link, seed=seed, stop=STOP, join=SOURCES[source], **run)
    sampling = SamplingParams(temperature=run.get("temperature", 0.8), seed=seed)
    assert [*PROMPT, *result.token_ids] == reference(sampling, STOP)
    assert result.num_unverified_tokens == 0
    return link


@pytest.mark.parametrize(("source", "window", "tree"), one_of(2, SOURCES, [1, 3], [None, TREE]), ids=str)
def test_every_source_writes_cloud_onlys_text_under_every_fault(
    source: str, window: int, tree: TreeBudget | None
) -> None:
    for seed, faults in enumerate(FAULTS.values(), start=3):
        temperature, second = (0.0, None) if seed % 2 else (0.8, 0.6)
        run = {"accuracy": 0.6, "temperature": temperature, "second": second}
        check_same_text(source, faults, seed, window=window, tree=tree, depth=6, **run)


@pytest.mark.parametrize("policy", [OnTimeout.FIRST_TOKEN, OnTimeout.EDGE_ONLY])
@pytest.mark.parametrize("source", SOURCES)
def test_tokens_that_were_kept_are_judged_again(source: str, policy: OnTimeout) -> None:
    num_kept = 0
    for seed in range(4):
        link = EngineLink(make_backend(), Chances(lose_answer=0.2, outage=0.1), seed=seed)
        tree = TREE if seed % 2 else None
        run: dict[str, Any] = {"tree": tree, "on_timeout": policy, "is_reverified": True}
        result = decode(link, seed=seed, stop=STOP, window=1, accuracy=0.6, join=SOURCES[source], **run)
        assert [*PROMPT, *result.token_ids] == reference(SamplingParams(temperature=0.8, seed=seed), STOP)
        num_kept += result.stats.num_timeouts
    assert num_kept


@pytest.mark.parametrize("method", [Method.SPARSE, Method.TYPICAL, Method.BLOCK])
@pytest.mark.parametrize("source", SOURCES)
def test_other_methods_end_their_text(source: str, method: Method) -> None:
    trees = [None] if method is Method.BLOCK else [None, TREE]
    for seed, tree in enumerate(trees):
        link = EngineLink(make_backend(), FAULTS["all"], seed=seed)
        result = decode(link, seed=seed, stop=STOP, method=method, tree=tree, join=SOURCES[source])
        assert len(result.token_ids) == 50 and result.num_unverified_tokens == 0


def test_alone_a_union_writes_what_its_model_does() -> None:
    """A copy is a fair guess at a target's token, and no text of the draft's."""
    sampling = SamplingParams(temperature=0.8, seed=2)
    link = EngineLink(make_backend(), Chances(), seed=2)
    run: dict[str, Any] = {"mode": ExecutionMode.EDGE_ONLY, "accuracy": 1.0, "depth": 8}
    result = decode(link, seed=2, stop=STOP, join=SOURCES["model+suffix"], **run)
    assert [*PROMPT, *result.token_ids] == list(whole_text(sampling)[: len(PROMPT) + 50])
    assert set(result.origins) == {Origin.EDGE_ONLY}


def test_a_text_that_was_written_before_is_copied_whole_and_only_its_owner_finds_it() -> None:
    texts = TextsByOwner("", 1000)
    model = SuffixModel(FACTS, texts, "one")

    def rounds(owner: str) -> int:
        link = EngineLink(make_backend(), Chances(), seed=7)
        result = decode(link, seed=7, stop=STOP, depth=16, window=1, join=lambda _: model.of_owner(owner))
        return len(result.stats.rounds)

    first, again, stranger = rounds("one"), rounds("one"), rounds("two")
    assert again <= 8 < 20 < first == stranger
