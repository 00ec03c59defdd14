"""With a grammar the text is the target's own constrained one, whatever drafts and whatever fails, and obeys it."""

from __future__ import annotations

import itertools
import time

import pytest
from support.edge.engine_link import Chances, EngineLink
from support.edge.knowing_draft import KnowingDraft
from support.edge.random_runs import FAULTS
from support.tiny_grammars import cost_by_path, text_of, tiny, tiny_store, tiny_vocabulary
from test_pipelined_rounds import PROMPT, decode, make_backend, reference, whole_text

from outrider.common.errors import IncompatibleError, RoundFailedError
from outrider.common.grammar.state import GrammarBounds, GrammarLimitError, state_of
from outrider.common.methods import drafts_trees
from outrider.common.types import (
    CorrectionKind,
    FinishReason,
    Grammar,
    GrammarKind,
    Method,
    Origin,
    SamplingParams,
    StopParams,
    Verdict,
)
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.base import DraftModel, Stop
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import TokenizerFacts
from outrider.edge_client.drafting.copying.suffix import SuffixModel
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.drafting.union import UnionModel
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.thresholds import GateThresholds
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

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


@pytest.mark.parametrize("faults", [Chances(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize(
    ("method", "tree"),
    [(each, None) for each in Method if each.is_exact]
    + [(each, TreeBudget(8, 4, 3)) for each in Method if each.is_exact and drafts_trees(each)],
)
def test_masks_that_drafts_alone_need_change_no_text(
    method: Method, tree: TreeBudget | None, faults: Chances, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(SamplingParams(temperature=0.0, seed=1, grammar=tiny(LIST)), STOP)
    cost_by_path(monkeypatch, lambda path: 0.03)  # cloud-only has the time for one, a round not for two
    link = EngineLink(make_backend(), faults, seed=1, grammars=tiny_store())
    result = decode(
        link, seed=1, temperature=0.0, stop=STOP, grammar=tiny(LIST), method=method, tree=tree, accuracy=1.0
    )
    assert [*PROMPT, *result.token_ids] == expected
    verdicts = [each for each in link.replies if isinstance(each, Verdict) and not each.candidates]
    assert any(each.accepted_len and each.correction_kind is CorrectionKind.NONE for each in verdicts)


@pytest.mark.parametrize("budget_s", [0.05, 0.01], ids=["two masks a draft", "none"])
@pytest.mark.parametrize("tree", [None, TreeBudget(8, 4, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("method", [Method.COUPLED, Method.SPARSE])
def test_a_draft_ends_where_its_masks_take_too_much_and_the_text_goes_on(
    method: Method, tree: TreeBudget | None, budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(SamplingParams(temperature=0.0, seed=1, grammar=tiny(LIST)), STOP)
    bounded = tiny_vocabulary().compile(Grammar(GrammarKind.REGEX, LIST), GrammarBounds(budget_s))
    cost_by_path(monkeypatch, lambda path: 0.02)
    link = EngineLink(make_backend(), grammars=tiny_store())
    result = decode(
        link,
        depth=4,
        seed=1,
        temperature=0.0,
        stop=STOP,
        grammar=tiny(LIST),
        method=method,
        tree=tree,
        join=lambda _: KnowingDraft(bounded),
    )
    assert [*PROMPT, *result.token_ids] == expected
    drafted = {len(each.draft_tokens) for each in link.sent}
    assert max(drafted) > 0 if budget_s == 0.05 else drafted == {0}
    assert tree is not None or max(drafted) <= 2


def test_what_is_checked_of_a_draft_in_a_rounds_time_is_kept_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = whole_text(SamplingParams(temperature=0.0, seed=1, grammar=tiny(LIST)))[: len(PROMPT) + 6]
    bounded = tiny_vocabulary().compile(Grammar(GrammarKind.REGEX, LIST), GrammarBounds(0.05))
    sampling = SamplingParams(temperature=0.0, seed=1, grammar=bounded)
    drafter = Drafter(KnowingDraft(tiny(LIST)), sampling, len(PROMPT))
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 0.01).__next__)
    for _ in range(3):  # each has a round's time
        assert 0 < drafter.num_obeying(PROMPT, text[len(PROMPT) :]) < 6
        assert 0 < len(drafter.propose(PROMPT, 6)[0].token_ids) < 6
        tree, _ = drafter.propose_tree(PROMPT, TreeBudget(8, 8, 1), NodeValues())
        assert 0 < len(tree.token_ids) < 8


@pytest.mark.parametrize("cost_s", [0.02, 0.06])
def test_alone_an_edge_writes_as_far_as_each_tokens_mask_has_a_rounds_time(
    cost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = tiny_vocabulary().compile(Grammar(GrammarKind.REGEX, LIST), GrammarBounds(0.05))
    sampling = SamplingParams(temperature=0.0, seed=1, grammar=bounded)
    options = SessionOptions(sampling=sampling, stop=STOP, mode=ExecutionMode.EDGE_ONLY)
    draft = KnowingDraft(bounded)
    session = EdgeSession(PROMPT, options, decode=lambda _: "", draft=draft, depth=FixedDepth(8))
    expected = reference(SamplingParams(temperature=0.0, seed=1, grammar=tiny(LIST)), STOP)
    cost_by_path(monkeypatch, lambda path: cost_s)
    if cost_s < 0.05:
        list(session.generate())
        assert [*PROMPT, *session.result.token_ids] == expected
    else:
        with pytest.raises(GrammarLimitError, match="60 ms in one round"):
            list(session.generate())


# The ids of "b", "c", "ab" and "cd": after "a" they leave nothing of the grammar.
PATTERN, WORDS = "a[bc]d", ((2,), (3,), (28,), (31,))


@pytest.mark.parametrize("has_copies", [False, True], ids=["model", "model+suffix"])
@pytest.mark.parametrize("words", [WORDS, (*WORDS, (0,))], ids=["end allowed", "end a bad word too"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "mode", [ExecutionMode.EDGE_ONLY, ExecutionMode.SPECULATIVE, ExecutionMode.CLOUD_ONLY]
)
def test_where_bad_words_leave_nothing_of_a_grammar_the_text_ends_in_every_mode(
    mode: ExecutionMode, temperature: float, words: tuple[tuple[int, ...], ...], has_copies: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1, grammar=tiny(PATTERN), bad_words=words)
    assert text_of([28, 31]) == "abcd" and reference(sampling, STOP) == [*PROMPT, 1, 0]
    options = SessionOptions(sampling=sampling, stop=STOP, mode=mode)
    draft: DraftModel = KnowingDraft()
    if has_copies:
        draft = UnionModel(draft, [remembering(2)])
    link = EngineLink(make_backend(), grammars=tiny_store())
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        is_patient=True,
        clock=link.clock,
        threads=link.threads,
    )
    session = EdgeSession(
        PROMPT,
        options,
        decode=lambda _: "",
        draft=draft if mode.has_draft or mode is ExecutionMode.EDGE_ONLY else None,
        verifier=None if mode is ExecutionMode.EDGE_ONLY else verifier,
        depth=FixedDepth(4),
    )
    list(session.generate())
    assert session.result.token_ids == (1, 0)
    assert session.result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_support", [0, 4])
def test_trees_too_end_where_bad_words_leave_nothing_of_a_grammar(num_support: int) -> None:
    sampling = SamplingParams(temperature=0.8, seed=1, grammar=tiny(PATTERN), bad_words=WORDS)
    sequence = KnowingDraft().sequence(sampling, num_prompt_tokens=3, num_support=num_support)
    sequence.commit(PROMPT)
    tree = sequence.propose_tree(TreeBudget(4, 2, 2), NodeValues())
    assert tree.token_ids[:2] == (1, 0) and set(tree.token_ids) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trees_signals_are_those_of_a_chain_and_of_what_the_grammar_leaves(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1, grammar=tiny(r"\{[a-f]{2},[0-9]\}"))
    sequence = KnowingDraft().sequence(sampling, num_prompt_tokens=3)
    sequence.commit(PROMPT)
    chain = sequence.propose(5)
    tree = sequence.propose_tree(TreeBudget(5, 5, 1), NodeValues(), lambda path, signals: Stop.NO)
    assert tree.token_ids == chain.token_ids and text_of(chain.token_ids[:1]) == "{"
    for ours, theirs in zip(tree.signals, chain.signals, strict=True):
        assert (ours.entropy_bits, ours.nll, ours.margin) == pytest.approx(
            (theirs.entropy_bits, theirs.nll, theirs.margin), abs=1e-5
        )
    assert (tree.signals[0].entropy_bits, tree.signals[0].nll, tree.signals[0].margin) == (0, 0, 1)


@pytest.mark.parametrize("thresholds", [GateThresholds(nll=0.01), GateThresholds(0.01, 0.01, 0.99)])
def test_a_gate_ends_no_path_where_the_grammar_forces_a_token(thresholds: GateThresholds) -> None:
    sampling = SamplingParams(temperature=0.0, grammar=tiny("a0c3e"))
    sequence = KnowingDraft().sequence(sampling, num_prompt_tokens=3)
    sequence.commit(PROMPT)
    gate = Gate(GateSettings(GateUse.STOP, thresholds))
    tree = sequence.propose_tree(TreeBudget(8, 8, 2), NodeValues(), gate.node_rule(PROMPT))
    chain = sequence.propose(8, gate.stop_rule(PROMPT))
    assert text_of(tree.token_ids[:5]) == text_of(chain.token_ids[:5]) == "a0c3e"
