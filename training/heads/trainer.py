"""Training heads on a frozen target: Medusa-1 (arXiv 2401.10774, section 2.2.1) and Hydra (arXiv 2402.05109).

The head at index k learns the target's own distribution of the token k + 2 places after t, which is the target's row at
t + k + 1: forward KL, weighted 0.8^(k+1) as in Medusa, on the corpus and on text that the target wrote (its
self-distillation). Hydra's heads see the embeddings of the true tokens between.

The target computes its states in the step. To keep them instead would take 2 bytes × hidden_size × tokens (0.8 GB a
million tokens of the embedded target) and save what is the smaller part of a step: a row of the output embedding costs
more than a decoder layer, and each head needs one.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
from outrider.training.heads.directory import CONFIG_FILE, read_heads, write_heads
from outrider.training.heads.model import Heads, HeadsShape


@dataclass(frozen=True)
class HeadsConfig(WritingConfig):
    """Holds everything that decides the run, beside the target and the data."""

    shape: HeadsShape = field(default_factory=HeadsShape)
    minutes: float = 25.0
    phases: tuple[Phase, ...] = (Phase(0.0, length=256, rows=8),)
    schedule: Schedule = field(default_factory=lambda: Schedule(decay_start=0.5))
    rates: Rates = field(default_factory=lambda: Rates(muon=0.02))
    target_share: float = 0.7
    target_text_tokens: int = 393_216
    sample_rows: int = 128
    decay: float = 0.8
    """Weight of a head's loss, relative to the head's before it."""
    rows_share: float = 1.0
    """Share of a batch's positions that are learnt, at random."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.target_share <= 1:
            raise ValueError(f"--target-share {self.target_share}: give a share from 0 to 1")
        if not 0 < self.rows_share <= 1:
            raise ValueError(f"--rows-share {self.rows_share}: give a share above 0 and at most 1")
        if any(phase.length <= self.shape.num_heads for phase in self.phases):
            raise ValueError(f"--length: windows longer than the {self.shape.num_heads} heads look ahead")


class HeadsTrainer(Trainer):
    """Owns the target, the heads and the text that the target wrote.

    Args:
        heads_dir: heads to train on; None for new ones of `config.shape`.
        text_of: the directory of an earlier run on this target, whose text is learnt from.
    """

    name = "heads"
    config: HeadsConfig

    def __init__(
        self,
        config: HeadsConfig,
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
        size = self.target.config.hidden_size
        super().__init__(config, _first_heads(config.shape, size, heads_dir), out, group)
        if heads_dir is not None:
            self._begin_after(heads_dir / "training.json")
        num_ids = num_common_ids(target_dir, self.target)
        self.output_embedding = self.target.get_output_embeddings().weight[:num_ids]
        self.corpus = Batches(stream, seed=config.seed, epoch=1)
        writer = Writer(config, self.corpus, num_ids, self.compute, group)
        self.target_text = TargetText(config, writer, self.target)
        if text_of is not None:
            self.target_text.rows = _written_before(text_of, target_dir)

    def _take_model(self, model: Heads) -> None:
        self.model = self.heads = model.to(self.compute.device)
        self.optimizers = make_optimizers(self.model, self.config.rates, self.group)

    def _prepare(self) -> int:
        return self.target_text.write(self.state.step) if self.target_text.is_short else 0

    def _batch(self, phase: Phase) -> npt.NDArray[np.int64]:
        source = self.target_text if self._draw() < self.config.target_share else self.corpus
        return source.next(phase.length, phase.rows)

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        hidden, embedded = self._features(ids[:, :-1])
        places = self._places(ids.size(0), ids.size(1) - 1).to(hidden.device)
        loss = self._heads_loss(hidden, embedded, places, hidden[places])
        return loss, loss.detach()

    def _heads_loss(self, hidden: Tensor, embedded: Tensor, places: Tensor, teacher: Tensor) -> Tensor:
        """Returns the weighted mean of the heads' losses: each learns `teacher`, the rows at `places`, from the states
        as far before as it looks ahead."""
        total, weights, weight = hidden.new_zeros(()), 0.0, self.output_embedding
        for index in range(self.config.shape.num_heads):
            start = places - index - 1
            following = [embedded[start + step] for step in range(1, index + 2)] if len(embedded) else []
            with self.compute.autocast():
                rows = self.heads.row(index, hidden[start], following).to(hidden.dtype)
            scale = self.config.decay ** (index + 1)
            total = total + scale * linear_divergence("fkl", rows, weight, teacher, weight)
            weights += scale
        return total / weights

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states and, where heads see tokens, their embeddings: [rows * length, size]
        both."""
        hidden = self.compute.last_hidden(self.target, inputs)
        if not self.heads.sees_tokens:
            return hidden, hidden.new_empty(0)
        embedded: Tensor = self.target.get_input_embeddings()(inputs.flatten())
        return hidden, embedded.to(hidden.dtype)

    def _places(self, num_rows: int, length: int) -> Tensor:
        """Returns the positions, of rows laid end to end, whose distribution is learnt: each has as many before it
        in its row as there are heads."""
        every = torch.arange(num_rows * length).view(num_rows, length)
        every = every[:, self.config.shape.num_heads :].flatten()
        if self.config.rows_share == 1:
            return every
        rng = np.random.default_rng([self.config.seed, self.state.step, self.group.rank])
        count = max(1, round(len(every) * self.config.rows_share))
        return every[torch.from_numpy(np.sort(rng.choice(len(every), count, replace=False)))]

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

    def _save_heads(self) -> dict[str, Any]:
        """Saves what was trained, and returns the figures of this kind of training."""
        if self.group.is_first:
            write_heads(self.heads, self.target_dir, self.out)
        return {}


def _first_heads(shape: HeadsShape, size: int, directory: Path | None) -> Heads:
    if directory is None:
        return Heads(shape, size)
    heads, _ = read_heads(directory)
    if heads.shape != shape or heads.size != size:
        raise ValueError(
            f"--heads {directory} are {heads.size} wide, {heads.shape}; asked for: {size}, {shape}"
        )
    return heads


def _written_before(directory: Path, target_dir: Path) -> list[Tensor]:
    """Returns what the target wrote in an earlier run. Raises ValueError naming the directory."""
    saved = load_checkpoint(directory / "checkpoint.pt")
    if saved is None or not (directory / CONFIG_FILE).is_file():
        raise ValueError(f"--text-of {directory} has no finished run: give the --out of one")
    if read_config(directory)["outrider"]["target_fingerprint"] != target_fingerprint(target_dir):
        raise ValueError(f"--text-of {directory} was written by another target than --target {target_dir}")
    rows: list[Tensor] = saved["target_rows"]
    return rows
