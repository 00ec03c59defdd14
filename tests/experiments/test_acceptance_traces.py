"""Traces: recorded from a draft, found by name, replayed where a draft proposes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.common.errors import UsageError
from outrider.common.sequences import common_prefix
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.prompt_lookup import PromptLookupModel
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
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
