"""Training on a frozen target's rows: the target, the text that it wrote, and what a run of any head shares.

The target computes its states in the step. To keep them instead would take 2 bytes × hidden_size × tokens (0.8 GB a
million tokens of the embedded target) and save what is the smaller part of a step: a row of the output embedding costs
more than a decoder layer, and each drafted token needs one.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.common.models.fingerprint import target_fingerprint
from outrider.training.common.checkpoint import load_checkpoint
from outrider.training.common.loss import linear_divergence
from outrider.training.common.optim import Rates, make_optimizers
from outrider.training.common.schedule import Phase, Schedule
from outrider.training.common.trainer import Trainer
from outrider.training.common.workers import SOLO, Group
from outrider.training.data.streams import Batches, Tokens
from outrider.training.draft.drafts import load_target, num_common_ids, read_config
from outrider.training.draft.written import TargetText, Writer, WritingConfig
from outrider.training.heads.directory import CONFIG_FILE


@dataclass(frozen=True)
class FrozenTargetConfig(WritingConfig):
    """Holds what decides a run of any head, beside the head itself, the target and the data."""

    minutes: float = 25.0
    phases: tuple[Phase, ...] = (Phase(0.0, length=256, rows=8),)
    schedule: Schedule = field(default_factory=lambda: Schedule(decay_start=0.5))
    rates: Rates = field(default_factory=lambda: Rates(muon=0.02))
    target_share: float = 0.7
    target_text_tokens: int = 393_216
    sample_rows: int = 128
    decay: float = 0.8
    """Weight of the loss of a drafted token, relative to that before it."""
    rows_share: float = 0.5
    """Share of a batch's positions that are learnt, at random. Medusa's loss on the embedded target after 60 s of one
    thread: 2.39, of all positions 2.61, of a quarter, which takes half as much text again, 2.33."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.target_share <= 1:
            raise ValueError(f"--target-share {self.target_share}: give a share from 0 to 1")
        if not 0 < self.rows_share <= 1:
            raise ValueError(f"--rows-share {self.rows_share}: give a share above 0 and at most 1")


class FrozenTargetTrainer(Trainer):
    """Owns the target, the model that learns from it and the text that the target wrote.

    Args:
        heads_dir: what to train on, where the kind of head can be; None for new ones.
        text_of: the directory of an earlier run on this target, whose text is learnt from.
    """

    name = "heads"
    config: FrozenTargetConfig

    def __init__(
        self,
        config: FrozenTargetConfig,
        target_dir: Path,
        stream: Tokens,
        out: Path,
        group: Group = SOLO,
        *,
        heads_dir: Path | None = None,
        text_of: Path | None = None,
    ) -> None:
        torch.manual_seed(config.seed)
        self.target_dir = target_dir
        self.target = config.compute.place(load_target(target_dir, config.compute.dtype))
        super().__init__(config, self._make_model(config, heads_dir), out, group)
        if heads_dir is not None:
            self._begin_after(heads_dir / "training.json")
        num_ids = num_common_ids(target_dir, self.target)
        self.output_embedding = self.target.get_output_embeddings().weight[:num_ids]
        self.corpus = Batches(stream, seed=config.seed, epoch=1)
        writer = Writer(config, self.corpus, num_ids, self.compute, group)
        self.target_text = TargetText(config, writer, self.target)
        if text_of is not None:
            self.target_text.rows = _written_before(text_of, target_dir)

    @abstractmethod
    def _make_model(self, config: Any, heads_dir: Path | None) -> nn.Module:
        """Returns the model that learns, for `self.target`."""

    @abstractmethod
    def _save_heads(self) -> dict[str, Any]:
        """Saves what was trained, and returns the figures of this kind of training."""

    def _divergence(self, rows: Tensor, teacher: Tensor) -> Tensor:
        """Returns the mean forward KL of what the output embedding scores, [num_rows, size] both."""
        weight = self.output_embedding
        return linear_divergence("fkl", rows.to(teacher.dtype), weight, teacher, weight)

    def _chosen(self, places: Tensor) -> Tensor:
        """Returns the places [n] that are learnt in this step: `rows_share` of them."""
        if self.config.rows_share == 1:
            return places
        rng = np.random.default_rng([self.config.seed, self.state.step, self.group.rank])
        count = max(1, round(len(places) * self.config.rows_share))
        return places[torch.from_numpy(np.sort(rng.choice(len(places), count, replace=False)))]

    def _take_model(self, model: Any) -> None:
        self.model = model.to(self.compute.device)
        self.optimizers = make_optimizers(self.model, self.config.rates, self.group)

    def _prepare(self) -> int:
        return self.target_text.write(self.state.step) if self.target_text.is_short else 0

    def _batch(self, phase: Phase) -> npt.NDArray[np.int64]:
        source = self.target_text if self._draw() < self.config.target_share else self.corpus
        return source.next(phase.length, phase.rows)

    def _extra_state(self) -> dict[str, Any]:
        return {"corpus": (self.corpus.epoch, self.corpus.cursor), **self.target_text.state()}

    def _take_extra_state(self, saved: dict[str, Any]) -> None:
        self.corpus.epoch, self.corpus.cursor = saved["corpus"]
        self.target_text.take_state(saved)

    def _finish(self) -> dict[str, Any]:
        return {
            **self._save_heads(),
            "sampled_tokens": self.target_text.num_tokens,
            "loss": float(np.mean([entry["loss"] for entry in self.history[-50:]])),
        }


def _written_before(directory: Path, target_dir: Path) -> list[Tensor]:
    """Returns what the target wrote in an earlier run. Raises ValueError naming the directory."""
    saved = load_checkpoint(directory / "checkpoint.pt")
    if saved is None or not (directory / CONFIG_FILE).is_file():
        raise ValueError(f"--text-of {directory} has no finished run: give the --out of one")
    if read_config(directory)["outrider"]["target_fingerprint"] != target_fingerprint(target_dir):
        raise ValueError(f"--text-of {directory} was written by another target than --target {target_dir}")
    rows: list[Tensor] = saved["target_rows"]
    return rows
