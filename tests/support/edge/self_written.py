"""Texts that a draft writes by itself, so that it is right about every token."""

from __future__ import annotations

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.base import DraftModel
from outrider.training.judge.target_text import WrittenText


def self_written(model: DraftModel, temperature: float, num_new: int) -> WrittenText:
    """Returns what the draft proposes after a short prompt."""
    sampling, prompt = SamplingParams(temperature=temperature, seed=5), (3, 4, 5)
    sequence = model.sequence(sampling)
    sequence.commit(prompt)
    return WrittenText(prompt, sequence.propose(num_new).token_ids, sampling)
