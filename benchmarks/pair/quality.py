"""Measures a pair's texts: held-out loss, agreement, overlap, loops, and whether greedy code parses."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.common.types import FinishReason
from outrider.edge_client.session.session import SessionResult
from outrider.training.common.metrics import overlap
from outrider.training.data.corpus import read_held_out
from outrider.training.data.functions import first_function, is_python
from outrider.training.data.streams import Tokens
from outrider.training.judge.evaluate import Evaluator


def held_out_figures(evaluator: Evaluator, max_files: int | None = None) -> dict[str, Any]:
    """Returns teacher-forced figures on the held-out files as this installation has them, at most
    `max_files`."""
    paths = sysconfig.get_paths()
    texts = dict(list(read_held_out(Path(paths["stdlib"]), Path(paths["purelib"])).items())[:max_files])
    files: dict[str, Tokens] = {}
    bytes_per_token = {}
    for name, text in texts.items():
        ids = evaluator.tokenizer.encode(text).ids
        files[name] = np.asarray([0, *ids], np.uint16)  # behind the separator, as in training
        bytes_per_token[name] = len(text.encode()) / len(ids)
    return {"num_files": len(files), **evaluator.held_out(files, bytes_per_token)}


def sampled_overlap(
    evaluator: Evaluator,
    prompts_ids: Sequence[Sequence[int]],
    texts: Sequence[SessionResult],
    temperature: float,
) -> float:
    """Returns the mean Σ min(target, draft) over the tokens of texts that the target wrote at
    `temperature`."""
    means, lengths = [], []
    for prompt_ids, text in zip(prompts_ids, texts, strict=True):
        count = len(text.token_ids)
        ids = np.asarray([*prompt_ids, *text.token_ids[:-1]], np.int64)
        target, draft = evaluator.target_logits(ids)[-count:], evaluator.draft.logits(ids)[-count:]
        means.append(overlap(target, draft, temperature))
        lengths.append(count)
    return float(np.average(means, weights=lengths))


@dataclass(frozen=True, slots=True)
class _ParseFigures:
    num_parsed: int
    num_cut_off: int  # the function did not end within the tokens there were
    num_prompts: int


def parse_figures(prompts: Sequence[str], texts: Sequence[SessionResult]) -> _ParseFigures:
    """Counts functions that parse with their prompt, and those that were cut off."""
    functions = [first_function(text.text) for text in texts]
    are_cut_off = (
        function == text.text and text.finish_reason is FinishReason.LENGTH
        for function, text in zip(functions, texts, strict=True)
    )
    parsed = map(is_python, prompts, functions)
    return _ParseFigures(sum(parsed), sum(are_cut_off), len(prompts))
