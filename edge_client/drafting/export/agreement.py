"""Chooses an export's precision: the smallest that agrees with the float model on text.

Agreement is the mean, over a text's tokens, of Σ min(p, q) between the float model's probabilities p and the export's
q: the chance that rejection sampling accepts a token which the export drafted, were the float model the target
(Leviathan et al. 2023, §3.1). Both read the text itself, at the temperature that sessions sample at by default.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.exporter import BuiltGraph, Source, write_draft
from outrider.edge_client.drafting.export.precision import FLOAT32, INT4, PRECISIONS
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.runner import OnnxRunner

Rows = NDArray[np.float32]  # [num_tokens, vocabulary]

MAX_LOSS = 0.02  # of acceptance against itself that a smaller precision may cost
MAX_MEASURED_PARAMETERS = 250_000_000  # in float32 1 GB to write, load and run; larger ones stay INT4
NUM_PASSAGES, PASSAGE_TOKENS = 16, 64  # of the text that is compared on
_CHUNK_TOKENS = 16  # of a run: four rows of the whole vocabulary are kept for each
TEMPERATURE = 0.8  # the default of `edge-client run`


@dataclass(frozen=True, slots=True)
class Choice:
    """Says which precision was chosen, and the acceptance against the float model of those that were measured, on
    `num_tokens` tokens; none where the model is too large to be measured."""

    precision: str
    acceptance: dict[str, float]
    num_tokens: int


def choose_precision(
    source: Source, passages: Sequence[Sequence[int]], progress: Callable[[str], None] = lambda what: None
) -> tuple[BuiltGraph, Choice]:
    """Returns the graph in the smallest precision that loses at most `MAX_LOSS` on passages of token ids, else in
    float16. Raises `ModelError` for weights that are missing or misshapen."""
    graph = source.build(INT4)
    if graph.num_parameters > MAX_MEASURED_PARAMETERS:
        return graph, Choice(INT4, {}, 0)
    progress("comparing with the float model")
    wanted = list(read_passages(source, source.build(FLOAT32), passages))
    acceptance: dict[str, float] = {}
    for precision in PRECISIONS:
        progress(f"comparing {precision}")
        graph = graph if precision == INT4 else source.build(precision)
        acceptance[precision] = mean_overlap(read_passages(source, graph, passages), wanted)
        if acceptance[precision] >= 1 - MAX_LOSS:
            break
    return graph, Choice(graph.precision, acceptance, sum(map(len, passages)))


def read_passages(source: Source, graph: BuiltGraph, passages: Sequence[Sequence[int]]) -> Iterator[Rows]:
    """Yields a graph's probabilities after each token of each passage, in chunks."""
    with tempfile.TemporaryDirectory(prefix="outrider-export-") as scratch:
        write_draft(source, graph, Path(scratch))
        with OnnxDraftModel.open(Path(scratch)) as model:
            for passage in passages:
                runner, _ = model.sequence(SamplingParams(temperature=TEMPERATURE)).parts
                yield from _read(runner, passage)


def _read(runner: OnnxRunner, passage: Sequence[int]) -> Iterator[Rows]:
    for start in range(0, len(passage), _CHUNK_TOKENS):
        ids = list(passage[start : start + _CHUNK_TOKENS])
        sees_all = np.zeros((len(ids), len(ids)), np.float32)  # of the run; those after a token it never sees
        positions = range(start, start + len(ids))
        yield runner.feed_nodes(ids, positions, sees_all, start).tempered_probs.copy()


def mean_overlap(found: Iterator[Rows], wanted: Sequence[Rows]) -> float:
    """Returns the mean of Σ min(p, q) over all rows."""
    overlaps = [np.minimum(ours, theirs).sum(axis=1) for ours, theirs in zip(found, wanted, strict=True)]
    return float(np.concatenate(overlaps).mean())
