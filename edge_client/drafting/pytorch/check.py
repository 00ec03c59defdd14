"""Compares an export with the model it was made of: onnxruntime's probabilities with torch's, on its own text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.pytorch_utils import Conv1D

from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.backend import TORCH, BackendSettings
from outrider.edge_client.drafting.export.precision import round_to
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel
from outrider.edge_client.drafting.rows.kv_sequence import Runner
from outrider.edge_client.drafting.spec import DraftSpec

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
    """Holds the distance of an export from its source, and from its source with weights rounded as the export's; None
    where the export rounds heads that it filled up with zeros, whose blocks the source has not."""

    num_tokens: int
    precision: str
    from_source: Distance
    from_same_weights: Distance | None
    export_ms: float  # median of a token's run, the two in turn
    source_ms: float

    @property
    def acceptance(self) -> float:
        """Returns the mean of Σ min(p, q), which is one minus the total variation: the share of the export's drafts
        that sampling accepts where the source is the target."""
        return 1 - self.from_source.mean


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
        export_ms, source_ms = _time(
            export.sequence(_PLAIN).parts[0], source.sequence(_PLAIN).parts[0], token_ids
        )
        same_weights = None
        if _head_dim(source.network.model) == export.spec.head_dim:
            _round_weights(source.network.model, export.spec)
            same_weights = Distance.between(found, _read(source.sequence(_PLAIN).parts[0], token_ids))
        precision = export.spec.precision
    if same_weights is not None and same_weights.mean > MAX_SAME_WEIGHTS:
        raise ModelError(
            f"{out_dir} does not compute what its weights say: total variation from {hf_dir} with "
            f"weights in {precision} is {same_weights}"
        )
    distance = Distance.between(found, wanted)
    return ExportCheck(len(token_ids), precision, distance, same_weights, export_ms, source_ms)


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


def _time(export: Runner, source: Runner, token_ids: list[int]) -> tuple[float, float]:
    """Returns the median milliseconds of a token's run in each, one after the other token by token."""
    times_ms: tuple[list[float], list[float]] = [], []
    for at, token_id in enumerate(token_ids):
        for runner, own_ms in zip((export, source), times_ms, strict=True):
            start_s = time.perf_counter()
            runner.feed([token_id], at)
            own_ms.append((time.perf_counter() - start_s) * 1e3)
    export_ms, source_ms = (statistics.median(each) for each in times_ms)
    return export_ms, source_ms


def _head_dim(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _round_weights(model: Any, spec: DraftSpec) -> None:
    """Rounds all matrices as the export does; a tied one, which has two names, once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_positions = isinstance(module, torch.nn.Embedding) and module is not model.get_input_embeddings()
        if (
            not isinstance(weight, torch.nn.Parameter)
            or weight.ndim != 2
            or is_positions
            or id(weight) in seen
        ):
            continue
        seen.add(id(weight))
        precision = spec.fallbacks.get(f"{name}.weight", spec.precision)
        is_transposed = isinstance(module, Conv1D)
        rows = weight.T if is_transposed else weight
        rounded = torch.from_numpy(round_to(rows.contiguous().numpy(), precision))
        weight.copy_(rounded.T if is_transposed else rounded)
