"""Traces: recorded from a draft, found by name, replayed where a draft proposes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.common.errors import UsageError
from outrider.common.sequences import common_prefix
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    NO_RANK,
    TextTrace,
    TraceSet,
    find_traces,
    save_traces,
    trace_text,
)
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.parts.drafts import TracedText
from outrider.experiments.simulator.run import play
from outrider.models import EMBEDDED

NUM_POSITIONS = 12
PROMPT = tuple(range(300, 320))


def test_a_trace_holds_what_drafting_anew_at_every_position_gives() -> None:
    sampling = SamplingParams(temperature=0.0, seed=1)
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        first = model.sequence(sampling)
        first.commit((*PROMPT, 400))
        text = [400, *first.propose(MAX_DEPTH).token_ids, *range(500, 520)]
        text[4] = (text[4] + 1) % 256  # runs of 3, 2, 1, 0, and what follows the other token
        trace = trace_text(model, PROMPT, tuple(text), sampling, NUM_POSITIONS)
        for position in range(NUM_POSITIONS):
            anew = model.sequence(sampling)
            anew.commit((*PROMPT, *text[: position + 1]))
            anew.keep_runner_ups()
            draft = anew.propose(MAX_DEPTH)
            assert trace.runs[position] == common_prefix(draft.token_ids, text[position + 1 :])
            told = np.exp([-signals.nll for signals in draft.signals])
            np.testing.assert_allclose(trace.confidences[position], told, atol=0.05)
            assert trace.gaps is not None and trace.gaps[position] == pytest.approx(
                draft.runner_ups[0].gap, abs=0.2
            )
    assert trace.runs[:4].tolist() == [3, 2, 1, 0] and trace.lengths is None
    assert trace.ranks is not None and trace.rank_gaps is not None and trace.gaps is not None
    assert ((trace.ranks == 0) == (trace.runs > 0)).all()
    assert ((trace.ranks == 1) == trace.seconds).all()
    np.testing.assert_allclose(trace.rank_gaps[:, 1], trace.gaps, atol=0.05)


def test_ranks_are_of_all_continuations_and_survive_the_file(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3)
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        sequence = model.sequence(sampling)
        text = [400]
        ranks = [0, 3, 7, NO_RANK, 1, 0]
        for rank in ranks:
            sequence.truncate(0)
            sequence.commit((*PROMPT, *text))
            told = sequence.propose_tree(TreeBudget(8, 1, 8), NodeValues()).continuations[0][0].token_ids
            others = (token_id for token_id in range(100) if token_id not in told)
            text.append(told[rank] if rank < len(told) else next(others))
        trace = trace_text(model, PROMPT, (*text, *range(MAX_DEPTH)), sampling, len(ranks))
    expected = [rank if rank < np.isfinite(gaps).sum() else NO_RANK
                for rank, gaps in zip(ranks, trace.rank_gaps, strict=True)]  # fmt: skip
    assert trace.ranks is not None and trace.ranks.tolist() == expected
    save_traces(tmp_path / "a.npz", [TraceSet("a", "recorded", (trace, trace))])
    read = find_traces("a", tmp_path).texts[1]
    assert read.ranks is not None and read.ranks.tolist() == expected
    np.testing.assert_allclose(read.rank_gaps, trace.rank_gaps, atol=0.02)


def test_places_of_the_prompt_are_compared_with_the_targets_choices_and_survive_the_file(
    tmp_path: Path,
) -> None:
    sampling, text = SamplingParams(temperature=0.8, seed=3), tuple(range(MAX_DEPTH + 2))
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        sequence = model.sequence(sampling)
        sequence.commit(PROMPT[:15])
        choices = list(sequence.propose_along(PROMPT[15:])[:-1])
        choices[1] += 1
        trace = trace_text(model, PROMPT, text, sampling, 1, tuple(choices))
        assert trace_text(model, PROMPT, text, sampling, 1).prompt is None
    assert trace.prompt is not None and trace.prompt.tolist() == [True, False, True, True, True]
    save_traces(tmp_path / "a.npz", [TraceSet("a", "recorded", (trace, trace))])
    read = find_traces("a", tmp_path).texts[1]
    assert read.prompt is not None and read.prompt.tolist() == trace.prompt.tolist()


def test_copies_have_lengths_and_no_confidences() -> None:
    model = PromptLookupModel(1000, "tokenizer")
    text = (1, 2, 3, 1, 2, 3, *[9] * MAX_DEPTH)
    trace = trace_text(model, (7, 8), text, SamplingParams(), 6)
    assert trace.lengths is not None and trace.lengths.tolist() == [0, 0, 0, *[MAX_DEPTH] * 3]
    assert trace.runs.tolist() == [0, 0, 0, 2, 1, 0]
    assert trace.confidences.shape == (6, 0) and trace.gaps is None


def test_where_a_draft_proposes_nothing_nothing_is_verified() -> None:
    lengths = np.array([0, MAX_DEPTH] * 20, np.uint8)
    trace = TextTrace(np.zeros(40, np.uint8), np.zeros((40, 0), np.float32), lengths=lengths)
    edges = {
        "link": {"rtt_ms": 10},
        "requests": 1,
        "output_tokens": 40,
        "edge": {"mode": "speculative", "pipeline": "off", "num_speculative_tokens": 3},
    }
    found = play(load_system({"times": "none", "edges": [edges]}), traces=[TracedText(trace)])
    total = figures_of(found).total
    assert total.num_tokens == 40
    assert 0 < total.num_draft_tokens <= 3 * 20


def test_traces_are_found_by_name_in_any_file_with_their_times(tmp_path: Path) -> None:
    text = TextTrace(np.array([3, 0], np.uint8), np.zeros((2, 0), np.float32))
    times = {"verifier": {"step_ms": 9.0}, "draft": {"token_ms": 0.2}}
    for name in ("a", "b"):
        save_traces(tmp_path / f"{name}.npz", [TraceSet(name, "recorded", (text,), times=times)])
    assert find_traces("b", tmp_path).times == times
    with pytest.raises(UsageError, match="no traces are called 'c'; there are: a, b"):
        find_traces("c", tmp_path)
