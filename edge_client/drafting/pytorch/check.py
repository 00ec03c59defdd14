"""Compares an export with the model it was made of: onnxruntime's probabilities with torch's, on its own text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.backend import TORCH, BackendSettings
from outrider.edge_client.drafting.export.quantize import fake_quantize
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel
from outrider.edge_client.drafting.rows.kv_sequence import Runner

NUM_TOKENS = 128  # compared, each fed alone, as a draft is
# Of the mean total variation where both have the same weights. Activations in int8 move up to a few per cent of
# probability; a wrong rotation, norm or bias more than half of it (tests/edge_client/drafting/test_export_accuracy.py).
MAX_SAME_WEIGHTS = 0.1

Probs = NDArray[np.float32]  # [num_tokens, vocabulary]


@dataclass(frozen=True, slots=True)
class Distance:
    """Says how far two models' probabilities are from each other, over the tokens of a text."""

    mean: float  # total variation: the probability that is elsewhere
    largest: float
    same_choice: float  # share of tokens after which both have the same likeliest one

    @classmethod
    def between(cls, ours: Probs, theirs: Probs) -> Distance:
        """Returns the distance of two arrays of rows."""
        variation = np.abs(ours - theirs).sum(axis=1) / 2
        is_same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        return cls(float(variation.mean()), float(variation.max()), float(is_same.mean()))

    def __str__(self) -> str:
        return f"{self.mean:.4f} mean, {self.largest:.4f} largest, same first choice {self.same_choice:.0%}"


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """Holds the distance of an export from its source, and from its source with the export's own INT4 weights."""

    num_tokens: int
    from_source: Distance
    from_same_weights: Distance


def check_export(hf_dir: Path, out_dir: Path, first_layers: int | None = None) -> ExportCheck:
    """Returns how far the export in `out_dir` is from the model of `hf_dir`, or from its first layers.

    Raises `ModelError` where it computes something else than its weights say, or a directory cannot be loaded.
    """
    with (
        TorchDraftModel.open(
            hf_dir, BackendSettings(TORCH, "cpu", "float32"), first_layers=first_layers
        ) as source,
        OnnxDraftModel.open(out_dir) as export,
    ):
        token_ids, wanted = _write(source, min(NUM_TOKENS, export.max_context))
        found = _read(export.sequence(_PLAIN).parts[0], token_ids)
        _round_weights(source.network.model)
        rounded = _read(source.sequence(_PLAIN).parts[0], token_ids)
    check = ExportCheck(len(token_ids), Distance.between(found, wanted), Distance.between(found, rounded))
    if check.from_same_weights.mean > MAX_SAME_WEIGHTS:
        raise ModelError(
            f"{out_dir} does not compute what its weights say: total variation from {hf_dir} with "
            f"the same INT4 weights is {check.from_same_weights}"
        )
    return check


_PLAIN = SamplingParams(temperature=1.0)


def _write(model: TorchDraftModel, num_tokens: int) -> tuple[list[int], Probs]:
    """Returns a text that the model sampled, and its probabilities after each token."""
    runner, _ = model.sequence(_PLAIN).parts
    chance = np.random.default_rng(0)
    token_ids, probs = [0], []
    for position in range(num_tokens):
        row = runner.feed(token_ids[-1:], position).probs[0].copy()
        probs.append(row)
        token_ids.append(min(int(np.searchsorted(row.cumsum(), chance.random())), len(row) - 1))
    return token_ids[:num_tokens], np.stack(probs)


def _read(runner: Runner, token_ids: list[int]) -> Probs:
    rows: Iterator[Probs] = (runner.feed([each], at).probs[0].copy() for at, each in enumerate(token_ids))
    return np.stack(list(rows))


def _round_weights(model: torch.nn.Module) -> None:
    """Rounds all matrices as the export does."""
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.copy_(torch.from_numpy(fake_quantize(weight.numpy())))
